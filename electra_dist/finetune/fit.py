"""The loop: a task model, examples as ids, and nothing else. One process, one device.

Guarantee: what step t sees (rows, dropout) depends on (seed, t) and the settings only, so a seed that was interrupted
and starts again ends in the same numbers: on a CPU with as many threads bit for bit. Rows come from one infinite
sequence, a new keyed permutation each pass; step t is its rows [t * batch, (t + 1) * batch), and there are
int(examples * epochs / batch) steps, at least one.

How: fp32 on a CPU; on a GPU fp32 weights and bf16 autocast. Batches are padded to their longest row and that to a
multiple of 8. Prediction goes through the rows by length.

Cost: one forward and backward of the encoder a step; the loss is looked at every 16 steps, so the device is rarely
waited for.

Where it stops: on a GPU the order of some sums is not fixed, so last bits may differ between two runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from electra_kernels.keyed_random import Purpose, derive_seed

from electra_dist.finetune.config import FinetuneConfig
from electra_dist.finetune.heads import TaskModel
from electra_dist.finetune.layerwise import layerwise_adamw, schedule, set_step
from electra_dist.model.encoder import Noise

T = TypeVar("T")
Ids = Sequence[Sequence[int]]
Progress = Callable[[str, int, int], None]  # what is being done, parts done, parts in all

_KEYED_DROPOUT = 2**32 - 1  # no step: apart from the seeds of torch's own dropout
_PAD_TO = 8
_LOOK_EVERY = 16  # steps between looks at the loss


class Examples(NamedTuple):
    """Rows of ids without padding, and their targets."""

    ids: Ids
    target_NK: torch.Tensor  # int64, or fp32 for numbers


class Diverged(Exception):
    """The loss is no number any more."""


def quiet(what: str, done: int, total: int) -> None:
    """Progress for callers that show none."""


def count_steps(num_examples: int, settings: FinetuneConfig) -> int:
    """Steps of a run."""
    return max(1, int(num_examples * settings.epochs / settings.batch))


def fit(
    model: TaskModel,
    num_layers: int,
    examples: Examples,
    settings: FinetuneConfig,
    seed: int,
    progress: Progress = quiet,
) -> float:
    """Train `model` where it is; returns the mean loss of the last tenth of the steps.

    Raises:
        Diverged: the loss became NaN or infinite; names the step.
    """
    device = next(model.parameters()).device
    num_steps = count_steps(len(examples.ids), settings)
    optimizer = layerwise_adamw(model, num_layers, settings)
    rows = row_sequence(len(examples.ids), seed)
    losses: list[torch.Tensor] = []
    model.train()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for step in range(num_steps):
            chosen = [next(rows) for _ in range(settings.batch)]
            ids_BS = padded([examples.ids[row] for row in chosen], model.backbone.special.pad).to(device)
            target_BK = examples.target_NK[chosen].to(device)
            torch.manual_seed(derive_seed(seed, Purpose.DROPOUT, step))
            row_B = torch.arange(len(chosen), device=device)
            noise = Noise(derive_seed(seed, Purpose.DROPOUT, _KEYED_DROPOUT), step, row_B, "auto")
            with autocast(device):
                loss = model(ids_BS, target_BK, noise)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm, foreach=True)
            set_step(optimizer, schedule(step, num_steps, settings))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            if step % _LOOK_EVERY == 0 or step == num_steps - 1:
                _check(losses, step)
                progress("train", step + 1, num_steps)
    last = losses[-max(1, num_steps // 10) :]
    return float(torch.stack(last).mean())


@torch.no_grad()
def predict(
    function: Callable[[torch.Tensor], T],
    ids: Ids,
    pad: int,
    batch: int,
    device: torch.device,
    progress: Progress = quiet,
) -> Iterator[tuple[list[int], T]]:
    """(numbers of the rows, what `function` makes of their padded ids [B, S]) until every row has been seen once."""
    by_length = sorted(range(len(ids)), key=lambda row: -len(ids[row]))
    for start in range(0, len(ids), batch):
        rows = by_length[start : start + batch]
        with autocast(device):
            output = function(padded([ids[row] for row in rows], pad).to(device))
        progress("predict", start + len(rows), len(ids))
        yield rows, output


def row_sequence(num_examples: int, seed: int) -> Iterator[int]:
    """Row numbers without end: one permutation of all after another."""
    epoch = 0
    while True:
        generator = np.random.default_rng(derive_seed(seed, Purpose.ROW_ORDER, epoch))
        yield from generator.permutation(num_examples).tolist()
        epoch += 1


def padded(rows: Ids, pad: int) -> torch.Tensor:
    """[B, S] int64."""
    length = -(-max(map(len, rows)) // _PAD_TO) * _PAD_TO
    return torch.tensor([[*row, *[pad] * (length - len(row))] for row in rows])


def autocast(device: torch.device) -> torch.autocast:
    """bf16 on a GPU, nothing on a CPU."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def _check(losses: Sequence[torch.Tensor], step: int) -> None:
    for back, loss in enumerate(torch.stack(list(losses[-_LOOK_EVERY:])).tolist()):
        if not math.isfinite(loss):
            first = step + 1 - min(_LOOK_EVERY, len(losses)) + back
            raise Diverged(f"the loss is {loss} at step {first}")
