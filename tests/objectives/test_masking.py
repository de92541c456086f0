"""Masks against a NumPy mirror, against invariants, and against the statistics of both ways to draw them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from electra_kernels.operation_types import SpecialIds
from hypothesis import given, settings
from hypothesis import strategies as st

from electra_dist.config import ObjectiveConfig
from electra_dist.objectives.masking import mask_rows, num_masked, num_slots

MODES = ["without_replacement", "reference"]
SEED = 0x1234_5678_9ABC_DEF0  # its upper 32 bits matter, too
TEXT_ID = 7


@pytest.mark.parametrize("masking", MODES)
@pytest.mark.parametrize("mask_prob", [0.15, 0.25])
def test_masks_equal_those_of_the_numpy_mirror_bit_for_bit(
    masking: Any,
    mask_prob: float,
    make_ids: Callable[..., torch.Tensor],
    mirror_masks: Callable[..., Any],
    special: Any,
) -> None:
    """The mirror in conftest.py is written from the reference's description. Row numbers go up to 2**32 - 1."""
    objective = ObjectiveConfig(masking=masking, mask_prob=mask_prob)
    ids = make_ids([64, 63, 40, 20, 5, 3, 0], seq_len=64)
    rows = [0, 5, 7, 2**31, 2**32 - 1, 11, 12]

    for step in (0, 399_999):
        masks = mask_rows(ids, special, objective, SEED, step, torch.tensor(rows))
        expected_masks = mirror_masks(ids.numpy(), objective, SEED, step, rows)

        for tensor, expected in zip(masks, expected_masks, strict=True):
            np.testing.assert_array_equal(tensor.numpy(), expected)
        assert torch.equal(num_masked(ids, special, objective).float(), masks.weight_BN.sum(1))


@given(
    lengths=st.lists(st.integers(0, 32), min_size=1, max_size=5),
    mask_prob=st.floats(0.01, 0.99),
    masking=st.sampled_from(MODES),
    mask_token_prob=st.just(0.0) | st.floats(1e-30, 1.0),
    data=st.data(),
)
@settings(max_examples=80, deadline=None)
def test_only_ordinary_tokens_in_used_slots_are_masked(
    lengths: list[int], mask_prob: float, masking: Any, mask_token_prob: float, data: Any
) -> None:
    """For rows of any ids from 1 to 9, where 2, 3 and 4 are [CLS], [SEP] and [MASK], and any probabilities."""
    seq_len = 32
    ids = torch.zeros(len(lengths), seq_len, dtype=torch.int64)
    for row, length in zip(ids, lengths, strict=True):
        row[:length] = torch.tensor(data.draw(st.lists(st.integers(1, 9), min_size=length, max_size=length)))
    objective = ObjectiveConfig(mask_prob=mask_prob, masking=masking, mask_token_prob=mask_token_prob)
    special = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
    maskable_ids = {special.unk, *range(5, 10)}

    masks = mask_rows(ids, special, objective, 1, 2, torch.arange(len(lengths)))

    is_used = masks.weight_BN > 0
    assert masks.position_BN.shape == (len(lengths), num_slots(mask_prob, seq_len))
    assert not masks.position_BN[~is_used].any()
    ids_of_used_slots = ids.gather(1, masks.position_BN)[is_used]
    assert set(ids_of_used_slots.tolist()) <= maskable_ids
    is_changed = masks.input_BS != ids
    assert (masks.input_BS[is_changed] == special.mask).all()
    for b in range(len(lengths)):
        chosen_positions = masks.position_BN[b][is_used[b]].tolist()
        changed_positions = set(is_changed[b].nonzero().flatten().tolist())
        assert changed_positions <= set(chosen_positions)
        if masking == "without_replacement":
            assert len(set(chosen_positions)) == len(chosen_positions)
        if mask_token_prob == 1.0:
            assert changed_positions == set(chosen_positions)


@pytest.mark.parametrize("masking", MODES)
def test_masks_of_a_row_do_not_depend_on_the_other_rows_of_its_batch(
    masking: Any, make_ids: Callable[..., torch.Tensor], special: Any
) -> None:
    objective = ObjectiveConfig(masking=masking)
    ids = make_ids([64, 50, 30, 64], seq_len=64)
    rows = torch.tensor([100, 101, 102, 103])

    masks_of_batch = mask_rows(ids, special, objective, 5, 6, rows)

    for part in (slice(0, 1), slice(1, 4), slice(3, 4)):
        masks_of_part = mask_rows(ids[part], special, objective, 5, 6, rows[part])
        for tensor_of_part, tensor_of_batch in zip(masks_of_part, masks_of_batch, strict=True):
            assert torch.equal(tensor_of_part, tensor_of_batch[part])


def test_another_seed_step_or_row_number_gives_other_masks(
    make_ids: Callable[..., torch.Tensor], special: Any
) -> None:
    ids = make_ids([64], seq_len=64)
    keys = [  # seed, step, row
        (1, 1, 1),
        (2, 1, 1),
        (1, 2, 1),
        (1, 1, 2),
    ]

    positions = set()
    for seed, step, row in keys:
        masks = mask_rows(ids, special, ObjectiveConfig(), seed, step, torch.tensor([row]))
        positions.add(tuple(masks.position_BN.flatten().tolist()))

    assert len(positions) == len(keys)


