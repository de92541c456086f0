"""Run the operations on slots in Triton: draw masked positions, add up gradients of slots, write samples into rows.

Guarantee: masks, corrupted ids and labels equal those of the references in `slots.py` exactly, because they are
integers. The gradient of the gather is that of `slots.scatter_add_reference`: gradients are added in slot order, in
fp32, so the result is the same in every run. No atomics are needed.

How, masks: one program for 32 positions of a row draws the random words of all candidates of its row, and counts for
each of its own candidates how many have a smaller word (or an equal one and a lower position). That number is the
candidate's slot. No sort is needed, and no two programs write the same element. Cost: B * S * S = 17 M comparisons at
64 x 512, and each word is drawn by S / 32 programs.

How, gradients: one program per position of a row compares its position with the row's N slots, goes through the slots
that match, and writes the sum once. Most positions have none or one. Only position 0 of short rows has many, at most
N, because the empty slots point there.

How, samples: one program for 64 positions of a row compares them with the row's N slots, 32 slots at a time. A [64,
32] table in registers counts the slots at each position, a second one adds their samples, and both are reduced at the
end. The registers therefore do not depend on N, and neither does the compiled code. Cost: the comparison is B * S * N
= 4 M operations at 64 x 512 x 128, which takes less time than a launch.

Shapes: B rows, S tokens, N slots (each for one masked position) in every row, M = B * N, H hidden.
"""

# Kernels are in Triton's language: their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from electra_kernels.keyed_random import Purpose
from electra_kernels.operation_types import SpecialIds
from electra_kernels.triton.philox import as_int32, bits_at, four_way_bits, load_key

MASK_BLOCK_S = 32  # positions of a program that draws masks
MASK_BLOCK_T = 64  # positions that they are compared with at a time
REPLACE_BLOCK_S = 64  # positions of a program that writes samples
REPLACE_BLOCK_N = 32  # slots that they are compared with at a time
NUM_WARPS = 4
_POSITION_PURPOSE: tl.constexpr = tl.constexpr(int(Purpose.MASK_POSITION))
_KEEP_PURPOSE: tl.constexpr = tl.constexpr(int(Purpose.MASK_KEEP))


@triton.jit
def is_candidate(ids, pad, cls, sep, mask):
    """Return which tokens may be masked: all but [PAD], [CLS], [SEP] and [MASK]."""
    return (ids != pad) & (ids != cls) & (ids != sep) & (ids != mask)


