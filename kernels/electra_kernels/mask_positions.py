"""Draw the masked positions of each row without replacement, and build the rows that show [MASK] there.

Guarantee: a pure function of (seed, step, row number, ids), independent of the other rows of the batch, of the rank
and of the device. All results are integers or 0 and 1, so the kernel's equal the reference's exactly. Every row has N
slots, each for one masked position; unused slots have weight 0 and position 0. Shapes are static and nothing waits
for the device.

How: each candidate of a row (a token that may be masked) gets a random key, and the candidates with the smallest keys
are taken, in the order of their keys. The reference sorts the keys. The kernel counts, for each candidate, how many
candidates have a smaller key: that is the number of its slot.

Cost: one launch with Triton; about 250 operators in plain PyTorch on a GPU, because torch has no unsigned 32-bit words
and the random numbers take ten rounds of small operations.

Shapes: B rows, S tokens, N slots in every row.
"""

from __future__ import annotations

import torch

from electra_kernels.backend_choice import resolve_without_cuda
from electra_kernels.keyed_random import Purpose, bits_grid, device_keys
from electra_kernels.operation_types import SpecialIds

_POSITION_BITS = 20  # lowest bits of a sort key, which hold the position, so that the keys of a row are distinct


def mask_positions(
    ids_BS: torch.Tensor,
    row_B: torch.Tensor,
    wanted_R: torch.Tensor,
    special: SpecialIds,
    *,
    num_slots: int,
    mask_token_prob: float,
    seed: int,
    step: int,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw the masked positions of each row without replacement, and build rows that show [MASK] there.

    Every row has N slots, each for one masked position. The results are the slots' positions, int64 [B, N], their
    weights (1 if used, else 0), fp32 [B, N], and the masked rows, int64 [B, S].

    Args:
        ids_BS: int64 token ids.
        row_B: int64 row numbers within the global batch.
        wanted_R: int64 [S + 1] on the device of the ids. Element r is the number of positions to mask in a row with r
            tokens that are not [PAD], at most `num_slots`. A row with fewer candidates masks all of them.
        special: Ids of the special tokens.
        num_slots: N, at most S.
        mask_token_prob: Share of the used slots that show [MASK]; the others show the original token.
        seed: Seed of the run.
        step: Global step, in [0, 2**32).
        backend: See `backend_choice`.
    """
    shown = round(mask_token_prob * 2**32)
    if resolve_without_cuda(backend, ids_BS.device.type) == "triton":
        from electra_kernels.triton.mask_positions import mask_positions as mask_triton

        key = device_keys(seed, step, ids_BS.device)
        return mask_triton(ids_BS, row_B, wanted_R, special, num_slots, shown, key)
    return mask_positions_reference(ids_BS, row_B, wanted_R, special, num_slots, shown, seed, step)


def mask_positions_reference(
    ids_BS: torch.Tensor,
    row_B: torch.Tensor,
    wanted_R: torch.Tensor,
    special: SpecialIds,
    num_slots: int,
    shown: int,
    seed: int,
    step: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return positions, weights and masked rows in plain PyTorch; this is the definition of `mask_positions`.

    A masked position shows [MASK] if the 32 random bits of its slot are below `shown`, which is `mask_token_prob` *
    2**32.
    """
    candidate_BS = special.is_candidate(ids_BS)
    num_real_B = (ids_BS != special.pad).sum(1)
    num_used_B = torch.minimum(wanted_R[num_real_B], candidate_BS.sum(1))
    is_used_BN = torch.arange(num_slots, device=ids_BS.device) < num_used_B[:, None]
    bits_BS = bits_grid(seed, Purpose.MASK_POSITION, step, row_B, ids_BS.shape[1])
    drawn_BN = _smallest_keys(bits_BS, candidate_BS, num_slots)
    position_BN = torch.where(is_used_BN, drawn_BN, 0)
    input_BS = show_masks(ids_BS, position_BN, is_used_BN, special.mask, shown, seed, step, row_B)
    return position_BN, is_used_BN.float(), input_BS


def show_masks(
    ids_BS: torch.Tensor,
    position_BN: torch.Tensor,
    is_used_BN: torch.Tensor,
    mask_id: int,
    shown: int,
    seed: int,
    step: int,
    row_B: torch.Tensor,
) -> torch.Tensor:
    """Return the rows with [MASK] at a random share `shown` / 2**32 of the masked positions, int64 [B, S].

    A used slot (place for one masked position) shows [MASK] if its 32 random bits are below `shown`. Several slots may
    share a position.
    """
    keep_bits_BN = bits_grid(seed, Purpose.MASK_KEEP, step, row_B, position_BN.shape[1])
    shows_mask_BN = is_used_BN & (keep_bits_BN < shown)
    # Count the [MASK]s of each position. An empty slot adds 0 at position 0, and a position that was drawn twice shows
    # [MASK] if either of its slots does.
    num_masks_BS = torch.zeros_like(ids_BS).scatter_add(1, position_BN, shows_mask_BN.long())
    return torch.where(num_masks_BS > 0, mask_id, ids_BS)


def _smallest_keys(bits_BS: torch.Tensor, candidate_BS: torch.Tensor, num_slots: int) -> torch.Tensor:
    """Return N different positions drawn from the candidates of each row, int64 [B, N], in random order.

    A key is a 32-bit random word, followed by the token's position as its lowest `_POSITION_BITS` bits. The position
    makes all keys of a row different, and it can be read from a sorted key. If a row has fewer than N candidates, its
    last entries are meaningless, and the caller must not use them.
    """
    S = bits_BS.shape[1]
    assert S <= 1 << _POSITION_BITS
    key_BS = (bits_BS << _POSITION_BITS) | torch.arange(S, device=bits_BS.device)

    # Tokens that may not be masked are sorted to the end.
    largest_key = torch.iinfo(torch.int64).max
    sorted_key_BS = torch.where(candidate_BS, key_BS, largest_key).sort(1).values

    position_bits = (1 << _POSITION_BITS) - 1
    return sorted_key_BS[:, :num_slots] & position_bits
