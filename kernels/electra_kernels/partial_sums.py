"""Add the partial sums of a parameter's gradient that the programs (thread blocks) of a backward kernel computed."""

from __future__ import annotations

import torch


def sum_of_strips(partials: torch.Tensor, programs_axis: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the sum over the P programs of a kernel, added in fp64 and converted to `dtype`; two GPU launches.

    Each program (thread block) handles some of the tokens, its strip.

    Args:
        partials: fp32 with an axis of length P, for example [P, H], or [2, P, H] for two parameters at once.

    Returns:
        The sums without that axis, for example [H] or [2, H].
    """
    return partials.sum(programs_axis, dtype=torch.float64).to(dtype)
