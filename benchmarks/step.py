"""How fast is our joint training step on the CPU, beside Hugging Face's?

It takes configs/small.yaml at length 128, 16 rows, fp32 and bf16.

Guarantee: before anything is timed, our step and Hugging Face's compute their losses without dropout on the same
samples. The benchmark ends if these differ by more than 1e-4 (fp32) or 3e-2 (bf16), relative.

How: a step consists of masks, generator, sample, discriminator, backward of both losses, clipping and AdamW, with the
dropout of the config. bf16 is autocast over fp32 parameters on both sides.

Our way is the module and the optimizer that the engine trains. Hugging Face's starts from the same weights and has
torch's AdamW.

Limits: one process, without DeepSpeed and without a loader; rows hold random ids. `electra-dist speed` says where the
time of a step goes, and how long its matrix products take alone.

Shapes: B rows, S tokens.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from electra_kernels.operation_types import SpecialIds
from hugging_face import HuggingFace
from measure import Found, Json, ResultLine, alternate, format_summary, print_table, ratio, small_config

from electra_dist.config import Config
from electra_dist.engine.optimizer import build_optimizer
from electra_dist.model.fused_layer import HAS_BF16_PRODUCTS
from electra_dist.model.towers import ElectraTowers
from electra_dist.objectives.base import StepInput, Sums
from electra_dist.objectives.build_objective import build_objective
from electra_dist.objectives.corruption import CorruptingObjective

ROUNDS = 5
BATCH = 16
SPECIAL = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)  # Special token ids of the synthetic rows.
AGREEMENT = {"fp32": 1e-4, "bf16": 3e-2}  # Largest relative difference of the losses of two ways.
_LEARNING_RATE = 1e-4


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=2, help="torch's threads (default: %(default)s)")


def measure(arguments: argparse.Namespace) -> Found:
    threads = 1 if arguments.smoke else arguments.threads  # The toy model is too small for two threads.
    torch.set_num_threads(threads)
    config = small_config(arguments.smoke)
    facts = f"{config.data.seq_len} tokens x {BATCH} rows, {threads} thread(s)"
    found: Json = {}
    for precision in ("fp32", "bf16"):
        torch.manual_seed(0)
        # Without bf16 products in hardware, a Hugging Face step takes about a minute.
        is_slow = precision == "bf16" and not HAS_BF16_PRODUCTS and not arguments.smoke
        found[precision] = compare(config, precision, 1 if is_slow else arguments.rounds, 0 if is_slow else 1)
    lines = [report(ways, precision, facts) for precision, ways in found.items()]
    return Found(lines, {"threads": threads, **found})


def compare(config: Config, precision: str, rounds: int, warm_up: int) -> Json:
    """Time all ways in turn, on full rows of one example each; return seconds, rate, ratio and losses by way."""
    batches = synthetic_rows(config, BATCH * (rounds + warm_up)).split(BATCH)
    ways = {"ours": ours(config)}
    towers: ElectraTowers = ways["ours"].module.towers  # type: ignore[assignment]
    ways["Hugging Face"] = hugging_face(config, towers, gathered=False)
    ways["Hugging Face, gathered"] = hugging_face(config, towers, gathered=True)
    losses_without_dropout = check_agreement(config, ways, batches[0], precision)
    losses: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}

    def step(name: str) -> None:
        number = len(losses[name])
        losses[name].append(take_step(ways[name], batches[number], number, precision, config.optimizer.clip_norm))

    seconds = alternate({name: functools.partial(step, name) for name in ways}, rounds, warm_up)
    return {
        name: {
            "seconds": seconds[name],
            "tokens_per_s": batches[0].numel() / statistics.median(seconds[name]),
            "ratio": ratio(seconds[name], seconds["ours"]),
            "losses_without_dropout": losses_without_dropout[name],
            "losses": losses[name],
        }
        for name in ways
    }


def report(found: Json, precision: str, facts: str) -> ResultLine:
    """Print the table of one precision; return its row for docs/results.md."""
    print(f"\n{precision}, {facts}, a CPU {'with' if HAS_BF16_PRODUCTS else 'without'} bf16 products")
    rows = []
    for name, way in found.items():
        first, last = (f"{mlm:.3f} / {rtd:.4f}" for mlm, rtd in (way["losses"][0], way["losses"][-1]))
        seconds = format_summary(way["seconds"], ".3f")
        rows.append([name, seconds, f"{way['tokens_per_s']:,.0f}", format_summary(way["ratio"]), f"{first} to {last}"])
    print_table(["", "s a step", "tokens/s", "time / ours", "mlm / rtd, first to last"], rows)
    published, gathered = (found[name]["ratio"]["median"] for name in ("Hugging Face", "Hugging Face, gathered"))
    against = f"{published:.2f} x Hugging Face as published, {gathered:.2f} x with its head at the masked slots only"
    value = f"{found['ours']['tokens_per_s']:,.0f} tokens/s"
    return ResultLine(f"joint step of ELECTRA-Small, {precision}, {facts}", value, against)


class Way(NamedTuple):
    """One side of a comparison: a module, its optimizer, and its joint forward."""

    module: torch.nn.Module
    optimizer: torch.optim.Optimizer
    # (ids_BS, step) -> (loss to minimise, mean MLM loss, mean RTD loss), all scalars.
    forward: Callable[[torch.Tensor, int], tuple[torch.Tensor, ...]]


def ours(config: Config) -> Way:
    module = build_objective(config.model, config.objective, SPECIAL, config.seed)
    optimizer, _ = build_optimizer(module, config.optimizer, "cpu")

    def forward(ids_BS: torch.Tensor, step: int) -> tuple[torch.Tensor, ...]:
        scales = 1.0 / module.loss_counts(ids_BS).sum(0)
        out = module(StepInput(ids_BS, torch.arange(len(ids_BS)), step, config.seed, *scales))
        sums = Sums(*out.sums)
        return out.loss, sums.mlm_loss_sum / sums.mlm_weight, sums.rtd_loss_sum / sums.rtd_weight

    return Way(module, optimizer, forward)


def hugging_face(config: Config, towers: ElectraTowers, *, gathered: bool) -> Way:
    """Return Hugging Face's step with the weights of `towers`; `gathered`: its head sees the masked positions only."""
    module = HuggingFace(towers, config.objective, SPECIAL, gathered=gathered)
    optimizer = torch.optim.AdamW(
        module.parameters(),
        betas=(config.optimizer.beta1, config.optimizer.beta2),
        eps=config.optimizer.eps,
        weight_decay=config.optimizer.weight_decay,
        foreach=True,
    )

    def forward(ids_BS: torch.Tensor, step: int) -> tuple[torch.Tensor, ...]:
        return module(ids_BS, torch.arange(len(ids_BS)), step, config.seed)

    return Way(module, optimizer, forward)


