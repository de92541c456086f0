"""SQuAD's scores against cases made by hand, thresholds against brute force, and which spans may be an answer.

The beam that proposes the spans is tested in test_task_heads.py.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from electra_dist.finetune.models import SpanScores
from electra_dist.finetune.passage_windows import AnswerWindow
from electra_dist.finetune.squad_task import (
    Span,
    best_spans,
    best_threshold,
    exact,
    f1,
    normalized,
    squad1_metrics,
    squad2_metrics,
)


@pytest.mark.parametrize(
    ("answer", "normalized_answer"),
    [
        ("The Apple, an  orange!", "apple orange"),
        ("theatre and a-b", "theatre and ab"),  # articles are whole words; punctuation is deleted, not spaced
        ("the.", ""),
        (" A\tB\nC ", "b c"),
        ("$5.00 \u2014 \u00c9t\u00e9", "500 \u2014 \u00e9t\u00e9"),  # only ASCII punctuation; accents stay
    ],
)
def test_answers_are_normalised_by_the_rules_of_the_official_script(answer: str, normalized_answer: str) -> None:
    assert normalized(answer) == normalized_answer


def test_exact_match_and_f1_of_one_answer_equal_the_values_by_hand() -> None:
    assert exact("The cat", "cat.") == 1.0
    assert exact("cats", "cat") == 0.0
    # Without the article: precision 2 of 2 words, recall 2 of 3.
    assert f1("the black cat", "black cat sat", 1) == pytest.approx(2 * 1 * (2 / 3) / (1 + 2 / 3))
    # Answers are bags of words: one x and one y are common.
    assert f1("x x y", "x y y", 1) == pytest.approx(2 / 3)
    # Both answers are empty without their article; the versions of SQuAD count this differently.
    assert f1("the", "a", 1) == 0.0
    assert f1("the", "a", 2) == 1.0
    assert f1("", "cat", 1) == 0.0
    assert f1("", "cat", 2) == 0.0


def test_squad_1_takes_the_best_gold_answer_and_counts_a_missing_prediction_as_wrong() -> None:
    gold = {"q1": ["red car", "car"], "q2": ["Paris"], "q3": ["x"]}

    metrics = squad1_metrics({"q1": "the car", "q2": "in Paris"}, gold)

    # q1 equals its second gold answer; q2 has precision 1/2 and recall 1, so F1 2/3; q3 has no prediction.
    assert metrics == {"exact": pytest.approx(100 / 3), "f1": pytest.approx(100 * (1 + 2 / 3) / 3)}


def exact_with_threshold(
    threshold: float, gold: dict[str, list[str]], predicted: dict[str, str], no_answer: dict[str, float]
) -> float:
    """Return the percentage of correct questions if those with a no-answer score above `threshold` stay unanswered."""
    num_correct = 0
    for question, gold_answers in gold.items():
        answer = predicted[question] if no_answer[question] <= threshold else ""
        correct_answer = gold_answers[0] if gold_answers else ""
        num_correct += answer == correct_answer
    return 100 * num_correct / len(gold)


def test_the_best_exact_match_and_its_threshold_are_those_that_brute_force_finds() -> None:
    rng = np.random.default_rng(5)
    for _ in range(20):
        gold = {f"q{i}": ["cat"] if rng.random() < 0.6 else [] for i in range(12)}
        predicted = {question: "cat" if rng.random() < 0.6 else "dog" for question in gold}
        no_answer = dict(zip(gold, rng.normal(size=12).tolist()))

        metrics = squad2_metrics(predicted, no_answer, gold)

        thresholds = [-math.inf, *no_answer.values()]
        best = max(exact_with_threshold(threshold, gold, predicted, no_answer) for threshold in thresholds)
        never_answering = exact_with_threshold(-math.inf, gold, predicted, no_answer)
        assert metrics["best_exact"] == pytest.approx(best)
        if best > never_answering:
            found_threshold = metrics["best_exact_threshold"]
            assert exact_with_threshold(found_threshold, gold, predicted, no_answer) == pytest.approx(best)


def test_the_threshold_stays_at_zero_if_no_threshold_beats_never_answering() -> None:
    gold = {"a": [], "b": []}  # neither question has an answer
    scores_of_answers = {"a": 0.0, "b": 0.0}
    predicted = {"a": "x", "b": "y"}
    no_answer = {"a": -3.0, "b": 2.0}

    score, threshold = best_threshold(scores_of_answers, predicted, no_answer, gold)

    assert score == 100.0
    assert threshold == 0.0


def test_a_span_is_an_answer_only_if_it_is_short_lies_in_the_passage_and_starts_at_an_owned_token() -> None:
    """The row is [CLS], a question token, [SEP], four passage tokens at positions 3 to 6, and [SEP] at 7.

    The window does not own the third token of the passage, because another window has more context for it.
    """
    window = AnswerWindow(0, [], offset=3, first=0, owned=[True, True, False, True])

    def best_of_one_candidate(start: int, end: int) -> Span | None:
        """Return the best span if the model proposes one start and one end only, with log-probability 0."""
        scores = SpanScores(
            torch.zeros(1, 1),
            torch.tensor([[start]]),
            torch.zeros(1, 1, 1),
            torch.tensor([[[end]]]),
            torch.zeros(1),
        )
        [span] = best_spans([window], scores, max_answer=3)
        return span

    assert best_of_one_candidate(3, 5) == (0.0, 0, 2)
    assert best_of_one_candidate(3, 6) is None  # four tokens
    assert best_of_one_candidate(5, 6) is None  # starts at the token of another window
    assert best_of_one_candidate(0, 3) is None  # starts at [CLS]
    assert best_of_one_candidate(4, 3) is None  # ends before it starts
    assert best_of_one_candidate(6, 7) is None  # ends at [SEP]
