"""Decides which tokens of a row are masked at a step, and which ids the generator reads.

Guarantee: a pure function of (seed, step, row, ids), independent of the other rows of the batch, of the rank and of
the device. Each row has N slots, and a slot holds one masked position. N follows from the row length and the largest
`mask_prob` of the run. Unused slots have weight 0 and position 0 and change nothing, so shapes are static and the host
never waits for the device.

How: candidates for masking are the real tokens other than [CLS], [SEP] and [MASK] ([UNK] may be masked). A row with r
real tokens uses n = clamp(round(mask_prob * r), 1, N) slots (rounded half to even), but never more than it has
candidates. The config key `masking` decides how the n positions are drawn:

    without_replacement  The n candidates with the smallest random keys are taken, by the fused operation
                         `electra_kernels.slots`.
    reference            As in Google's code, n candidates are drawn with replacement. A position that is drawn twice
                         has two slots. It counts twice in the loss, and its new id is the mean of its two
                         sampled ids, rounded down (`replace_and_label`). At 25 %, only 22.3 % of the candidates of 512
                         tokens are masked. n is computed in float32, which gives one slot more for rows of 190, 350
                         and 390 tokens at 15 %.

The generator reads [MASK] in 85 % of the slots, and the original token in the rest. Unlike BERT, it never reads a
random token.

Source: google-research/electra, pretrain/pretrain_helpers.py (mask, scatter_update).

Shapes: B rows, S tokens, N slots in every row.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch
from electra_kernels.keyed_random import Purpose, bits_grid, copy_to_device
from electra_kernels.operation_types import SpecialIds
from electra_kernels.slots import is_candidate, mask_positions, show_masks

from electra_dist.config import ObjectiveConfig
from electra_dist.config.schedule import NumberOrSchedule, largest_value, value_at


class Masking(NamedTuple):
    """Masked positions of a batch, and the masked rows that the generator reads."""

    position_BN: torch.Tensor  # int64 position of each slot in its row; 0 in empty slots
    weight_BN: torch.Tensor  # float32, 1 in used slots, 0 in empty ones
    input_BS: torch.Tensor  # int64 ids, with [MASK] in `mask_token_prob` (85 %) of the used slots

    def slots_BS(self) -> torch.Tensor:
        """Return how often each position was drawn, float32 [B, S]; above 1 only with `masking: reference`."""
        zeros_BS = torch.zeros(self.input_BS.shape, device=self.input_BS.device)
        return zeros_BS.scatter_add(1, self.position_BN, self.weight_BN)


@functools.lru_cache(maxsize=16)
def num_slots(mask_prob: NumberOrSchedule, seq_len: int) -> int:
    """Return the largest number of masked positions that a row can have, max_predictions_per_seq in Google's code.

    For 25 % of 512 tokens it is 130, of which a row without pads uses 128. For a schedule, the largest value counts.
    """
    most_masked = int((largest_value(mask_prob) + 0.005) * seq_len)  # as in Google's code
    return min(max(1, most_masked), seq_len)


def num_masked(
    ids_BS: torch.Tensor, special: SpecialIds, objective: ObjectiveConfig, mask_prob: float | None = None
) -> torch.Tensor:
    """Return the number of masked positions of each row, int64 [B]; it is 0 for a row of pads only.

    If `objective.mask_prob` follows a schedule, `mask_prob` is its present value; None stands for its first value.
    """
    if mask_prob is None:
        mask_prob = value_at(objective.mask_prob, 0.0)
    num_real_B = (ids_BS != special.pad).sum(1)
    num_candidates_B = is_candidate(ids_BS, special).sum(1)
    seq_len = ids_BS.shape[1]
    most_masked = num_slots(objective.mask_prob, seq_len)
    in_float32 = objective.masking == "reference"
    num_wanted_R = wanted_counts(mask_prob, most_masked, seq_len, ids_BS.device, in_float32=in_float32)
    num_wanted_B = num_wanted_R[num_real_B]
    return torch.minimum(num_wanted_B, num_candidates_B)


@functools.lru_cache(maxsize=16)
def wanted_counts(
    mask_prob: float, most_masked: int, seq_len: int, device: torch.device, *, in_float32: bool = False
) -> torch.Tensor:
    """Return a table of how many positions a row masks, indexed by its number of real tokens, int64 [seq_len + 1].

    Element r is clamp(round(mask_prob * r), 1, most_masked). Whoever needs the number reads this table, so all round
    alike. With `in_float32` the product is computed in float32 as in Google's code: 15 % of 190 tokens are then 29
    positions, and 28 in float64.
    """
    dtype = np.dtype(np.float32 if in_float32 else np.float64)
    product_R = np.arange(seq_len + 1, dtype=dtype) * np.array(mask_prob, dtype)
    rounded = np.rint(product_R).astype(np.int64)
    return copy_to_device(torch.from_numpy(rounded.clip(1, most_masked)), device)


def mask_rows(
    ids_BS: torch.Tensor,
    special: SpecialIds,
    objective: ObjectiveConfig,
    seed: int,
    step: int,
    row_B: torch.Tensor,
    mask_prob: float | None = None,
    *,
    backend: str = "auto",
) -> Masking:
    """Draw the masked positions of each row by seed, step and row number; build the rows that the generator reads.

    `row_B` are the row numbers within the global batch. If `objective.mask_prob` follows a schedule, `mask_prob` is
    its present value; None stands for its first value.
    """
    S = ids_BS.shape[1]
    N = num_slots(objective.mask_prob, S)
    if mask_prob is None:
        mask_prob = value_at(objective.mask_prob, 0.0)
    if objective.masking == "without_replacement":
        position_BN, weight_BN, input_BS = mask_positions(
            ids_BS,
            row_B,
            wanted_counts(mask_prob, N, S, ids_BS.device, in_float32=False),
            special,
            num_slots=N,
            mask_token_prob=objective.mask_token_prob,
            seed=seed,
            step=step,
            backend=backend,
        )
        return Masking(position_BN=position_BN, weight_BN=weight_BN, input_BS=input_BS)
    num_used_B = num_masked(ids_BS, special, objective, mask_prob)
    is_used_BN = torch.arange(N, device=ids_BS.device) < num_used_B[:, None]

    # Draw a position for every slot, and put the empty slots at position 0.
    candidate_BS = is_candidate(ids_BS, special)
    bits_BS = bits_grid(seed, Purpose.MASK_POSITION, step, row_B, S)
    drawn_BN = _with_replacement(bits_BS, candidate_BS, N)
    position_BN = torch.where(is_used_BN, drawn_BN, 0)

    # A used slot shows [MASK] with probability `mask_token_prob` (its 32-bit random word is below that share of
    # 2**32); otherwise the generator reads the original token there.
    shown = round(objective.mask_token_prob * 2**32)
    input_BS = show_masks(ids_BS, position_BN, is_used_BN, special.mask, shown, seed, step, row_B)
    return Masking(position_BN=position_BN, weight_BN=is_used_BN.float(), input_BS=input_BS)


def _with_replacement(bits_BS: torch.Tensor, candidate_BS: torch.Tensor, N: int) -> torch.Tensor:
    """Draw N candidates of each row with replacement, by its first N random words; return positions, int64 [B, N]."""
    # A random word / 2**32 is uniform in [0, 1). Times the number of candidates, rounded down, it is a rank.
    num_candidates_so_far_BS = candidate_BS.cumsum(1)
    num_candidates_B1 = num_candidates_so_far_BS[:, -1:]
    rank_BN = (bits_BS[:, :N] * num_candidates_B1) >> 32  # integer arithmetic; the shift divides by 2**32
    # The candidate of rank r is at the first position up to which there are r + 1 candidates.
    return torch.searchsorted(num_candidates_so_far_BS, rank_BN + 1)
