"""Adds the parameter gradients that the programs (thread blocks) of a backward kernel computed separately."""

from __future__ import annotations

import torch


def sum_of_strips(partial_PH: torch.Tensor) -> torch.Tensor:
    """Return the sum over the P programs of a kernel, added in fp64 and rounded once to fp32.

    Each program (thread block) handles one strip of tokens, and row p of `partial_PH` holds the gradient of strip p.
    Without atomics, the order of the additions does not change from run to run. For two parameters with
    P = H = 1024, it reads 8 MB.

    Args:
        partial_PH: fp32 [P, H], or [P] for a single parameter.

    Returns:
        fp32 [H], or a scalar.
    """
    return partial_PH.sum(0, dtype=torch.float64).float()
