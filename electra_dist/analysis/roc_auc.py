"""How well scores separate replaced from original tokens: exact ROC-AUC, precision, recall, accuracy.

Guarantee: the AUC is the exact probability that a random replaced token scores above a random original one, ties
counting one half (the Mann-Whitney statistic; no thresholds, no bins), so it equals scikit-learn's `roc_auc_score`.

Cost: one sort; 1 M tokens take about 0.1 s.

Where it stops: all scores of an evaluation must be in memory at once (8 bytes a token).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike


@dataclass(frozen=True, kw_only=True)
class Separation:
    """How a threshold and the ranking by score do on labelled tokens."""

    auc: float  # NaN when one of the two classes is empty
    accuracy: float
    precision: float  # 0 when nothing is called positive, as in the reference and in scikit-learn
    recall: float  # 0 when nothing is positive


def roc_auc(scores: ArrayLike, labels: ArrayLike) -> float:
    """Exact area under the ROC curve.

    Args:
        scores: any real numbers, larger means more likely positive; one-dimensional.
        labels: same length; true or non-zero means positive.

    Returns:
        NaN when one of the classes is empty.
    """
    score = np.asarray(scores, dtype=np.float64)
    positive = np.asarray(labels).astype(bool)
    assert score.ndim == 1, score.shape
    assert score.shape == positive.shape, (score.shape, positive.shape)
    if np.isnan(score).any():
        return math.nan  # a ranking with NaN in it means nothing
    num_positive = int(positive.sum())
    num_negative = positive.size - num_positive
    if num_positive == 0 or num_negative == 0:
        return math.nan
    _, group, group_size = np.unique(score, return_inverse=True, return_counts=True)
    positives_per_group = np.bincount(group, weights=positive, minlength=group_size.size)
    negatives_per_group = group_size - positives_per_group
    negatives_below = np.cumsum(negatives_per_group) - negatives_per_group
    wins = float((positives_per_group * (negatives_below + 0.5 * negatives_per_group)).sum())
    return wins / (num_positive * num_negative)


def separation(logits: ArrayLike, labels: ArrayLike) -> Separation:
    """AUC of the logits, and accuracy, precision and recall of "positive where logit > 0".

    Raises:
        ValueError: there is no token at all.
    """
    positive = np.asarray(labels).astype(bool)
    called = np.asarray(logits, dtype=np.float64) > 0
    if positive.size == 0:
        raise ValueError("no labelled token to evaluate")
    hits = int((called & positive).sum())
    return Separation(
        auc=roc_auc(logits, labels),
        accuracy=float((called == positive).mean()),
        precision=hits / max(1, int(called.sum())),
        recall=hits / max(1, int(positive.sum())),
    )
