"""AUC, precision and recall against scikit-learn and against the definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, precision_score, recall_score, roc_auc_score

from electra_dist.analysis.roc_auc import roc_auc, separation


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=1, max_size=60))
def test_auc_is_the_probability_of_ranking_a_pair_rightly_ties_counting_half(pairs: list[tuple[int, bool]]):
    scores, labels = (np.array(column) for column in zip(*pairs))
    positive, negative = scores[labels], scores[~labels]
    if not len(positive) or not len(negative):
        assert math.isnan(roc_auc(scores, labels))
        return
    pair = positive[:, None] - negative[None, :]
    assert roc_auc(scores, labels) == pytest.approx((pair > 0).mean() + 0.5 * (pair == 0).mean(), abs=1e-12)


@pytest.mark.parametrize(("decimals", "positive_share"), [(None, 0.07), (1, 0.5), (0, 0.001), (3, 0.999)])
def test_equal_to_scikit_learn(decimals: int | None, positive_share: float):
    rng = np.random.default_rng(3)
    labels = rng.random(20_000) < positive_share
    logits = rng.normal(size=labels.size) + labels - 0.5
    logits = (logits if decimals is None else logits.round(decimals)).astype(np.float32)
    ours = separation(logits, labels)
    called = logits > 0
    assert ours.auc == pytest.approx(roc_auc_score(labels, logits), abs=1e-12)
    assert ours.accuracy == pytest.approx(accuracy_score(labels, called))
    assert ours.precision == pytest.approx(precision_score(labels, called))
    assert ours.recall == pytest.approx(recall_score(labels, called))


def test_degenerate_inputs():
    silent = separation([-1.0, -2.0, -3.0], [True, False, False])
    assert (silent.precision, silent.recall, silent.auc) == (0.0, 0.0, 1.0)
    assert math.isnan(roc_auc([0.0, math.nan], [0, 1]))
    assert roc_auc([-math.inf, math.inf], [0, 1]) == 1.0
    with pytest.raises(ValueError, match="no labelled token"):
        separation([], [])
