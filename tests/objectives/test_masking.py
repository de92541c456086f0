from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from electra_dist.config import ObjectiveConfig
from electra_dist.model.row_layout import SpecialIds
from electra_dist.objectives.masking import mask_rows, num_masked, num_slots

MODES = ["without_replacement", "reference"]
SEED = 0x1234_5678_9ABC_DEF0


@pytest.mark.parametrize("masking", MODES)
@pytest.mark.parametrize("mask_prob", [0.15, 0.25])
def test_equal_to_the_numpy_mirror_bit_for_bit(
    masking: Any,
    mask_prob: float,
    make_ids: Callable[..., torch.Tensor],
    mirror_masks: Callable[..., Any],
    special: Any,
) -> None:
    objective = ObjectiveConfig(masking=masking, mask_prob=mask_prob)
    ids, rows = make_ids([64, 63, 40, 20, 5, 3, 0], seq_len=64), [0, 5, 7, 2**31, 2**32 - 1, 11, 12]
    for step in (0, 399_999):
        ours = mask_rows(ids, special, objective, SEED, step, torch.tensor(rows))
        for tensor, array in zip(ours, mirror_masks(ids.numpy(), objective, SEED, step, rows), strict=True):
            np.testing.assert_array_equal(tensor.numpy(), array)
        counted = num_masked(ids, special, objective)
        assert torch.equal(counted.float(), ours.weight_BN.sum(1))


@given(
    lengths=st.lists(st.integers(0, 32), min_size=1, max_size=5),
    mask_prob=st.floats(0.01, 0.99),
    masking=st.sampled_from(MODES),
    keep=st.floats(0.0, 1.0),
    data=st.data(),
)
@settings(max_examples=80, deadline=None)
def test_invariants(lengths: list[int], mask_prob: float, masking: Any, keep: float, data: Any) -> None:
    ids = torch.zeros(len(lengths), 32, dtype=torch.int64)
    for row, length in zip(ids, lengths, strict=True):
        row[:length] = torch.tensor(data.draw(st.lists(st.integers(1, 9), min_size=length, max_size=length)))
    objective = ObjectiveConfig(mask_prob=mask_prob, masking=masking, mask_token_prob=keep)
    names = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
    masking_out = mask_rows(ids, names, objective, 1, 2, torch.arange(len(lengths)))
    used = masking_out.weight_BN > 0
    assert masking_out.position_BN.shape == (len(lengths), num_slots(mask_prob, 32))
    assert not masking_out.position_BN[~used].any()
    assert set(ids.gather(1, masking_out.position_BN)[used].tolist()) <= {1, *range(5, 10)}
    changed = masking_out.input_BS != ids
    assert (masking_out.input_BS[changed] == names.mask).all()
    for b in range(len(lengths)):
        chosen = masking_out.position_BN[b][used[b]].tolist()
        assert set(changed[b].nonzero().flatten().tolist()) <= set(chosen)
        if masking == "without_replacement":
            assert len(set(chosen)) == len(chosen)
        if keep == 1.0:
            assert set(changed[b].nonzero().flatten().tolist()) == set(chosen)


@pytest.mark.parametrize("masking", MODES)
def test_a_row_is_masked_alike_in_any_batch(masking: Any, make_ids: Callable[..., torch.Tensor], special: Any) -> None:
    objective = ObjectiveConfig(masking=masking)
    ids, rows = make_ids([64, 50, 30, 64], seq_len=64), torch.tensor([100, 101, 102, 103])
    whole = mask_rows(ids, special, objective, 5, 6, rows)
    for part in (slice(0, 1), slice(1, 4), slice(3, 4)):
        alone = mask_rows(ids[part], special, objective, 5, 6, rows[part])
        assert all(torch.equal(a, w[part]) for a, w in zip(alone, whole, strict=True))


def test_steps_rows_and_seeds_differ(make_ids: Callable[..., torch.Tensor], special: Any) -> None:
    ids, objective = make_ids([64], seq_len=64), ObjectiveConfig()
    keys = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)]
    positions = [mask_rows(ids, special, objective, s, t, torch.tensor([r])).position_BN for s, t, r in keys]
    assert len({tuple(p.flatten().tolist()) for p in positions}) == len(keys)


@pytest.mark.parametrize(("mask_prob", "slots"), [(0.25, 130), (0.15, 79)])
def test_exact_counts_without_replacement(
    mask_prob: float, slots: int, make_ids: Callable[..., torch.Tensor], special: Any
) -> None:
    """All 512 tokens real: exactly round(512 p) distinct positions in every row, on the paper's number of slots."""
    objective = ObjectiveConfig(mask_prob=mask_prob)
    masking = mask_rows(make_ids([512] * 8, 512), special, objective, 1, 2, torch.arange(8))
    assert masking.position_BN.shape == (8, slots)
    for positions, weights in zip(masking.position_BN, masking.weight_BN, strict=True):
        assert len(positions[weights > 0].unique()) == round(512 * mask_prob)


def test_every_candidate_is_as_likely_and_15_percent_keep_their_token(special: Any) -> None:
    ids = torch.full((4000, 32), 7)
    ids[:, 0], ids[:, -1] = special.cls, special.sep
    masking = mask_rows(ids, special, ObjectiveConfig(mask_prob=0.25), 3, 4, torch.arange(4000))
    used = masking.weight_BN > 0
    counts = torch.bincount(masking.position_BN[used], minlength=32)[1:31].double()
    expected = counts.sum() / 30
    assert counts.sum() == 4000 * 8
    # 29 degrees of freedom; draws of one row repel each other, so the statistic is smaller than chi-square's.
    assert ((counts - expected) ** 2 / expected).sum() < 58.3  # p = 0.001
    shown = (masking.input_BS == special.mask).sum() / used.sum()
    assert shown.item() == pytest.approx(0.85, abs=4 * (0.85 * 0.15 / 32_000) ** 0.5)


@pytest.mark.parametrize(("mask_prob", "paper"), [(0.25, "22.3"), (0.15, "14.1")])
def test_real_rate_of_the_reference_draw(mask_prob: float, paper: str, special: Any) -> None:
    """n draws with replacement from 509 candidates hit 509 (1 - (1 - 1/509)^n) of them."""
    num_rows = 4000
    ids = torch.full((num_rows, 512), 7)
    ids[:, 0], ids[:, 255], ids[:, 511] = special.cls, special.sep, special.sep
    objective = ObjectiveConfig(mask_prob=mask_prob, masking="reference")
    masking = mask_rows(ids, special, objective, 3, 4, torch.arange(num_rows))
    draws = round(512 * mask_prob)
    assert (masking.weight_BN.sum(1) == draws).all()
    hit = torch.zeros(num_rows, 512).scatter_add(1, masking.position_BN, masking.weight_BN)
    rate, expected = (hit > 0).float().sum(1).mean() / 509, 1 - (1 - 1 / 509) ** draws
    assert rate.item() == pytest.approx(expected, abs=5e-4)
    assert abs(100 * expected - float(paper)) < 0.06
    # Some are drawn twice or more: 12.0 % of the masked ones at 25 %, 7.3 % at 15 %. 2e-3 is four deviations.
    twice = ((hit > 1).sum() / (hit > 0).sum()).item()
    assert twice == pytest.approx({0.25: 0.120, 0.15: 0.073}[mask_prob], abs=2e-3)
