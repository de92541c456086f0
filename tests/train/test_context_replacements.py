"""Replacements from other places: frequency alone gives an AUC of 0.5, context more, and every place is used once."""

from __future__ import annotations

import numpy as np
import pytest
from electra_kernels.operation_types import SpecialIds

from electra_dist.train.detection_measures import (
    NOT_COMPARED,
    ORIGINAL,
    REPLACED,
    ContextRows,
    auc_with_standard_error,
    replace_by_other_tokens,
    rows_needed,
)

SPECIAL = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
VOCAB_SIZE = 300


def text_rows(num_rows: int, seq_len: int = 32, seed: int = 0) -> np.ndarray:
    """Rows of a made-up language with Zipf's frequencies, in which even places repeat the token before them."""
    rng = np.random.default_rng(seed)
    probability = 1 / np.arange(1, VOCAB_SIZE - 4)
    ids = 5 + rng.choice(len(probability), size=(num_rows, seq_len), p=probability / probability.sum())
    ids[:, 2::2] = ids[:, 1:-1:2]
    ids[:, 0] = SPECIAL.cls
    ids[:, -1] = SPECIAL.sep
    ids[::3, -4:] = SPECIAL.pad
    return ids.astype(np.uint16)


def auc_of(rows: ContextRows, score_QS: np.ndarray) -> tuple[float, float]:
    """AUC and standard error of a score of every token, as an evaluation computes them."""
    compared = rows.label_QS != NOT_COMPARED
    row_QS = np.broadcast_to(rows.source_row_Q[:, None], compared.shape)
    return auc_with_standard_error(score_QS[compared], rows.label_QS[compared] == REPLACED, row_QS[compared])


@pytest.mark.parametrize("num_rows", [7, 400, 2000])
@pytest.mark.parametrize("mask_prob", [0.15, 0.25, 0.8])
def test_any_score_of_the_token_alone_has_an_auc_of_one_half(num_rows: int, mask_prob: float) -> None:
    ids = text_rows(num_rows)
    rows = replace_by_other_tokens(ids, SPECIAL, mask_prob, num_wanted=5000, seed=3)
    training_frequency = np.bincount(text_rows(3000, seed=1).ravel(), minlength=VOCAB_SIZE)
    random_score = np.random.default_rng(2).standard_normal(VOCAB_SIZE)
    for score_of_token in (training_frequency, -np.log1p(training_frequency), random_score):
        auc, _ = auc_of(rows, score_of_token[rows.shown_QS])
        assert auc == 0.5


def test_a_score_that_knows_the_context_is_far_above_one_half() -> None:
    rows = replace_by_other_tokens(text_rows(400), SPECIAL, 0.15, num_wanted=1000, seed=3)
    previous_QS = np.roll(rows.shown_QS, 1, axis=1)
    following_QS = np.roll(rows.shown_QS, -1, axis=1)
    differs_from_both = (rows.shown_QS != previous_QS) & (rows.shown_QS != following_QS)
    auc, standard_error = auc_of(rows, differs_from_both.astype(float))
    assert auc > 0.8
    assert 0 < standard_error < 0.02


def test_labels_say_what_was_replaced_and_no_place_is_replaced_twice() -> None:
    ids = text_rows(40)
    rows = replace_by_other_tokens(ids, SPECIAL, 0.15, num_wanted=10**9, seed=3)
    assert np.array_equal(rows.original_QS, ids[rows.source_row_Q])
    assert np.array_equal(rows.shown_QS != rows.original_QS, rows.label_QS == REPLACED)
    special = np.isin(rows.original_QS, [SPECIAL.pad, SPECIAL.cls, SPECIAL.sep, SPECIAL.mask])
    assert (rows.label_QS[special] == NOT_COMPARED).all()
    times_replaced = np.zeros(ids.shape, int)
    np.add.at(times_replaced, rows.source_row_Q, rows.label_QS == REPLACED)
    assert times_replaced.max() == 1
    # Six copies of 15 % each are all that can be had.
    assert len(rows.shown_QS) == 6 * len(ids)
    assert rows.num_replaced == (rows.label_QS == ORIGINAL).sum() == times_replaced.sum()
    num_places = (~special).sum() / 6
    assert 0.8 * num_places < rows.num_replaced < 0.9 * num_places  # without pairs of equal tokens


def test_as_few_copies_as_reach_the_wanted_number() -> None:
    ids = text_rows(200)
    one = replace_by_other_tokens(ids, SPECIAL, 0.15, num_wanted=1, seed=3)
    assert len(one.shown_QS) == 200
    two = replace_by_other_tokens(ids, SPECIAL, 0.15, num_wanted=one.num_replaced + 1, seed=3)
    assert len(two.shown_QS) == 400
    # The first copy shows the same tokens; in the second, other places serve as originals, too.
    assert np.array_equal(two.shown_QS[:200], one.shown_QS)
    assert two.num_replaced > one.num_replaced
    needed = rows_needed(5000, 0.15, 32)
    assert replace_by_other_tokens(text_rows(needed), SPECIAL, 0.15, 1, seed=3).num_replaced == pytest.approx(
        5000, rel=0.1
    )


def test_equal_keys_give_equal_rows_and_another_seed_gives_others() -> None:
    ids = text_rows(50)
    first, again, other = (replace_by_other_tokens(ids, SPECIAL, 0.2, 500, seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(first.shown_QS, again.shown_QS) and np.array_equal(first.label_QS, again.label_QS)
    assert not np.array_equal(first.shown_QS, other.shown_QS)


def test_rows_with_fewer_than_two_places_have_nothing_to_compare() -> None:
    ids = np.array([[SPECIAL.cls, 9, SPECIAL.sep, SPECIAL.pad]], np.uint16)
    rows = replace_by_other_tokens(ids, SPECIAL, 0.25, 5000, seed=1)
    assert rows.num_replaced == 0
    assert np.array_equal(rows.shown_QS, ids)