@pytest.mark.parametrize(("mask_prob", "slots"), [(0.25, 130), (0.15, 79)])
def test_without_replacement_a_full_row_has_exactly_the_rounded_share_of_distinct_positions(
    mask_prob: float, slots: int, make_ids: Callable[..., torch.Tensor], special: Any
) -> None:
    """In rows of 512 real tokens these are round(512 p), on the paper's number of slots."""
    seq_len = 512
    ids = make_ids([seq_len] * 8, seq_len)

    masks = mask_rows(ids, special, ObjectiveConfig(mask_prob=mask_prob), 1, 2, torch.arange(8))

    assert masks.position_BN.shape == (8, slots)
    for positions, weights in zip(masks.position_BN, masks.weight_BN, strict=True):
        used_positions = positions[weights > 0]
        assert len(used_positions.unique()) == round(seq_len * mask_prob)


@pytest.mark.parametrize("is_scheduled", [False, True])
def test_the_reference_rounds_the_number_of_masked_positions_in_float32_as_google_does(
    is_scheduled: bool, make_ids: Callable[..., torch.Tensor], special: Any
) -> None:
    """15 % of 190, 350 and 390 tokens are 28.5, 52.5 and 58.5. As float32, 0.15 is 0.1500000060, and the products are
    the next float32 above these halves, which round up. As float64, 0.15 is 0.1499999999999999944, and the products
    are exactly these halves, which round to the even number. All other lengths up to 512 have the same number.
    """
    lengths = list(range(20, 513, 10))
    ids = make_ids(lengths, seq_len=512)
    mask_prob = torch.tensor(0.15, dtype=torch.float64) if is_scheduled else None

    num_reference = num_masked(ids, special, ObjectiveConfig(mask_prob=0.15, masking="reference"), mask_prob)
    num_default = num_masked(ids, special, ObjectiveConfig(mask_prob=0.15), mask_prob)
    masks = mask_rows(
        ids, special, ObjectiveConfig(mask_prob=0.15, masking="reference"), 1, 2, torch.arange(len(ids)), mask_prob
    )

    differing = [length for length, a, b in zip(lengths, num_reference, num_default, strict=True) if a != b]
    assert differing == [190, 350, 390]
    reference_of_length = dict(zip(lengths, num_reference.tolist(), strict=True))
    default_of_length = dict(zip(lengths, num_default.tolist(), strict=True))
    assert [reference_of_length[length] for length in differing] == [29, 53, 59]
    assert [default_of_length[length] for length in differing] == [28, 52, 58]
    assert torch.equal(masks.weight_BN.sum(1).long(), num_reference)


def test_positions_are_equally_likely_and_15_percent_of_masked_tokens_stay_visible(special: Any) -> None:
    num_rows = 4000
    num_candidates = 30  # of 32 tokens, the first is [CLS] and the last is [SEP]
    masked_per_row = 8  # a quarter of 32
    ids = torch.full((num_rows, 32), TEXT_ID)
    ids[:, 0] = special.cls
    ids[:, -1] = special.sep

    masks = mask_rows(ids, special, ObjectiveConfig(mask_prob=0.25), 3, 4, torch.arange(num_rows))

    is_used = masks.weight_BN > 0
    counts = torch.bincount(masks.position_BN[is_used], minlength=32)[1:31].double()
    expected_count = counts.sum() / num_candidates
    chi_square = ((counts - expected_count) ** 2 / expected_count).sum()
    assert counts.sum() == num_rows * masked_per_row
    # 58.3 is the quantile of p = 0.001 at 29 degrees of freedom. Positions of one row are distinct, which makes the
    # statistic smaller than chi-square's.
    assert chi_square < 58.3
    share_replaced_by_mask = (masks.input_BS == special.mask).sum() / is_used.sum()
    deviation = (0.85 * 0.15 / (num_rows * masked_per_row)) ** 0.5
    assert share_replaced_by_mask.item() == pytest.approx(0.85, abs=4 * deviation)


@pytest.mark.parametrize(
    ("mask_prob", "percent_of_paper", "share_drawn_again"), [(0.25, 22.3, 0.120), (0.15, 14.1, 0.073)]
)
def test_the_reference_draw_masks_fewer_positions_than_its_rate_because_it_repeats_some(
    mask_prob: float, percent_of_paper: float, share_drawn_again: float, special: Any
) -> None:
    """n draws with replacement from 509 candidates hit 509 (1 - (1 - 1/509)^n) of them.

    `share_drawn_again` is the share of masked positions that were drawn twice or more often.
    """
    num_rows = 4000
    seq_len = 512
    num_candidates = 509  # all except [CLS] and two [SEP]
    ids = torch.full((num_rows, seq_len), TEXT_ID)
    ids[:, 0] = special.cls
    ids[:, 255] = special.sep
    ids[:, 511] = special.sep
    objective = ObjectiveConfig(mask_prob=mask_prob, masking="reference")
    num_draws = round(seq_len * mask_prob)

    masks = mask_rows(ids, special, objective, 3, 4, torch.arange(num_rows))

    assert (masks.weight_BN.sum(1) == num_draws).all()
    draws_of_position = torch.zeros(num_rows, seq_len).scatter_add(1, masks.position_BN, masks.weight_BN)
    masked_share = (draws_of_position > 0).float().sum(1).mean() / num_candidates
    expected_share = 1 - (1 - 1 / num_candidates) ** num_draws
    assert masked_share.item() == pytest.approx(expected_share, abs=5e-4)
    assert abs(100 * expected_share - percent_of_paper) < 0.06
    measured_again = (draws_of_position > 1).sum() / (draws_of_position > 0).sum()
    assert measured_again.item() == pytest.approx(share_drawn_again, abs=2e-3)  # four deviations
