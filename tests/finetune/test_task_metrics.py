"""Scores of classification and regression, and linear probes, against their definitions or values by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from electra_dist.finetune.finetune_and_probe import linear_outputs
from electra_dist.finetune.task_metrics import classification_metrics, degenerate, regression_metrics


def test_accuracy_f1_and_mcc_of_two_labels_equal_the_formulas_on_the_confusion_counts() -> None:
    rng = np.random.default_rng(0)
    predicted = rng.integers(0, 2, 200)
    true = rng.integers(0, 2, 200)

    metrics = classification_metrics(predicted, true, 2)

    tp = int(((predicted == 1) & (true == 1)).sum())
    tn = int(((predicted == 0) & (true == 0)).sum())
    fp = int(((predicted == 1) & (true == 0)).sum())
    fn = int(((predicted == 0) & (true == 1)).sum())
    mcc = (tp * tn - fp * fn) / math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    assert metrics["accuracy"] == pytest.approx((tp + tn) / 200)
    assert metrics["f1"] == pytest.approx(2 * tp / (2 * tp + fp + fn))
    assert metrics["mcc"] == pytest.approx(mcc)


def test_f1_of_three_labels_is_the_mean_of_the_labels_f1() -> None:
    predicted = np.array([0, 0, 1, 1])
    true = np.array([0, 1, 1, 2])

    metrics = classification_metrics(predicted, true, 3)

    f1_of_0 = 2 / 3  # precision 1/2, recall 1
    f1_of_1 = 1 / 2  # precision 1/2, recall 1/2
    f1_of_2 = 0  # never predicted
    assert metrics["f1"] == pytest.approx((f1_of_0 + f1_of_1 + f1_of_2) / 3)


def test_a_mean_f1_leaves_out_labels_that_are_neither_true_nor_predicted() -> None:
    predicted = np.array([0, 3, 3])
    true = np.array([0, 3, 1])

    metrics = classification_metrics(predicted, true, 100)

    assert metrics["f1"] == pytest.approx((1 + 2 / 3 + 0) / 3)  # of the labels 0, 3 and 1
    assert classification_metrics(true, true, 100)["f1"] == 1.0


@pytest.mark.filterwarnings("error")
def test_a_single_label_gives_metrics_without_a_warning() -> None:
    ones = np.ones(3, int)
    assert classification_metrics(ones, ones, 2) == {"accuracy": 1.0, "mcc": 0.0, "f1": 1.0}
    assert classification_metrics(0 * ones, 0 * ones, 2) == {"accuracy": 1.0, "mcc": 0.0, "f1": 0.0}
    assert classification_metrics(ones, ones, 3) == {"accuracy": 1.0, "mcc": 0.0, "f1": 1.0}


def test_pearson_is_the_correlation_of_the_values_and_spearman_that_of_their_ranks() -> None:
    """NumPy's corrcoef is the independent formula; the values have no ties."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=50)
    y = rng.normal(size=50)

    metrics = regression_metrics(x, y)

    ranks_of_x = np.argsort(np.argsort(x))
    ranks_of_y = np.argsort(np.argsort(y))
    assert metrics["pearson"] == pytest.approx(np.corrcoef(x, y)[0, 1])
    assert metrics["spearman"] == pytest.approx(np.corrcoef(ranks_of_x, ranks_of_y)[0, 1])


def test_equal_values_share_their_mean_rank_in_spearman() -> None:
    metrics = regression_metrics(np.array([1, 1, 2]), np.array([5, 6, 7]))

    # Ranks 1.5 1.5 3 and 1 2 3: the correlation is 1.5 / sqrt(1.5 * 2) = sqrt(0.75).
    assert metrics["spearman"] == pytest.approx(math.sqrt(0.75))


def test_equal_predictions_for_all_examples_are_degenerate_and_have_correlation_zero() -> None:
    constant = np.full(7, 0.25)

    assert regression_metrics(constant, np.arange(7.0)) == {"pearson": 0.0, "spearman": 0.0}
    assert degenerate(constant, ()) == "degenerate: all 7 predictions are 0.25"
    assert degenerate(np.ones(7, int), ("no", "yes")) == "degenerate: all 7 predictions are `yes`"
    assert degenerate(np.array([0, 1]), ("no", "yes")) == ""
    assert classification_metrics(np.ones(4, int), np.array([0, 1, 1, 1]), 2)["mcc"] == 0.0


def test_a_linear_probe_finds_a_linear_decision_rule_and_a_regression_line() -> None:
    rng = np.random.default_rng(2)
    train = rng.normal(size=(400, 5)).astype(np.float32)
    test = rng.normal(size=(100, 5)).astype(np.float32)

    labels = (train[:, 0] + train[:, 1] > 0).astype(int) * 2  # 0 or 2; label 1 never occurs
    logits = linear_outputs(train, labels, {"": test}, 3, num_distinct=400, metric="accuracy").outputs[""]
    true_labels = (test[:, 0] + test[:, 1] > 0) * 2
    assert (logits.argmax(1) == true_labels).mean() > 0.97

    values = train[:, 2] * 3 + 1
    outputs = linear_outputs(train, values, {"": test}, 0, num_distinct=200, metric="spearman").outputs[""]
    true_values = test[:, 2] * 3 + 1
    assert np.abs(outputs[:, 0] - true_values).max() < 0.1

    one_label = linear_outputs(train, np.full(400, 2), {"": test}, 3, num_distinct=400, metric="accuracy").outputs[""]
    assert (one_label == [-np.inf, -np.inf, 0.0]).all()
