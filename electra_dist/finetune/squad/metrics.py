"""SQuAD's official scores, of both versions.

Rules: an answer is lower-cased, its ASCII punctuation is deleted, the words a, an and the become spaces, and runs of
white space one space. Exact: equal to one of the gold answers. F1: of the two bags of words, best over the gold
answers. Version 2: a gold answer that is empty after that does not count, a question without gold answers has the one
gold answer "", and if either side has no words, F1 is 1 where both have none, else 0 (version 1: always 0).

`best_threshold` is the official search: questions in the order of their no-answer score, each answered up to the
threshold and "" above it.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

Gold = Mapping[str, Sequence[str]]  # question id -> gold answers

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalized(answer: str) -> str:
    """The answer as it is compared."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def exact(predicted: str, gold: str) -> float:
    """1 if both are the same answer."""
    return float(normalized(predicted) == normalized(gold))


def f1(predicted: str, gold: str, version: int) -> float:
    """Harmonic mean of precision and recall over words."""
    predicted_words, gold_words = normalized(predicted).split(), normalized(gold).split()
    if version == 2 and not (predicted_words and gold_words):
        return float(predicted_words == gold_words)
    common = (Counter(predicted_words) & Counter(gold_words)).total()
    if common == 0:
        return 0.0
    precision, recall = common / len(predicted_words), common / len(gold_words)
    return 2 * precision * recall / (precision + recall)


def squad1_metrics(predicted: Mapping[str, str], gold: Gold) -> dict[str, float]:
    """`exact` and `f1`, in per cent; a question without a prediction counts as wrong."""
    return {"exact": _mean(predicted, gold, exact), "f1": _mean(predicted, gold, lambda p, g: f1(p, g, 1))}


def squad2_metrics(predicted: Mapping[str, str], no_answer: Mapping[str, float], gold: Gold) -> dict[str, float]:
    """The official numbers, in per cent.

    `best_*` are at the best threshold; `has_answer_*` are over the questions with an answer, each answered.

    Args:
        predicted: best answer of each question, as if it had one.
        no_answer: the higher, the less likely that it has one.
        gold: gold answers; none for a question without an answer.
    """
    answered = [question for question in gold if gold[question]]
    real = {question: [g for g in golds if normalized(g)] or [""] for question, golds in gold.items()}
    metrics: dict[str, float] = {}
    for name, score in (("exact", exact), ("f1", lambda p, g: f1(p, g, 2))):
        scores = {question: _best(predicted[question], real[question], score) for question in gold}
        best, threshold = best_threshold(scores, predicted, no_answer, gold)
        metrics |= {f"best_{name}": best, f"best_{name}_threshold": threshold}
        metrics[f"has_answer_{name}"] = 100.0 * sum(scores[q] for q in answered) / max(1, len(answered))
    return metrics


def best_threshold(
    scores: Mapping[str, float], predicted: Mapping[str, str], no_answer: Mapping[str, float], gold: Gold
) -> tuple[float, float]:
    """The best mean score in per cent over all thresholds, and that threshold (0 where answering never pays)."""
    current = best = float(sum(not golds for golds in gold.values()))
    threshold = 0.0
    for question in sorted(no_answer, key=lambda question: no_answer[question]):
        if gold[question]:
            current += scores[question]
        elif predicted[question]:
            current -= 1
        if current > best:
            best, threshold = current, no_answer[question]
    return 100.0 * best / len(gold), threshold


def _mean(predicted: Mapping[str, str], gold: Gold, score: Callable[[str, str], float]) -> float:
    total = sum(_best(predicted[question], gold[question], score) for question in gold if question in predicted)
    return 100.0 * total / len(gold)


def _best(predicted: str, gold: Sequence[str], score: Callable[[str, str], float]) -> float:
    return max(score(predicted, answer) for answer in gold)
