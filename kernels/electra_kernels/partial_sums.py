"""The last sum of a backward pass: parameter gradients of strips of tokens, one strip a program, added together."""

from __future__ import annotations

import torch


def sum_of_strips(partial_PH: torch.Tensor) -> torch.Tensor:
    """Partial sums added in fp64, as fp32: one rounding for any number P of strips; 8 MB are read at P = H = 1024."""
    return partial_PH.sum(0, dtype=torch.float64).float()
