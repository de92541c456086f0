"""What learns in `step.py`: our module with our optimizer, Hugging Face's with torch's, and a step of either.

Shapes: B rows, S tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
import torch
from step_parts.rival import HuggingFace

from electra_dist.config import Config
from electra_dist.corpus.rows import make_rows
from electra_dist.engine.optimizer import build_optimizer
from electra_dist.model.rows import SpecialIds
from electra_dist.model.towers import ElectraTowers
from electra_dist.objectives.base import StepInput, Sums, loss_counts
from electra_dist.objectives.build import build_objective

BATCH = 16
SPECIAL = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)  # of synthetic rows
_LEARNING_RATE = 1e-4


class StepVariant(NamedTuple):
    """A module that learns, and its joint forward: (ids, step) -> what is minimised, MLM mean, RTD mean."""

    module: torch.nn.Module
    optimizer: torch.optim.Optimizer
    forward: Callable[[torch.Tensor, int], tuple[torch.Tensor, ...]]


def ours(config: Config, special: SpecialIds) -> StepVariant:
    """`build_objective` and `build_optimizer`, as the engine gets them."""
    module = build_objective(config.model, config.objective, special, config.seed)
    optimizer, _ = build_optimizer(module, config.optimizer, "cpu")

    def forward(ids_BS: torch.Tensor, step: int) -> tuple[torch.Tensor, ...]:
        scales = 1.0 / loss_counts(ids_BS, special, config.objective).sum(0)
        out = module(StepInput(ids_BS, torch.arange(len(ids_BS)), step, config.seed, *scales))
        sums = Sums(*out.sums)
        return out.loss, sums.mlm_loss_sum / sums.mlm_weight, sums.rtd_loss_sum / sums.rtd_weight

    return StepVariant(module, optimizer, forward)


def hugging_face(config: Config, towers: ElectraTowers, *, gathered: bool) -> StepVariant:
    """The rival, from the same weights."""
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

    return StepVariant(module, optimizer, forward)


def autocast(precision: str) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")


def take_step(
    way: StepVariant, ids_BS: torch.Tensor, step: int, precision: str, clip_norm: float
) -> tuple[float, float]:
    """One update; both mean losses before it."""
    with autocast(precision):
        loss, mlm, rtd = way.forward(ids_BS, step)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(way.module.parameters(), clip_norm)
    for group in way.optimizer.param_groups:
        group["lr"] = _LEARNING_RATE
    way.optimizer.step()
    way.optimizer.zero_grad()
    return mlm.item(), rtd.item()


def synthetic_rows(config: Config, packing: Literal["rows", "none"], num_rows: int, full_share: float) -> torch.Tensor:
    """[num_rows, S] int64: random ids in two segments, `full_share` of them full, the rest of any length."""
    rng, seq_len = np.random.default_rng(0), config.data.seq_len
    examples = []
    for _ in range(num_rows * (1 if packing == "none" else 4)):
        length = seq_len if rng.random() < full_share else int(rng.integers(5, seq_len + 1))
        example = rng.integers(5, config.model.vocab_size, length)
        example[0], example[length // 2], example[-1] = SPECIAL.cls, SPECIAL.sep, SPECIAL.sep
        examples.append(example.tolist())
    rows = make_rows(examples, seq_len, SPECIAL.pad, np.uint16, packing)
    return torch.from_numpy(rows[:num_rows].astype(np.int64))
