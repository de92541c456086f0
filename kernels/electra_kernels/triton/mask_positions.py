"""Draw masked positions without replacement, in Triton: one program per 32 positions of a row, in one launch.

Guarantee: the results equal those of `mask_positions.mask_positions_reference` exactly, because they are integers.

How: a program draws the random words of all candidates of its row, and counts for each of its own candidates how many
have a smaller word (or an equal one and a lower position). That number is the candidate's slot. No sort is needed, and
no two programs write the same element.

Cost: B * S * S = 17 M comparisons at 64 x 512, and each word is drawn by S / 32 programs.

Shapes: B rows, S tokens, N slots (each for one masked position) in every row.
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

BLOCK_S = 32  # positions of a program
BLOCK_T = 64  # positions that they are compared with at a time
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
    seed_low, seed_high, step = load_key(key_ptr)
    row = tl.load(row_ptr + program_row)  # number within the global batch
    bits = four_way_bits(seed_low, seed_high, first // 4, row, step, _POSITION_PURPOSE, BLOCK_S)

    # The slot of a position is the number of candidates whose random word is smaller.
    slot = tl.zeros((BLOCK_S,), tl.int32)
    real_count = tl.zeros((BLOCK_T,), tl.int32)
    candidate_count = tl.zeros((BLOCK_T,), tl.int32)
    for start in range(0, seq_len, BLOCK_T):
        compared = start + tl.arange(0, BLOCK_T)
        compared_ids = tl.load(ids_ptr + program_row * seq_len + compared, mask=compared < seq_len, other=pad)
        compared_bits = four_way_bits(seed_low, seed_high, start // 4, row, step, _POSITION_PURPOSE, BLOCK_T)
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
        keep_bits = bits_at(seed_low, seed_high, slot, row, step, _KEEP_PURPOSE)
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
    """Compute what `mask_positions_reference` computes in one launch; `key` is seed and step on the device."""
    num_rows, seq_len = ids_BS.shape
    assert num_slots <= seq_len, f"{num_slots} slots in a row of {seq_len} tokens: pass at most as many slots"
    device = ids_BS.device
    position_BN = torch.empty(num_rows, num_slots, dtype=torch.int64, device=device)
    weight_BN = torch.empty(num_rows, num_slots, dtype=torch.float32, device=device)
    input_BS = torch.empty_like(ids_BS, memory_format=torch.contiguous_format)
    grid: Any = (num_rows, triton.cdiv(seq_len, BLOCK_S))
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
        BLOCK_S=BLOCK_S,
        BLOCK_T=BLOCK_T,
        num_warps=NUM_WARPS,
        enable_fp_fusion=True,
    )
    return position_BN, weight_BN, input_BS
