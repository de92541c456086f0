"""Compute metrics of predictions, and detect degenerate predictions.

Guarantee: all metrics are fractions, computed by scikit-learn and scipy. Classification has accuracy, Matthews
correlation and F1 (of label 1 if there are two labels, otherwise the unweighted mean over the labels that occur, as in
scikit-learn); regression has Pearson and Spearman. A correlation is undefined if all predictions, or all true values,
are equal. It counts as 0 then; `degenerate` describes the first case, `remarks_on_equal_numbers` the second.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np

from electra_dist.errors import missing_packages
from electra_dist.finetune.stored_scores import ItemResults
from electra_dist.word_pattern import WORD_PATTERN

try:
    from scipy import stats
    from sklearn import metrics as sk
except ImportError:
    raise missing_packages("fine-tuning", "finetune") from None

_WORD = re.compile(WORD_PATTERN)
_NUM_RESAMPLES = 200  # resamples of the bootstrap; the relative error of a standard error is then about 5 %


def classification_metrics(predicted: np.ndarray, true: np.ndarray, num_labels: int) -> dict[str, float]:
    """Return `accuracy`, `mcc` (Matthews correlation) and `f1` of predicted label numbers [N], as fractions.

    A mean F1 is over the labels that are true or predicted at least once: about others the examples say nothing.
    """
    average = "binary" if num_labels == 2 else "macro"
    is_one_label = len(np.union1d(true, predicted)) == 1  # scikit-learn prints a warning of this
    return {
        "accuracy": float(sk.accuracy_score(true, predicted)),
        "mcc": 0.0 if is_one_label else float(sk.matthews_corrcoef(true, predicted)),
        "f1": float(sk.f1_score(true, predicted, average=average, zero_division=0.0)),
    }


def regression_metrics(predicted: np.ndarray, true: np.ndarray) -> dict[str, float]:
    """Return the correlations `pearson` and `spearman` of two arrays [N], both 0 if either array is constant."""
    if np.ptp(predicted) == 0 or np.ptp(true) == 0:
        return {"pearson": 0.0, "spearman": 0.0}
    return {
        "pearson": float(stats.pearsonr(predicted, true).statistic),
        "spearman": float(stats.spearmanr(predicted, true).statistic),
    }


def retrieval_metrics(
    rankings: Sequence[Sequence[int]], relevant: Sequence[Collection[int]], depth: int
) -> dict[str, float]:
    """Return the means over queries of nDCG and recall at `depth` and of recall at 1, as fractions.

    `rankings` has the numbers of the best documents of each query, best first; `relevant` those that belong to it.
    """
    gains = 1.0 / np.log2(np.arange(2, depth + 2))
    sums = np.zeros(3)
    for ranking, of_query in zip(rankings, relevant, strict=True):
        is_hit = np.array([document in of_query for document in ranking[:depth]])
        best_gain = gains[: len(of_query)].sum()  # all relevant documents come first
        ndcg_of_query = is_hit @ gains[: len(is_hit)] / best_gain
        sums += (ndcg_of_query, is_hit[0] / len(of_query), is_hit.sum() / len(of_query))
    ndcg, recall_1, recall = (sums / len(rankings)).tolist()
    return {f"ndcg{depth}": ndcg, "recall1": recall_1, f"recall{depth}": recall}


def bm25_scores(queries: Sequence[str], documents: Sequence[str]) -> Iterator[np.ndarray]:
    """Yield the BM25 scores of all documents [D] for each query, with k1 = 1.2 and b = 0.75 as in Lucene.

    Words are runs of letters and digits with their marks, in lower case.
    """
    k1, b = 1.2, 0.75
    words_of = [Counter(_WORD.findall(document.lower())) for document in documents]
    lengths_D = np.array([words.total() for words in words_of], np.float64)
    norm_D = k1 * (1 - b + b * lengths_D / max(lengths_D.mean(), 1.0))
    documents_with: dict[str, list[int]] = defaultdict(list)  # word -> numbers of the documents that contain it
    counts_with: dict[str, list[int]] = defaultdict(list)  # word -> how often it occurs in each of these documents
    for document, words in enumerate(words_of):
        for word, count in words.items():
            documents_with[word].append(document)
            counts_with[word].append(count)
    for query in queries:
        scores_D = np.zeros(len(documents))
        for word in _WORD.findall(query.lower()):
            if word in documents_with:
                places = np.array(documents_with[word])
                counts = np.array(counts_with[word])
                idf = np.log(1 + (len(documents) - len(places) + 0.5) / (len(places) + 0.5))
                scores_D[places] += idf * counts * (k1 + 1) / (counts + norm_D[places])
        yield scores_D


def degenerate(predicted: np.ndarray, labels: Sequence[str]) -> str:
    """Return a one-line description if all predictions are equal (degenerate), otherwise "".

    A model that always predicts the same has learnt nothing from its inputs, although its accuracy may look high.
    Fewer than two predictions are never degenerate. `labels` are the names of the labels; empty for a regression.
    """
    if len(predicted) < 2:
        return ""
    are_different = np.ptp(predicted) > 0
    if are_different:
        return ""
    if labels:
        label_number = int(predicted[0])
        value_text = f"`{labels[label_number]}`"
    else:
        value_text = f"{float(predicted[0]):.4g}"
    return f"degenerate: all {len(predicted)} predictions are {value_text}"


def resampled(num_items: int, metric: Callable[[np.ndarray], float]) -> list[float]:
    """Return a metric on each of 200 bootstrap resamples of the items 0 to `num_items` - 1.

    `metric` gets the numbers of the drawn items, int64 [num_items]. The resamples are the same in every call with as
    many items, so the results of two encoders on the same items are paired.
    """
    generator = np.random.default_rng(0)
    return [metric(generator.integers(num_items, size=num_items)) for _ in range(_NUM_RESAMPLES)]


def sentence_errors(counts: Sequence[tuple[int, int]]) -> tuple[float | None, ItemResults]:
    """Return the standard error of an accuracy of words over the choice of sentences, and its values on resamples.

    `counts` has for each sentence (words that are right, words). Whole sentences are resampled, because the words of a
    sentence are not independent. The error is None for a single sentence.
    """
    right_N, words_N = np.array(counts).T
    items = ItemResults(
        resamples=resampled(len(counts), lambda rows: float(right_N[rows].sum() / words_N[rows].sum()))
    )
    num_sentences = len(counts)
    if num_sentences < 2:
        return None, items
    # A ratio estimator for n sentences: sqrt(n / (n - 1) * sum of (right_i - accuracy * words_i)^2), divided by all
    # words (Cochran, Sampling Techniques, 1977, section 2.11).
    accuracy = sum(right for right, _ in counts) / sum(words for _, words in counts)
    squares = sum((right - accuracy * words) ** 2 for right, words in counts)
    return math.sqrt(num_sentences / (num_sentences - 1) * squares) / sum(words for _, words in counts), items


def metric_with_error(
    predicted: np.ndarray, true: np.ndarray, num_labels: int, metric: str
) -> tuple[float, ItemResults]:
    """Return the standard error of a metric over the choice of the test examples, and the results on single examples.

    For an accuracy p over N examples the error is sqrt(p (1 - p) / N). For any other metric it is the standard
    deviation over bootstrap resamples. `num_labels` is 0 for a regression.
    """
    if metric == "accuracy":
        accuracy = float(sk.accuracy_score(true, predicted))
        return float(np.sqrt(accuracy * (1.0 - accuracy) / len(true))), ItemResults.of_hits([predicted == true])

    def on_rows(rows: np.ndarray) -> float:
        if num_labels > 0:
            return classification_metrics(predicted[rows], true[rows], num_labels)[metric]
        return regression_metrics(predicted[rows], true[rows])[metric]

    values = resampled(len(true), on_rows)
    return float(np.std(values)), ItemResults(resamples=values)