@triton.jit(do_not_specialize=["pad", "cls", "sep", "mask", "last_shown"])
def mask_kernel(
    ids_ptr,  # [B, S] int64
    row_ptr,  # [B] int64
    key_ptr,  # int64 seed, step
    wanted_ptr,  # [S + 1] int64
    position_ptr,  # [B, N] int64
    weight_ptr,  # [B, N] fp32
    input_ptr,  # [B, S] int64
    seq_len,
    num_slots,
    pad,
    cls,
    sep,
    mask,
    last_shown,
    SHOWS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Decide for BLOCK_S positions of one row whether they are masked, and write the ids that the generator reads.

    A slot is a place for one masked position. Program (row, block) has BLOCK_S positions of a row, and writes each
    masked one to its slot. It also writes the weights of as many slots, those with the numbers of its positions: 1
    for a used slot; 0, and position 0, for an unused one. A used slot shows [MASK] if its 32 random bits are at most
    `last_shown`, an unsigned number passed as int32; with SHOWS false no slot does. Element r of `wanted_ptr` is the
    number of positions to mask in a row with r tokens that are not [PAD].
    """
    program_row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK_S
    position = first + tl.arange(0, BLOCK_S)
    inside = position < seq_len
    ids = tl.load(ids_ptr + program_row * seq_len + position, mask=inside, other=pad)
    seed, step = load_key(key_ptr)
    row = tl.load(row_ptr + program_row)  # number within the global batch
    bits = four_way_bits(seed, first // 4, row, step, _POSITION_PURPOSE, BLOCK_S)

    # The slot of a position is the number of candidates whose random word is smaller.
    slot = tl.zeros((BLOCK_S,), tl.int32)
    real_count = tl.zeros((BLOCK_T,), tl.int32)
    candidate_count = tl.zeros((BLOCK_T,), tl.int32)
    for start in range(0, seq_len, BLOCK_T):
        compared = start + tl.arange(0, BLOCK_T)
        compared_ids = tl.load(ids_ptr + program_row * seq_len + compared, mask=compared < seq_len, other=pad)
        compared_bits = four_way_bits(seed, start // 4, row, step, _POSITION_PURPOSE, BLOCK_T)
        compares = is_candidate(compared_ids, pad, cls, sep, mask)
        real_count += (compared_ids != pad).to(tl.int32)
        candidate_count += compares.to(tl.int32)
        is_smaller = compared_bits[None, :] < bits[:, None]
        is_equal_and_before = (compared_bits[None, :] == bits[:, None]) & (compared[None, :] < position[:, None])
        comes_before = (is_smaller | is_equal_and_before) & compares[None, :]
        slot += tl.sum(comes_before.to(tl.int32), 1)
    num_wanted = tl.load(wanted_ptr + tl.sum(real_count, 0)).to(tl.int32)
    num_used = tl.minimum(num_wanted, tl.sum(candidate_count, 0))
    is_masked = is_candidate(ids, pad, cls, sep, mask) & (slot < num_used)

    # The ids that the generator reads.
    if SHOWS:
        keep_bits = bits_at(seed, slot, row, step, _KEEP_PURPOSE)
        shows_mask = is_masked & (keep_bits <= last_shown.to(tl.uint32, bitcast=True))
        masked_ids = tl.where(shows_mask, mask.to(tl.int64), ids)
    else:
        masked_ids = ids
    tl.store(input_ptr + program_row * seq_len + position, masked_ids, mask=inside)

    # The slots that this program's positions take, and the weights of the slots that have its positions' numbers.
    tl.store(position_ptr + program_row * num_slots + slot, position.to(tl.int64), mask=is_masked)
    is_slot = position < num_slots
    is_used = position < num_used
    own_slot = program_row * num_slots + position
    tl.store(weight_ptr + own_slot, is_used.to(tl.float32), mask=is_slot)
    tl.store(position_ptr + own_slot, tl.zeros((BLOCK_S,), tl.int64), mask=is_slot & (position >= num_used))


def mask_positions(
    ids_BS: torch.Tensor,
    row_B: torch.Tensor,
    wanted_R: torch.Tensor,
    special: SpecialIds,
    num_slots: int,
    shown: int,
    key: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw the masked positions of rows; return positions and weights, [B, N], and the masked rows, [B, S].

    It takes one kernel launch. `key` is seed and step on the device; `slots.mask_positions_reference` explains the
    other arguments and defines the results.
    """
    num_rows, seq_len = ids_BS.shape
    assert num_slots <= seq_len, f"{num_slots} slots in a row of {seq_len} tokens: pass at most as many slots"
    device = ids_BS.device
    position_BN = torch.empty(num_rows, num_slots, dtype=torch.int64, device=device)
    weight_BN = torch.empty(num_rows, num_slots, dtype=torch.float32, device=device)
    input_BS = torch.empty_like(ids_BS, memory_format=torch.contiguous_format)
    grid: Any = (num_rows, triton.cdiv(seq_len, MASK_BLOCK_S))
    mask_kernel[grid](
        ids_BS.contiguous(),
        row_B.contiguous(),
        key,
        wanted_R,
        position_BN,
        weight_BN,
        input_BS,
        seq_len,
        num_slots,
        pad=special.pad,
        cls=special.cls,
        sep=special.sep,
        mask=special.mask,
        last_shown=as_int32(shown - 1),
        SHOWS=shown > 0,
        BLOCK_S=MASK_BLOCK_S,
        BLOCK_T=MASK_BLOCK_T,
        num_warps=NUM_WARPS,
        enable_fp_fusion=True,
    )
    return position_BN, weight_BN, input_BS


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
    """Write the gradient of one position of one row: the sum of the gradients of the slots that point to it, or zeros.

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
    """Return the gradient of the hidden states, [B, S, H], in one kernel launch.

    Row b * N + n of `grad_MH` is added at position `positions_BN[b, n]`, as in `slots.scatter_add_reference`.
    """
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
    """Write sampled tokens into BLOCK_S positions of one row, and labels, which are true where the id changed.

    Each of the row's slots has a position, a sampled token and a weight; it writes if the weight is above 0. Program
    (row, block) handles the positions from block * BLOCK_S on, and reads the slots in groups of BLOCK_N, a power of 2.
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
    """Write the sampled tokens of used slots (weight above 0) into the rows, in one kernel launch.

    Return the new rows, int64 [B, S], and where their ids changed, bool [B, S]. `slots.replace_and_label_reference`
    defines the result.
    """
    num_rows, seq_len = ids_BS.shape
    num_slots = positions_BN.shape[1]
    corrupted_BS = torch.empty_like(ids_BS, memory_format=torch.contiguous_format)
    label_BS = torch.empty_like(corrupted_BS, dtype=torch.bool)
    grid: Any = (num_rows, triton.cdiv(seq_len, REPLACE_BLOCK_S))
    replace_kernel[grid](
        ids_BS.contiguous(),
        positions_BN.contiguous(),
        weight_BN.contiguous(),
        sampled_BN.contiguous(),
        corrupted_BS,
        label_BS,
        seq_len,
        num_slots,
        BLOCK_S=REPLACE_BLOCK_S,
        BLOCK_N=REPLACE_BLOCK_N,
        num_warps=NUM_WARPS,
        enable_fp_fusion=True,
    )
    return corrupted_BS, label_BS
