"""Add up the partial sums of strips of tokens in Triton, by one launch.

A strip is the tokens of one program (thread block) of a backward kernel, which writes one row of partial sums.

Guarantee: sums are fp64, in a fixed order, so that every run gives the same bits, and are rounded to the result's
dtype.

How: one program adds up `BLOCK_C` columns of all P strips, `BLOCK_P` strips at a time. Memory's latency would limit
it, so a program has 16 KB of loads under way.

Shapes: P strips, C columns.
"""

# Kernels are in Triton's language: their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = {"BLOCK_P": 256, "BLOCK_C": 16}
NUM_WARPS = 8


@triton.jit
def sum_strips_kernel(
    partials_ptr,  # [P, C] fp32
    total_ptr,  # [C]
    num_strips,
    num_columns,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Add up BLOCK_C columns of partial sums over all their rows, BLOCK_P rows at a time; program c has block c.

    A row has the sums over one strip, which is the tokens that one program of a backward kernel handled.
    """
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    total = tl.zeros((BLOCK_P, BLOCK_C), tl.float64)
    for first in range(0, num_strips, BLOCK_P):
        strip = first + tl.arange(0, BLOCK_P)
        inside = (strip < num_strips)[:, None] & (column < num_columns)[None, :]
        offset = strip.to(tl.int64)[:, None] * num_columns + column[None, :]
        total += tl.load(partials_ptr + offset, mask=inside, other=0.0).to(tl.float64)
    # By way of fp32, because not every version of Triton converts fp64 to bf16.
    total_C = tl.sum(total, 0).to(tl.float32)
    tl.store(total_ptr + column, total_C.to(total_ptr.dtype.element_ty), mask=column < num_columns)


def sum_of_strips(partials_PC: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the sum of contiguous partial sums over their P rows, [C] in `dtype`, added in fp64 in a fixed order."""
    num_strips, num_columns = partials_PC.shape
    total_C = torch.empty(num_columns, dtype=dtype, device=partials_PC.device)
    grid: Any = (triton.cdiv(num_columns, BLOCK["BLOCK_C"]),)
    sum_strips_kernel[grid](
        partials_PC,
        total_C,
        num_strips=num_strips,
        num_columns=num_columns,
        **BLOCK,
        num_warps=NUM_WARPS,
    )
    return total_C
