"""SQuAD's scores against hand-made cases and thresholds found by brute force."""

from __future__ import annotations

import math

import numpy as np
import pytest

from electra_dist.finetune.squad.squad_metrics import (
    best_threshold,
    exact,
    f1,
    normalized,
    squad1_metrics,
    squad2_metrics,
)


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
