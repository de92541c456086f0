"""Arguments and results that operations and their kernels share."""

from __future__ import annotations

from typing import NamedTuple

import torch


class RowOptions(NamedTuple):
    """What the row pass needs besides tensors."""

    seed: int
    step: int
    vocab_size: int
    temperature: float
    disallow_correct: bool
    with_gradient: bool


class RowStats(NamedTuple):
    """What the row pass finds in each row: unweighted loss, most likely token, drawn token."""

    loss_M: torch.Tensor
    best_M: torch.Tensor
    sampled_M: torch.Tensor


class DropoutKey(NamedTuple):
    """What the dropped elements depend on, besides their row and place in it."""

    probability: float  # of an element to be dropped; 0 draws nothing
    seed: int
    step: int
    site: int  # a number of its own for each place in the model that drops
