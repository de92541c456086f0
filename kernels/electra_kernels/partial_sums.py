"""Add the partial sums of a parameter's gradient that the programs (thread blocks) of a backward kernel computed."""

from __future__ import annotations

import torch


def sum_of_strips(partial_PH: torch.Tensor) -> torch.Tensor:
    """Return the sum over the P programs of a kernel, added in fp64 and rounded once to fp32.

    Each program (thread block) handles some of the tokens, its strip. Row p of `partial_PH` holds the parameter's
    gradient summed over the strip of program p. There are no atomic additions, so the order of additions, and with it
    the result, is the same in every run. The sums for two parameters with P = H = 1024 read 8 MB.

    Args:
        partial_PH: fp32 [P, H], or [P] for a single parameter.

    Returns:
        fp32 [H], or a scalar.
    """
    return partial_PH.sum(0, dtype=torch.float64).float()
