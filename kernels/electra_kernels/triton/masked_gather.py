"""Run the masked gather's backward pass in Triton: one program per position of a row writes its gradient once.

Guarantee: the result is that of `masked_gather.scatter_add_reference`. Gradients are added in slot order, in fp32, so
the result is the same in every run. No atomics and no zero fill beforehand are needed.

How: a program compares its position with the row's N slots, then goes through the slots that match. Most positions
have none or one. Only position 0 of short rows has many, at most N, because the empty slots point there.

Shapes: B rows, S positions, N slots (each for one masked position) per row, M = B * N, H hidden.
"""

# Kernels are in Triton's language: their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def scatter_add_kernel(
    grad_ptr,  # [M, H]
    positions_ptr,  # [B, N] int64
    out_ptr,  # [B, S, H]
    seq_len,
    num_slots,
    hidden,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Write the gradient of one position of one row: the sum over the slots that point to it, or zeros.

    Slot n of row b points to positions[b, n], and its gradient is row b * N + n of `grad_ptr`. Program p handles
    position p % seq_len of row p // seq_len. BLOCK_N and BLOCK_H are powers of 2, at least the number of slots and the
    hidden size.
    """
    flat_position = tl.program_id(0).to(tl.int64)
    row = flat_position // seq_len
    position = flat_position % seq_len
    slot = tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_H)
    matches = tl.load(positions_ptr + row * num_slots + slot, mask=slot < num_slots, other=-1) == position
    total = tl.zeros((BLOCK_H,), tl.float32)
    # The lowest matching slot, then the lowest one above it, and so on; BLOCK_N means that there is none.
    next_slot = tl.min(tl.where(matches, slot, BLOCK_N), 0)
    while next_slot < num_slots:
        slot_grad_ptr = grad_ptr + (row * num_slots + next_slot) * hidden
        total += tl.load(slot_grad_ptr + column, mask=column < hidden, other=0.0).to(tl.float32)
        next_slot = tl.min(tl.where(matches & (slot > next_slot), slot, BLOCK_N), 0)
    tl.store(out_ptr + flat_position * hidden + column, total.to(out_ptr.dtype.element_ty), mask=column < hidden)


def scatter_add(grad_MH: torch.Tensor, positions_BN: torch.Tensor, seq_len: int) -> torch.Tensor:
    """Return the gradient of the hidden states as `masked_gather.scatter_add_reference` does, in one kernel launch."""
    num_rows, num_slots = positions_BN.shape
    hidden = grad_MH.shape[1]
    out_BSH = grad_MH.new_empty(num_rows, seq_len, hidden)
    grid: Any = (num_rows * seq_len,)
    scatter_add_kernel[grid](
        grad_MH.contiguous(),
        positions_BN.contiguous(),
        out_BSH,
        seq_len,
        num_slots,
        hidden,
        BLOCK_N=max(16, triton.next_power_of_2(num_slots)),
        BLOCK_H=triton.next_power_of_2(hidden),
        num_warps=1 if hidden <= 256 else 4,
        enable_fp_fusion=True,
    )
    return out_BSH
