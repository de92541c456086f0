"""Measure how well the discriminator separates replaced from original tokens: ROC-AUC, accuracy, precision, recall.

Guarantee: the AUC is the exact probability that a random replaced token scores higher than a random original one,
where a tie counts one half (the Mann-Whitney statistic). Scores are not put into bins, so it equals scikit-learn's
`roc_auc_score`. Labels [N] that are true or non-zero mean a positive, which is a replaced token.

Limits: all scores of an evaluation must be in memory at once (8 bytes a token).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike


@dataclass(frozen=True, kw_only=True)
class Separation:
    """Quality of the discriminator's scores: ROC-AUC; accuracy, precision and recall of the decision "score > 0"."""

    auc: float  # NaN if one of the two classes is empty
    accuracy: float
    precision: float  # 0 if no token is predicted positive, as in the reference code and in scikit-learn
    recall: float  # 0 if no token is positive


def roc_auc(scores: ArrayLike, labels: ArrayLike) -> float:
    """Return the exact area under the ROC curve of scores [N], whose labels [N] are non-zero for positives.

    It is NaN if there are no positives, no negatives, or a score that is NaN.
    """
    score = np.asarray(scores, dtype=np.float64)
    positive = np.asarray(labels).astype(bool)
    assert score.ndim == 1, score.shape
    assert score.shape == positive.shape, (score.shape, positive.shape)
    if np.isnan(score).any():
        return math.nan  # NaN has no rank
    num_positive = int(positive.sum())
    num_negative = positive.size - num_positive
    if num_positive == 0 or num_negative == 0:
        return math.nan

    # Group the tokens by score, lowest score first: tokens of one group are ties.
    _, group_of_token, group_size = np.unique(score, return_inverse=True, return_counts=True)
    positives_per_group = np.bincount(group_of_token, weights=positive, minlength=group_size.size)
    negatives_per_group = group_size - positives_per_group

    # A positive wins against each negative of a lower group, and half against each negative of its own group.
    negatives_below = np.cumsum(negatives_per_group) - negatives_per_group
    wins_per_positive = negatives_below + 0.5 * negatives_per_group
    num_wins = float((positives_per_group * wins_per_positive).sum())
    num_pairs = num_positive * num_negative
    return num_wins / num_pairs


def separation(logits: ArrayLike, labels: ArrayLike) -> Separation:
    """Measure how well a discriminator's logits [N] agree with labels [N], which are non-zero for replaced tokens.

    Raises ValueError if N is 0.
    """
    positive = np.asarray(labels).astype(bool)
    predicted = np.asarray(logits, dtype=np.float64) > 0
    if positive.size == 0:
        raise ValueError("no labelled token to evaluate; give at least one held-out row with real tokens")
    num_true_positive = int((predicted & positive).sum())
    num_predicted = int(predicted.sum())
    num_positive = int(positive.sum())
    return Separation(
        auc=roc_auc(logits, labels),
        accuracy=float((predicted == positive).mean()),
        precision=num_true_positive / max(1, num_predicted),
        recall=num_true_positive / max(1, num_positive),
    )


def auc_with_standard_error(scores: np.ndarray, labels: np.ndarray, clusters: np.ndarray) -> tuple[float, float]:
    """Return (ROC-AUC, its standard error) of scores [N] with labels [N], which are non-zero for positives.

    `clusters`, int64 [N], numbers the cluster of each score, such as the row of a token. Scores of one cluster may
    depend on each other; clusters count as independent. Both results are NaN without positives or without negatives,
    the error also with fewer than two clusters.

    The error is that of Obuchowski (Biometrics 1997). To first order, the AUC is its expected value plus one term for
    each score: for a positive, (share of the negatives below it - AUC) / number of positives; for a negative, (share
    of the positives above it - AUC) / number of negatives. The variance is that of the sum of terms in a cluster.
    """
    score = np.asarray(scores, np.float64)
    positive = np.asarray(labels).astype(bool)
    auc = roc_auc(score, positive)
    clusters_present, cluster_index = np.unique(clusters, return_inverse=True)
    if math.isnan(auc) or len(clusters_present) < 2:
        return auc, math.nan
    positive_part = (_share_below(score[positive], score[~positive]) - auc) / positive.sum()
    negative_part = (1 - _share_below(score[~positive], score[positive]) - auc) / (~positive).sum()
    part = np.empty(len(score))
    part[positive] = positive_part
    part[~positive] = negative_part
    sum_per_cluster = np.bincount(cluster_index, weights=part)
    num_clusters = len(clusters_present)
    variance = num_clusters / (num_clusters - 1) * (sum_per_cluster**2).sum()
    return auc, math.sqrt(variance)


def _share_below(values: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return for each of `values` which share of `others` is lower; an equal one counts half."""
    ordered = np.sort(others)
    num_below = np.searchsorted(ordered, values, side="left")
    num_at_most = np.searchsorted(ordered, values, side="right")
    return (num_below + num_at_most) / (2 * len(others))
