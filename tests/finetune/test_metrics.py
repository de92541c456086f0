"""Scores against their definitions, worked out here or by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from electra_dist.finetune.metrics import classification_metrics, degenerate, linear_outputs, regression_metrics
from electra_dist.finetune.squad.metrics import best_threshold, exact, f1, normalized, squad1_metrics, squad2_metrics


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


@pytest.mark.parametrize(
    ("answer", "plain"),
    [
        ("The Apple, an  orange!", "apple orange"),
        ("theatre and a-b", "theatre and ab"),  # articles are whole words; punctuation is deleted, not spaced
        ("the.", ""),
        (" A\tB\nC ", "b c"),
        ("$5.00 \u2014 \u00c9t\u00e9", "500 \u2014 \u00e9t\u00e9"),  # only ASCII punctuation; accents stay
    ],
)
def test_answers_are_normalised_by_the_official_rules(answer: str, plain: str) -> None:
    assert normalized(answer) == plain


def test_squad_exact_and_f1_of_hand_made_cases() -> None:
    assert exact("The cat", "cat.") == 1.0
    assert exact("cats", "cat") == 0.0
    assert f1("the black cat", "black cat sat", 1) == pytest.approx(2 * 1 * (2 / 3) / (1 + 2 / 3))
    assert f1("x x y", "x y y", 1) == pytest.approx(2 / 3)  # a bag of words: one x and one y in common
    assert (f1("the", "a", 1), f1("the", "a", 2)) == (0.0, 1.0)  # nothing is left of either side
    assert (f1("", "cat", 1), f1("", "cat", 2)) == (0.0, 0.0)


def test_squad_1_takes_the_best_gold_answer_and_counts_missing_predictions() -> None:
    gold = {"q1": ["red car", "car"], "q2": ["Paris"], "q3": ["x"]}
    found = squad1_metrics({"q1": "the car", "q2": "in Paris"}, gold)
    assert found == {"exact": pytest.approx(100 / 3), "f1": pytest.approx(100 * (1 + 2 / 3) / 3)}


def test_squad_2_finds_the_best_threshold_that_brute_force_finds() -> None:
    rng = np.random.default_rng(5)
    for _ in range(20):
        gold = {f"q{i}": ["cat"] if rng.random() < 0.6 else [] for i in range(12)}
        predicted = {q: "cat" if rng.random() < 0.6 else "dog" for q in gold}
        no_answer = dict(zip(gold, rng.normal(size=12).tolist()))
        found = squad2_metrics(predicted, no_answer, gold)

        def score_at(threshold: float, gold=gold, predicted=predicted, no_answer=no_answer) -> float:
            answers = {q: predicted[q] if no_answer[q] <= threshold else "" for q in gold}
            return 100 * sum(answers[q] == (gold[q][0] if gold[q] else "") for q in gold) / 12

        best = max(map(score_at, [-math.inf, *no_answer.values()]))
        assert found["best_exact"] == pytest.approx(best)
        if best > score_at(-math.inf):
            assert score_at(found["best_exact_threshold"]) == pytest.approx(best)


def test_a_threshold_that_never_pays_stays_at_zero() -> None:
    gold = {"a": [], "b": []}
    assert best_threshold({"a": 0.0, "b": 0.0}, {"a": "x", "b": "y"}, {"a": -3.0, "b": 2.0}, gold) == (100.0, 0.0)


def test_a_linear_probe_finds_a_linear_rule_and_the_least_squares_line() -> None:
    rng = np.random.default_rng(2)
    x, new = rng.normal(size=(400, 5)).astype(np.float32), rng.normal(size=(100, 5)).astype(np.float32)
    labels = (x[:, 0] + x[:, 1] > 0).astype(int) * 2  # label 1 never occurs
    output = linear_outputs(x, labels, {"": new}, 3, num_distinct=400, metric="accuracy")[""]
    assert (output.argmax(1) == (new[:, 0] + new[:, 1] > 0) * 2).mean() > 0.97
    numbers = linear_outputs(x, x[:, 2] * 3 + 1, {"": new}, 0, num_distinct=200, metric="spearman")[""]
    assert np.abs(numbers[:, 0] - (new[:, 2] * 3 + 1)).max() < 0.1
