"""Types of arguments and results that the plain-PyTorch operations and their Triton kernels share.

They are in a file of their own so that both sides can import them: a kernel's file is not imported without Triton.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class RowOptions(NamedTuple):
    """Scalar arguments of the masked-token head's row pass: loss, sample and gradient of each row of logits.

    Attributes:
        seed: Seed of the run, the key of the sampling noise.
        step: Global step, in [0, 2**32).
        vocab_size: Number of tokens that exist; columns of the logits from there on are padding.
        temperature: Divisor of the logits before sampling, a number or a float64 scalar tensor on the device of the
            logits. The loss does not use it.
        disallow_correct: Whether the true token of a row is excluded from sampling.
        with_gradient: Whether the gradient of the logits overwrites the logits.
    """

    seed: int
    step: int
    vocab_size: int
    temperature: float | torch.Tensor
    disallow_correct: bool
    with_gradient: bool


class RowStats(NamedTuple):
    """Results of the row pass of the masked-token head, one element for each of M rows.

    Attributes:
        loss_M: Cross-entropy of the true token, not multiplied by the row's weight.
        best_M: Most likely token, int64.
        sampled_M: Token drawn from the softmax, int64.
    """

    loss_M: torch.Tensor
    best_M: torch.Tensor
    sampled_M: torch.Tensor


class DropoutKey(NamedTuple):
    """Dropout probability, and the key of the random numbers that decide which elements are dropped.

    An element's random number is a function of seed, step, site (the place in the model that applies dropout), the
    row's number within the global batch, and the element's place in the row.

    Attributes:
        probability: Chance of an element to be dropped, in [0, 1). At 0, no random number is drawn.
        seed: Seed of the run.
        step: Global step, in [0, 2**32).
        site: Number of the place in the model that applies dropout, from 0. Two places of a tower must not share one.
    """

    probability: float
    seed: int
    step: int
    site: int
