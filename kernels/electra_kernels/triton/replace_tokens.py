"""Write sampled tokens into the rows and label what changed, in Triton: one program per 64 positions of a row.

Guarantee: the results equal those of `replace_tokens.replace_and_label_reference` exactly, because they are integers.

How: a program compares its positions with the row's N slots, 32 slots at a time. A [64, 32] table in registers counts
the slots at each position, a second one adds their samples, and both are reduced at the end. The registers therefore
do not depend on N, and neither does the compiled code.

Cost: the comparison is B * S * N = 4 M operations at 64 x 512 x 128, which takes less time than a launch.

Shapes: B rows, S positions, N slots (each for one masked position) per row.
"""

# Kernels are in Triton's language: their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK_S = 64  # positions per program
BLOCK_N = 32  # slots that are compared at a time
NUM_WARPS = 4


@triton.jit
def replace_kernel(
    ids_ptr,  # [B, S] int64
    positions_ptr,  # [B, N] int64
    weight_ptr,  # [B, N]
    sampled_ptr,  # [B, N] int64
    corrupted_ptr,  # [B, S] int64
    label_ptr,  # [B, S] bool
    seq_len,
    num_slots,
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Write corrupted token ids, and labels (true where the id changed), of BLOCK_S positions of one row.

    Program (row, block) handles the positions from block * BLOCK_S on, and reads the slots in groups of BLOCK_N, a
    power of 2.
    """
    row = tl.program_id(0).to(tl.int64)
    position = tl.program_id(1) * BLOCK_S + tl.arange(0, BLOCK_S)
    count_table = tl.zeros([BLOCK_S, BLOCK_N], tl.int32)
    total_table = tl.zeros([BLOCK_S, BLOCK_N], tl.int32)
    for first_slot in range(0, num_slots, BLOCK_N):
        slot = first_slot + tl.arange(0, BLOCK_N)
        slot_position = tl.load(positions_ptr + row * num_slots + slot, mask=slot < num_slots, other=-1).to(tl.int32)
        weight = tl.load(weight_ptr + row * num_slots + slot, mask=slot < num_slots, other=0.0)
        sampled = tl.load(sampled_ptr + row * num_slots + slot, mask=slot < num_slots, other=0).to(tl.int32)
        # [BLOCK_S, BLOCK_N]: whether the slot writes to the position.
        writes = (position[:, None] == slot_position[None, :]) & (weight > 0)[None, :]
        count_table += writes.to(tl.int32)
        total_table += tl.where(writes, sampled[None, :], 0)
    count = tl.sum(count_table, 1)
    total = tl.sum(total_table, 1)
    ids = tl.load(ids_ptr + row * seq_len + position, mask=position < seq_len, other=0)
    mean = total // tl.maximum(count, 1)  # the maximum avoids a division by 0 where no slot writes
    corrupted = tl.where(count > 0, mean.to(ids.dtype), ids)
    tl.store(corrupted_ptr + row * seq_len + position, corrupted, mask=position < seq_len)
    tl.store(label_ptr + row * seq_len + position, corrupted != ids, mask=position < seq_len)


def replace_and_label(
    ids_BS: torch.Tensor, positions_BN: torch.Tensor, weight_BN: torch.Tensor, sampled_BN: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return corrupted rows and labels as `replace_tokens.replace_and_label_reference` does, in one kernel launch."""
    num_rows, seq_len = ids_BS.shape
    num_slots = positions_BN.shape[1]
    corrupted_BS = torch.empty_like(ids_BS, memory_format=torch.contiguous_format)
    label_BS = torch.empty_like(corrupted_BS, dtype=torch.bool)
    grid: Any = (num_rows, triton.cdiv(seq_len, BLOCK_S))
    replace_kernel[grid](
        ids_BS.contiguous(),
        positions_BN.contiguous(),
        weight_BN.contiguous(),
        sampled_BN.contiguous(),
        corrupted_BS,
        label_BS,
        seq_len,
        num_slots,
        BLOCK_S=BLOCK_S,
        BLOCK_N=BLOCK_N,
        num_warps=NUM_WARPS,
        enable_fp_fusion=True,
    )
    return corrupted_BS, label_BS
