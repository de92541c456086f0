"""AUC, accuracy, precision and recall of detector scores, against scikit-learn and against the definition of AUC."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, precision_score, recall_score, roc_auc_score

from electra_dist.train.detection_measures import roc_auc, separation


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=1, max_size=60))
def test_auc_is_the_share_of_pairs_that_are_ranked_right_with_ties_counted_half(
    scored_labels: list[tuple[int, bool]],
):
    """A pair is a positive and a negative. The definition is computed over all pairs; without a pair AUC is NaN."""
    scores = np.array([score for score, _ in scored_labels])
    labels = np.array([label for _, label in scored_labels])
    positive_scores = scores[labels]
    negative_scores = scores[~labels]

    auc = roc_auc(scores, labels)

    if len(positive_scores) == 0 or len(negative_scores) == 0:
        assert math.isnan(auc)
        return
    differences = positive_scores[:, None] - negative_scores[None, :]  # of every pair
    share_right = (differences > 0).mean()
    share_tied = (differences == 0).mean()
    assert auc == pytest.approx(share_right + 0.5 * share_tied, abs=1e-12)


@pytest.mark.parametrize(("decimals", "positive_share"), [(None, 0.07), (1, 0.5), (0, 0.001), (3, 0.999)])
def test_all_measures_equal_those_of_scikit_learn(decimals: int | None, positive_share: float):
    """Logits rounded to few decimals have many ties. A logit above 0 predicts the positive class."""
    rng = np.random.default_rng(3)
    labels = rng.random(20_000) < positive_share
    logits = rng.normal(size=labels.size) + labels - 0.5
    if decimals is not None:
        logits = logits.round(decimals)
    logits = logits.astype(np.float32)
    predictions = logits > 0

    ours = separation(logits, labels)

    assert ours.auc == pytest.approx(roc_auc_score(labels, logits), abs=1e-12)
    assert ours.accuracy == pytest.approx(accuracy_score(labels, predictions))
    assert ours.precision == pytest.approx(precision_score(labels, predictions))
    assert ours.recall == pytest.approx(recall_score(labels, predictions))


def test_a_logit_of_exactly_zero_predicts_an_original_token():
    found = separation([0.0, 0.0, 1.0], [False, True, True])
    assert (found.accuracy, found.precision, found.recall) == (pytest.approx(2 / 3), 1.0, 0.5)


def test_measures_are_defined_without_a_positive_prediction_and_at_infinite_and_nan_scores():
    """Precision is 0 if nothing is predicted positive. A NaN among the scores makes AUC NaN; no token is an error."""
    without_positive_prediction = separation([-1.0, -2.0, -3.0], [True, False, False])
    assert without_positive_prediction.precision == 0.0
    assert without_positive_prediction.recall == 0.0
    assert without_positive_prediction.auc == 1.0

    assert math.isnan(roc_auc([0.0, math.nan], [0, 1]))
    assert roc_auc([-math.inf, math.inf], [0, 1]) == 1.0

    with pytest.raises(ValueError, match="no labelled token"):
        separation([], [])
