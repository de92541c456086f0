"""Scores of classification and regression, and linear probes, against their definitions worked out here or by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from electra_dist.finetune.task_metrics import classification_metrics, degenerate, linear_outputs, regression_metrics


def test_binary_scores_equal_the_formulas_on_the_confusion_counts() -> None:
    rng = np.random.default_rng(0)
    predicted, true = rng.integers(0, 2, 200), rng.integers(0, 2, 200)
    tp = int(((predicted == 1) & (true == 1)).sum())
    tn = int(((predicted == 0) & (true == 0)).sum())
    fp = int(((predicted == 1) & (true == 0)).sum())
    fn = int(((predicted == 0) & (true == 1)).sum())
    found = classification_metrics(predicted, true, 2)
    assert found["accuracy"] == pytest.approx((tp + tn) / 200)
    assert found["f1"] == pytest.approx(2 * tp / (2 * tp + fp + fn))
    mcc = (tp * tn - fp * fn) / math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    assert found["mcc"] == pytest.approx(mcc)


def test_f1_of_three_labels_is_the_mean_over_the_labels() -> None:
    predicted, true = np.array([0, 0, 1, 1]), np.array([0, 1, 1, 2])
    # Label 0: precision 1/2, recall 1. Label 1: 1/2 and 1/2. Label 2: never predicted.
    assert classification_metrics(predicted, true, 3)["f1"] == pytest.approx((2 / 3 + 1 / 2 + 0) / 3)


def test_correlations_equal_the_formula_on_values_and_on_ranks() -> None:
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=50), rng.normal(size=50)
    found = regression_metrics(x, y)
    assert found["pearson"] == pytest.approx(np.corrcoef(x, y)[0, 1])
    ranks = [np.argsort(np.argsort(values)) for values in (x, y)]
    assert found["spearman"] == pytest.approx(np.corrcoef(*ranks)[0, 1])


def test_ties_share_their_mean_rank_in_spearman() -> None:
    # Ranks 1.5 1.5 3 against 1 2 3: covariance 1.5 / sqrt(1.5 * 2).
    assert regression_metrics(np.array([1, 1, 2]), np.array([5, 6, 7]))["spearman"] == pytest.approx(math.sqrt(0.75))


def test_constant_predictions_are_named_and_score_no_correlation() -> None:
    same = np.full(7, 0.25)
    assert regression_metrics(same, np.arange(7.0)) == {"pearson": 0.0, "spearman": 0.0}
    assert degenerate(same, ()) == "degenerate: all 7 predictions are 0.25"
    assert degenerate(np.ones(7, int), ("no", "yes")) == "degenerate: all 7 predictions are `yes`"
    assert degenerate(np.array([0, 1]), ("no", "yes")) == ""
    assert classification_metrics(np.ones(4, int), np.array([0, 1, 1, 1]), 2)["mcc"] == 0.0


def test_a_linear_probe_finds_a_linear_rule_and_the_least_squares_line() -> None:
    rng = np.random.default_rng(2)
    x, new = rng.normal(size=(400, 5)).astype(np.float32), rng.normal(size=(100, 5)).astype(np.float32)
    labels = (x[:, 0] + x[:, 1] > 0).astype(int) * 2  # label 1 never occurs
    output = linear_outputs(x, labels, {"": new}, 3, num_distinct=400, metric="accuracy")[""]
    assert (output.argmax(1) == (new[:, 0] + new[:, 1] > 0) * 2).mean() > 0.97
    numbers = linear_outputs(x, x[:, 2] * 3 + 1, {"": new}, 0, num_distinct=200, metric="spearman")[""]
    assert np.abs(numbers[:, 0] - (new[:, 2] * 3 + 1)).max() < 0.1
