"""Measure how well a discriminator separates replaced from original tokens, with replacements of two kinds.

The first kind are the generator's samples. The second kind are tokens from elsewhere in held-out rows, so that only
context shows what is replaced: `replace_by_other_tokens` makes such rows.

Guarantee, measures: the AUC is the exact probability that a random replaced token scores higher than a random original
one, where a tie counts one half (the Mann-Whitney statistic). Scores are not put into bins, so it equals
scikit-learn's `roc_auc_score`. Labels [N] that are true or non-zero mean a positive, which is a replaced token.

Guarantee, rows for the context AUC: the tokens that are compared form two classes, replaced and original, and every
token occurs in both classes equally often. A score that depends on the token alone, such as its frequency, therefore
has a ROC-AUC of exactly 0.5 (ties count one half), whatever the corpus is. The result is a function of the arguments
only.

How: a place is a position of a row whose token may be masked. The places of all rows are put into a random order,
which is treated as a ring and cut into parts; each part has the share `mask_prob` of the places. A copy of the rows
masks one part: each place of the part shows the token of its partner, the place one part further on the ring. The
place has label 1. Its partner keeps its token and has label 0. Where both have the same token, nothing is replaced,
and neither is compared. If one part gives too few replaced tokens, further copies mask the next parts. No place is
masked twice.

Limits: all scores of an evaluation must be in memory at once (8 bytes a token). The score of the context AUC may also
rise because a word occurs twice in a document; this counts as context.

Shapes: N scores, R rows, S tokens of a row, Q rows of all copies, n places that may be masked, in a random order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from electra_kernels.keyed_random import Purpose, bits_grid
from electra_kernels.operation_types import SpecialIds
from electra_kernels.slots import is_candidate
from numpy.typing import ArrayLike

REPLACED = 1  # label of a place that shows the token of another place
ORIGINAL = 0  # label of a place whose token is shown at another place
NOT_COMPARED = -1


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


@dataclass(frozen=True, kw_only=True)
class ContextRows:
    """Copies of held-out rows in which some tokens are replaced, with a label for each token."""

    original_QS: np.ndarray  # int64 ids; examples and positions follow from these
    shown_QS: np.ndarray  # int64 ids with the replacements in place
    label_QS: np.ndarray  # int8: REPLACED, ORIGINAL or NOT_COMPARED
    source_row_Q: np.ndarray  # int64 number of the held-out row that each row is a copy of
    num_replaced: int  # replaced tokens, which are compared with as many tokens that are not replaced


def rows_needed(num_wanted: int, mask_prob: float, seq_len: int) -> int:
    """Return how many rows have about `num_wanted` tokens to replace, with 10 % more for pads and equal tokens."""
    return math.ceil(1.1 * num_wanted / (mask_prob * seq_len))


def replace_by_other_tokens(
    ids_RS: np.ndarray, special: SpecialIds, mask_prob: float, num_wanted: int, seed: int
) -> ContextRows:
    """Replace `num_wanted` tokens by tokens from elsewhere in the rows, in as many copies of the rows as necessary.

    Fewer are replaced if the rows have too few tokens that may be masked. Each copy masks the share `mask_prob` of
    these tokens, at most half of them.
    """
    ids = torch.from_numpy(ids_RS.astype(np.int64))
    places_n = _random_order(ids, special, seed)
    places_per_copy = min(max(1, round(mask_prob * len(places_n))), len(places_n) // 2)
    token_of_place_n = ids.numpy().reshape(-1)[places_n]
    partner_n = np.roll(places_n, -places_per_copy)  # the place whose token is shown instead
    partner_token_n = np.roll(token_of_place_n, -places_per_copy)
    is_replaced_n = token_of_place_n != partner_token_n
    num_copies = _copies_needed(is_replaced_n, places_per_copy, num_wanted)

    num_rows = len(ids)
    original_QS = np.tile(ids.numpy(), (num_copies, 1))
    shown_QS = original_QS.copy()
    label_QS = np.full(original_QS.shape, NOT_COMPARED, np.int8)
    for copy in range(num_copies):
        masked = np.arange(copy * places_per_copy, (copy + 1) * places_per_copy)
        masked = masked[is_replaced_n[masked]]
        rows_of_copy = slice(copy * num_rows, (copy + 1) * num_rows)
        shown_QS[rows_of_copy].reshape(-1)[places_n[masked]] = partner_token_n[masked]
        label_QS[rows_of_copy].reshape(-1)[places_n[masked]] = REPLACED
        label_QS[rows_of_copy].reshape(-1)[partner_n[masked]] = ORIGINAL
    return ContextRows(
        original_QS=original_QS,
        shown_QS=shown_QS,
        label_QS=label_QS,
        source_row_Q=np.tile(np.arange(num_rows), num_copies),
        num_replaced=int((label_QS == REPLACED).sum()),
    )


def _random_order(ids_RS: torch.Tensor, special: SpecialIds, seed: int) -> np.ndarray:
    """Return the tokens that may be masked, in random order, as indices into the flattened rows, int64 [n]."""
    num_rows, seq_len = ids_RS.shape
    bits_RS = bits_grid(seed, Purpose.MASK_POSITION, 0, torch.arange(num_rows), seq_len).numpy()
    places = np.flatnonzero(is_candidate(ids_RS, special).numpy())
    return places[np.argsort(bits_RS.reshape(-1)[places], kind="stable")]


def _copies_needed(is_replaced_n: np.ndarray, places_per_copy: int, num_wanted: int) -> int:
    """Return the least number of copies of the rows that have `num_wanted` replaced tokens, at most all possible.

    `is_replaced_n` says for each place, in the order of use, whether its new token differs from its own.
    """
    if places_per_copy == 0:
        return 1
    most_copies = len(is_replaced_n) // places_per_copy
    places_used = np.arange(1, most_copies + 1) * places_per_copy
    num_replaced = np.cumsum(is_replaced_n)[places_used - 1]
    has_enough = num_replaced >= num_wanted
    return int(has_enough.argmax()) + 1 if has_enough.any() else most_copies
