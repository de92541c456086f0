"""Which tokens of a row are masked at a step, and what the generator sees.

Guarantee: a pure function of (seed, step, row, ids): not of the batch around the row, the rank or the device. The
number of slots N is fixed by the row length, empty slots have weight 0 and position 0 and change nothing, so shapes
are static and the host never waits.

Candidates are the real tokens other than [CLS], [SEP] and [MASK] ([UNK] may be masked). Of a row with r real tokens,
n = clamp(round(mask_prob * r), 1, N) slots are used (half to even; never more than there are candidates).
`without_replacement` takes the n candidates with the smallest keys. `reference` repeats Google's draw with
replacement: a position drawn twice has two slots, so it weighs double in the loss, and the id inserted there is the
floor of the mean of its samples (`replace_and_label` does that); at 25 % of 512, 22.3 % of the candidates are masked.
85 % of the slots show [MASK] in the generator's input, the rest keep their token; there is no random-token branch.

Source: google-research/electra, pretrain/pretrain_helpers.py (mask, scatter_update).
Cost: one Philox grid and one sort of [B, S] integers.

Shapes: B rows, S tokens, N slots a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from electra_kernels.keyed_random import Purpose, bits_grid

from electra_dist.config import ObjectiveConfig
from electra_dist.model.rows import SpecialIds

_POSITION_BITS = 20  # of a sort key; the 32 random bits lie above, so keys of one row never tie


class Masking(NamedTuple):
    """The chosen slots of a batch and the generator's input."""

    position_BN: torch.Tensor  # int64; 0 in empty slots
    weight_BN: torch.Tensor  # float32; 1 in used slots, 0 in empty ones
    input_BS: torch.Tensor  # int64; the ids with [MASK] in 85 % of the used slots

    def slots_BS(self) -> torch.Tensor:
        """Return float32 [B, S]: the number of used slots at each position, above 1 where it was drawn again."""
        none_BS = torch.zeros(self.input_BS.shape, device=self.input_BS.device)
        return none_BS.scatter_add(1, self.position_BN, self.weight_BN)


def num_slots(mask_prob: float, seq_len: int) -> int:
    """Return N: slots a row, as the reference's max_predictions_per_seq (130 at 25 % of 512), in [1, seq_len]."""
    return min(max(1, int((mask_prob + 0.005) * seq_len)), seq_len)


def is_candidate(ids_BS: torch.Tensor, special: SpecialIds) -> torch.Tensor:
    """Return bool [B, S]: the tokens that may be masked."""
    return (ids_BS != special.pad) & (ids_BS != special.cls) & (ids_BS != special.sep) & (ids_BS != special.mask)


def num_masked(ids_BS: torch.Tensor, special: SpecialIds, objective: ObjectiveConfig) -> torch.Tensor:
    """Return int64 [B]: used slots of each row, from the ids alone; the sum of its weights, duplicates counted twice.

    Cheap enough to be called for all rows of a step before its first forward, where the global mean needs it.
    """
    real = (ids_BS != special.pad).sum(1)
    wanted = torch.round(real.double() * objective.mask_prob).long()
    wanted = wanted.clamp(1, num_slots(objective.mask_prob, ids_BS.shape[1]))
    return torch.minimum(wanted, is_candidate(ids_BS, special).sum(1))


def mask_rows(
    ids_BS: torch.Tensor, special: SpecialIds, objective: ObjectiveConfig, seed: int, step: int, row_B: torch.Tensor
) -> Masking:
    """Choose the slots of each row and build the generator's input.

    Args:
        ids_BS: int64 rows.
        special: ids of the special tokens.
        objective: `mask_prob`, `mask_token_prob` and `masking`.
        seed: the run's seed.
        step: number of the optimizer step.
        row_B: int64 row numbers within the global batch.
    """
    N = num_slots(objective.mask_prob, ids_BS.shape[1])
    draw = _with_replacement if objective.masking == "reference" else _without_replacement
    used_B = num_masked(ids_BS, special, objective)
    is_used = torch.arange(N, device=ids_BS.device) < used_B[:, None]
    bits_BS = bits_grid(seed, Purpose.MASK_POSITION, step, row_B, ids_BS.shape[1])
    position_BN = torch.where(is_used, draw(bits_BS, is_candidate(ids_BS, special), N), 0)
    keep_bits_BN = bits_grid(seed, Purpose.MASK_KEEP, step, row_B, N)
    shows_mask = is_used & (keep_bits_BN < round(objective.mask_token_prob * 2**32))
    return Masking(
        position_BN=position_BN,
        weight_BN=is_used.float(),
        # An empty slot adds 0 at position 0; a position drawn twice shows [MASK] if either slot does.
        input_BS=torch.where(
            torch.zeros_like(ids_BS).scatter_add(1, position_BN, shows_mask.long()) > 0, special.mask, ids_BS
        ),
    )


def _without_replacement(bits_BS: torch.Tensor, candidate_BS: torch.Tensor, N: int) -> torch.Tensor:
    """Return int64 [B, N]: the candidates with the smallest keys, in the order of their keys."""
    S = bits_BS.shape[1]
    assert S <= 1 << _POSITION_BITS
    key = (bits_BS << _POSITION_BITS) | torch.arange(S, device=bits_BS.device)
    last = torch.iinfo(torch.int64).max
    smallest = torch.where(candidate_BS, key, last).sort(1).values[:, :N]
    return smallest & ((1 << _POSITION_BITS) - 1)


def _with_replacement(bits_BS: torch.Tensor, candidate_BS: torch.Tensor, N: int) -> torch.Tensor:
    """Return int64 [B, N]; slot j takes the candidate of rank floor(uniform_j * candidates)."""
    running = candidate_BS.cumsum(1)
    rank_BN = (bits_BS[:, :N] * running[:, -1:]) >> 32
    return torch.searchsorted(running, rank_BN + 1)
