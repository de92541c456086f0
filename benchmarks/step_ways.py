"""Training steps that the benchmarks of the step compare: ours and Hugging Face's.

Our way is the module and the optimizer that the engine trains. Hugging Face's starts from the same weights and has
torch's AdamW.

Shapes: B rows, S tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from electra_kernels.operation_types import SpecialIds
from hugging_face import HuggingFace
from measure import Json

from electra_dist.config import Config
from electra_dist.engine.optimizer import build_optimizer
from electra_dist.model.towers import ElectraTowers
from electra_dist.objectives.base import StepInput, Sums
from electra_dist.objectives.build_objective import build_objective
from electra_dist.objectives.corruption import CorruptingObjective

BATCH = 16
SPECIAL = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)  # Special token ids of the synthetic rows.
AGREEMENT = {"fp32": 1e-4, "bf16": 3e-2}  # Largest relative difference of the losses of two ways.
_LEARNING_RATE = 1e-4


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
        mlm, rtd = module(ids_BS, torch.arange(len(ids_BS)), step, config.seed)
        return config.objective.mlm_weight * mlm + config.objective.rtd_weight * rtd, mlm, rtd

    return Way(module, optimizer, forward)


def ours_and_rivals(config: Config) -> dict[str, Way]:
    """Return name -> way to make a step: ours, and Hugging Face's two, which start from the same weights."""
    our_way = ours(config)
    towers: ElectraTowers = our_way.module.towers  # type: ignore[assignment]
    return {
        "ours": our_way,
        "Hugging Face": hugging_face(config, towers, gathered=False),
        "Hugging Face, gathered": hugging_face(config, towers, gathered=True),
    }


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


def stepper(
    way: Way, batches: Sequence[torch.Tensor], precision: str, clip_norm: float, losses: list[Any] | None = None
) -> Callable[[], None]:
    """Return a function that takes a step on the next batch at each call, and appends its losses to `losses`."""
    numbered = iter(enumerate(batches))

    def step() -> None:
        number, ids_BS = next(numbered)
        found = take_step(way, ids_BS, number, precision, clip_norm)
        if losses is not None:
            losses.append(found)

    return step


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
                sampled_M = objective.fill(batch, masking, objective.generator_states(batch, masking)).sampled_M
            else:
                losses = list(way.module(ids_BS, given.row_B, 0, config.seed, sampled_M))
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