def autocast(precision: str) -> torch.autocast:
    """Return the CPU autocast context of a precision: bfloat16 for "bf16", switched off for "fp32"."""
    return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")


def take_step(way: Way, ids_BS: torch.Tensor, step: int, precision: str, clip_norm: float) -> tuple[float, float]:
    """Take one training step: forward, backward, clipping and update; return the MLM and the RTD loss before it."""
    with autocast(precision):
        loss, mlm, rtd = way.forward(ids_BS, step)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(way.module.parameters(), clip_norm)
    for group in way.optimizer.param_groups:
        group["lr"] = _LEARNING_RATE
    way.optimizer.step()
    way.optimizer.zero_grad()
    return mlm.item(), rtd.item()


@torch.no_grad()
def check_agreement(config: Config, ways: dict[str, Way], ids_BS: torch.Tensor, precision: str) -> dict[str, Json]:
    """Return the losses ("mlm" and "rtd") of every way without dropout; end the program if they differ from ours.

    All ways use the tokens that our generator, the first of `ways`, samples.
    """
    objective: CorruptingObjective = ways["ours"].module  # type: ignore[assignment]
    # This input is used for its masks and samples only, so its loss scales of 1.0 have no effect.
    given = StepInput(ids_BS, torch.arange(len(ids_BS)), 0, config.seed, 1.0, 1.0)
    found = {}
    for name, way in ways.items():
        way.module.eval()
        with autocast(precision):
            if name == "ours":
                _, *losses = way.forward(ids_BS, 0)
                batch = objective.batch(given)
                masking = objective.mask(batch)
                states_MH = objective.generator_states(batch, masking)
                original_BN = batch.ids_BS.gather(1, masking.position_BN)
                sampled_M = objective.predict(batch, states_MH, original_BN, masking.weight_BN).sampled_M
            else:
                _, *losses = way.module(ids_BS, given.row_B, 0, config.seed, sampled_M)
        way.module.train()
        found[name] = {"mlm": losses[0].item(), "rtd": losses[1].item()}
        for kind, value in found[name].items():
            if abs(value / found["ours"][kind] - 1) > AGREEMENT[precision]:
                sys.exit(
                    f"{precision}: the {kind} loss of {name} is {value}, ours is {found['ours'][kind]}: not the same "
                    f"work, so times cannot be compared; make both sides compute the same loss (hugging_face.py)"
                )
    return found


def synthetic_rows(config: Config, num_rows: int) -> torch.Tensor:
    """Return rows of random token ids, [num_rows, S] int64, with one example each; equal arguments give equal rows."""
    rng = np.random.default_rng(0)
    rows_RS = rng.integers(5, config.model.vocab_size, (num_rows, config.data.seq_len))
    rows_RS[:, 0] = SPECIAL.cls
    rows_RS[:, config.data.seq_len // 2] = SPECIAL.sep
    rows_RS[:, -1] = SPECIAL.sep
    return torch.from_numpy(rows_RS.astype(np.int64))
