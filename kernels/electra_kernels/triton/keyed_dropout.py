"""Set dropped elements to 0 and scale the others, in Triton: the kernel of keyed dropout, in both directions.

Guarantee: the kernel computes `keyed_dropout.keyed_dropout_reference` with the same random bits.

How: one program handles 1,024 neighbouring elements of one row. It draws four random numbers with each call of Philox.
Seed and step are read from device memory.

Shapes: B rows, S tokens, H hidden.
"""

# Kernels are in Triton's language: their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from electra_kernels.keyed_random import Purpose, drop_threshold
from electra_kernels.triton.philox import as_int32, four_way_bits, load_key

BLOCK = 1024  # elements of a program
NUM_WARPS = 4
_PURPOSE: tl.constexpr = tl.constexpr(int(Purpose.EMBEDDING_DROPOUT))


@triton.jit(do_not_specialize=["limit", "scale"])
def keyed_dropout_kernel(
    x_ptr,  # [B, S * H]
    key_ptr,  # int64 seed, step
    row_ptr,  # [B] int64
    out_ptr,  # [B, S * H]
    num_elements,
    limit,
    scale,
    BLOCK: tl.constexpr,
):
    """Write BLOCK elements of one row after dropout; program (row, block) handles elements from block * BLOCK on.

    An element is dropped if its 32 random bits, read as an unsigned number, are below `limit`, which is passed as the
    int32 of the same bits. `num_elements` is S * H, the elements of a row.
    """
    program_row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    element = first + tl.arange(0, BLOCK)
    inside = element < num_elements
    seed, step = load_key(key_ptr)
    row = tl.load(row_ptr + program_row)  # number within the global batch
    bits = four_way_bits(seed, first // 4, row, step, _PURPOSE, BLOCK)
    keep = tl.where(bits >= limit.to(tl.uint32, bitcast=True), scale, 0.0)
    x = tl.load(x_ptr + program_row * num_elements + element, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + program_row * num_elements + element, (x * keep).to(out_ptr.dtype.element_ty), mask=inside)


def scale_kept(x_BSH: torch.Tensor, key: torch.Tensor, row_B: torch.Tensor, probability: float) -> torch.Tensor:
    """Return contiguous values or gradients after dropout of `probability`, in one kernel launch.

    `key` is seed and step, int64 on the device; `row_B` are the row numbers within the global batch.
    """
    out_BSH = torch.empty_like(x_BSH)
    num_rows, seq_len, hidden = x_BSH.shape
    num_elements = seq_len * hidden
    grid: Any = (num_rows, triton.cdiv(num_elements, BLOCK))
    keyed_dropout_kernel[grid](
        x_BSH,
        key,
        row_B,
        out_BSH,
        num_elements,
        limit=as_int32(drop_threshold(probability)),
        scale=1.0 / (1.0 - probability),
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
        enable_fp_fusion=True,
    )
    return out_BSH
