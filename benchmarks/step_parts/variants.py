"""Variants of the training step that `step.py` compares: ours and Hugging Face's, with the step that both take.

Our variant uses our module and our optimizer; the Hugging Face variant uses its modules and torch's AdamW.

Shapes: B rows, S tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
import torch
from step_parts.modern_rival import ModernHuggingFace
from step_parts.rival import HuggingFace

from electra_dist.config import Config
from electra_dist.corpus.row_packing import make_rows
from electra_dist.engine.optimizer import build_optimizer
from electra_dist.model.row_layout import SpecialIds
from electra_dist.model.towers import ElectraTowers
from electra_dist.objectives.base import StepInput, Sums, loss_counts
from electra_dist.objectives.build_objective import build_objective

BATCH = 16
SPECIAL = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)  # Special token ids of the synthetic rows.
_LEARNING_RATE = 1e-4


class StepVariant(NamedTuple):
    """One side of the comparison: a module, its optimizer, and its joint forward."""

    module: torch.nn.Module
    optimizer: torch.optim.Optimizer
    # (ids_BS, step) -> (loss to minimise, mean MLM loss, mean RTD loss), all scalars.
    forward: Callable[[torch.Tensor, int], tuple[torch.Tensor, ...]]


def ours(config: Config, special: SpecialIds) -> StepVariant:
    """Return our side: the module and the optimizer that the engine trains, without DeepSpeed around them.

    Args:
        config: Config of the model, the objective and the optimizer.
        special: Special token ids of the rows that it will train on.
    """
    module = build_objective(config.model, config.objective, special, config.seed)
    optimizer, _ = build_optimizer(module, config.optimizer, "cpu")

    def forward(ids_BS: torch.Tensor, step: int) -> tuple[torch.Tensor, ...]:
        scales = 1.0 / loss_counts(ids_BS, special, config.objective).sum(0)
        out = module(StepInput(ids_BS, torch.arange(len(ids_BS)), step, config.seed, *scales))
        sums = Sums(*out.sums)
        return out.loss, sums.mlm_loss_sum / sums.mlm_weight, sums.rtd_loss_sum / sums.rtd_weight

    return StepVariant(module, optimizer, forward)


def hugging_face(config: Config, towers: ElectraTowers, *, gathered: bool) -> StepVariant:
    """Return Hugging Face's side, which starts from the same weights and has torch's AdamW (foreach).

    Args:
        config: Config of the objective and the optimizer.
        towers: Our model, whose weights are copied.
        gathered: Whether the generator's head is computed at the masked slots only, instead of at every position.
    """
    rival = ModernHuggingFace if config.model.architecture == "modern" else HuggingFace
    module = rival(towers, config.objective, SPECIAL, gathered=gathered)
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
    """Return the CPU autocast context of a precision: bfloat16 for "bf16", switched off for "fp32"."""
    return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")


def take_step(
    way: StepVariant, ids_BS: torch.Tensor, step: int, precision: str, clip_norm: float
) -> tuple[float, float]:
    """Take one training step: forward, backward, clipping and update.

    Args:
        way: The side that learns; its parameters change.
        ids_BS: [B, S] int64 token ids.
        step: Number of the step, which keys the random draws.
        precision: "fp32" or "bf16".
        clip_norm: Largest norm of the gradient.

    Returns:
        The mean MLM loss and the mean RTD loss before the update.
    """
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
    """Return rows of random token ids, [num_rows, S] int64; equal arguments give equal rows.

    Args:
        config: Config with the length S of a row and the size of the vocabulary.
        packing: "rows" packs several examples into a row; "none" puts one example into each and pads it.
        num_rows: Rows to return.
        full_share: Share of the examples that have length S; the others have any length from 5 to S.
    """
    rng = np.random.default_rng(0)
    seq_len = config.data.seq_len
    examples_per_row = 1 if packing == "none" else 4  # Packing may need several examples to fill a row.
    examples = []
    for _ in range(num_rows * examples_per_row):
        length = seq_len if rng.random() < full_share else int(rng.integers(5, seq_len + 1))
        example = rng.integers(5, config.model.vocab_size, length)
        example[0], example[length // 2], example[-1] = SPECIAL.cls, SPECIAL.sep, SPECIAL.sep
        examples.append(example.tolist())
    rows = make_rows(examples, seq_len, SPECIAL.pad, np.uint16, packing)
    return torch.from_numpy(rows[:num_rows].astype(np.int64))
