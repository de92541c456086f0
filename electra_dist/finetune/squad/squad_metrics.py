"""Compute the official metrics of SQuAD 1.1 and 2.0: exact match, F1 and the best no-answer threshold.

Guarantee: the rules are those of the official scripts. An answer is lower-cased, its ASCII punctuation is deleted, the
words a, an and the are replaced by spaces, and runs of white space by one space. "Exact" means equal to one of the
gold answers. F1 compares the two bags of words; the best value over the gold answers counts. In version 2, gold
answers that are empty after normalization do not count, and a question without gold answers has the single gold answer
"". If either side has no words, F1 is 1 if both have none, else 0 (in version 1 always 0).

`best_threshold` is the official search for a no-answer threshold. A question whose no-answer score (the higher, the
less likely it has an answer) is at most the threshold gets the model's answer; the others get "".
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

Gold = Mapping[str, Sequence[str]]  # question id -> gold answers; empty for a question without an answer

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalized(answer: str) -> str:
    """Return an answer in the form in which answers are compared: "The U.S.  army" becomes "us army"."""
    without_punctuation = answer.lower().translate(_PUNCTUATION)
    without_articles = _ARTICLES.sub(" ", without_punctuation)
    return " ".join(without_articles.split())


def exact(predicted: str, gold: str) -> float:
    """Return 1.0 if both answers are equal after normalization, else 0.0."""
    return float(normalized(predicted) == normalized(gold))


def f1(predicted: str, gold: str, version: int) -> float:
    """Return the F1, in [0, 1], of two answers' words; two empty answers give 1 in version 2, and 0 in version 1."""
    predicted_words = normalized(predicted).split()
    gold_words = normalized(gold).split()
    is_one_empty = not predicted_words or not gold_words
    if version == 2 and is_one_empty:
        return float(predicted_words == gold_words)  # 1 if both are empty
    # The intersection of two counters has each word as often as both answers have it.
    num_common = (Counter(predicted_words) & Counter(gold_words)).total()
    if num_common == 0:
        return 0.0
    precision = num_common / len(predicted_words)
    recall = num_common / len(gold_words)
    return 2 * precision * recall / (precision + recall)


def squad1_metrics(predicted: Mapping[str, str], gold: Gold) -> dict[str, float]:
    """Return the metrics of SQuAD 1.1 in per cent: `exact` (share of exact matches) and `f1` (mean F1 of the words).

    A question without a prediction counts as wrong.
    """
    return {
        "exact": _mean_score(predicted, gold, score=exact),
        "f1": _mean_score(predicted, gold, score=partial(f1, version=1)),
    }


def squad2_metrics(predicted: Mapping[str, str], no_answer: Mapping[str, float], gold: Gold) -> dict[str, float]:
    """Return the metrics of SQuAD 2.0; scores are in per cent.

    `best_exact` and `best_f1` are the scores at the no-answer threshold that is best for each, and
    `best_exact_threshold` and `best_f1_threshold` are these thresholds. `has_answer_exact` and `has_answer_f1` are the
    scores over the questions that have an answer, with every question answered. `predicted` has the model's best
    answer to every question, even if it seems to have none; `no_answer` has the no-answer scores.
    """
    answerable_questions = [question for question in gold if gold[question]]
    # Gold answers that normalize to "" do not count; "" is the gold answer of a question that has no others.
    scored_gold = {}
    for question, answers in gold.items():
        non_empty_answers = [answer for answer in answers if normalized(answer)]
        scored_gold[question] = non_empty_answers or [""]

    metrics: dict[str, float] = {}
    for name, score in (("exact", exact), ("f1", partial(f1, version=2))):
        scores = {question: _best_score(predicted[question], scored_gold[question], score) for question in gold}
        best_score, threshold = best_threshold(scores, predicted, no_answer, gold)
        metrics[f"best_{name}"] = best_score
        metrics[f"best_{name}_threshold"] = threshold
        answerable_total = sum(scores[question] for question in answerable_questions)
        metrics[f"has_answer_{name}"] = 100.0 * answerable_total / max(1, len(answerable_questions))
    return metrics


def best_threshold(
    scores: Mapping[str, float], predicted: Mapping[str, str], no_answer: Mapping[str, float], gold: Gold
) -> tuple[float, float]:
    """Return the best mean score in per cent, and its no-answer threshold, found as the official script does.

    The search starts with "" as the prediction for every question, which is right for the questions without an answer.
    Then it gives the model's answer to one question after the other, from the lowest no-answer score on. The threshold
    is the no-answer score of the question at which the mean is highest, or 0 if answers never improve the mean.
    `scores` are those of the model's answers, in [0, 1].
    """
    num_unanswerable = sum(not answers for answers in gold.values())
    total = float(num_unanswerable)
    best_total = total
    threshold = 0.0
    for question in sorted(no_answer, key=lambda question: no_answer[question]):
        if gold[question]:
            total += scores[question]
        elif predicted[question]:  # a prediction of "" stays right
            total -= 1
        if total > best_total:
            best_total = total
            threshold = no_answer[question]
    return 100.0 * best_total / len(gold), threshold


def _mean_score(predicted: Mapping[str, str], gold: Gold, score: Callable[[str, str], float]) -> float:
    """Return the mean of `score` over all questions, in per cent; a question without a prediction counts as 0."""
    scores = []
    for question, answers in gold.items():
        if question in predicted:
            scores.append(_best_score(predicted[question], answers, score))
    return 100.0 * sum(scores) / len(gold)


def _best_score(predicted: str, gold: Sequence[str], score: Callable[[str, str], float]) -> float:
    return max(score(predicted, answer) for answer in gold)
