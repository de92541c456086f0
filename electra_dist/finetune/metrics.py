"""Scores of predictions, by scikit-learn and scipy; a probe's linear model; the word for a run that learnt nothing.

Guarantee: accuracy, Matthews correlation and F1 (of label 1 where there are two labels, the mean over labels where
there are more), Pearson and Spearman, as fractions. Where a correlation is undefined because all predictions are equal
it counts as 0, and `degenerate` names the fact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from electra_dist.errors import UserError

try:
    from scipy import stats
    from sklearn import metrics as sk
except ImportError as error:
    raise UserError(f"{error}; fine-tuning needs `pip install electra-dist[finetune]`") from None

PENALTIES = (1.0, 10.0, 100.0, 1e3, 1e4)  # of a probe: L2, on standardised features


def classification_metrics(predicted: np.ndarray, true: np.ndarray, num_labels: int) -> dict[str, float]:
    """`accuracy`, `mcc` and `f1` of label numbers [N]."""
    labels = list(range(num_labels))
    average = "binary" if num_labels == 2 else "macro"
    return {
        "accuracy": float(sk.accuracy_score(true, predicted)),
        "mcc": float(sk.matthews_corrcoef(true, predicted)),
        "f1": float(sk.f1_score(true, predicted, labels=labels, average=average, zero_division=0.0)),
    }


def regression_metrics(predicted: np.ndarray, true: np.ndarray) -> dict[str, float]:
    """`pearson` and `spearman` of numbers [N]."""
    if np.ptp(predicted) == 0 or np.ptp(true) == 0:
        return {"pearson": 0.0, "spearman": 0.0}
    return {
        "pearson": float(stats.pearsonr(predicted, true).statistic),
        "spearman": float(stats.spearmanr(predicted, true).statistic),
    }


def degenerate(predicted: np.ndarray, labels: Sequence[str]) -> str:
    """One line if all predictions are equal, else nothing; `labels` is empty for numbers."""
    if len(predicted) < 2 or np.ptp(predicted) > 0:
        return ""
    value = f"`{labels[int(predicted[0])]}`" if labels else f"{float(predicted[0]):.4g}"
    return f"degenerate: all {len(predicted)} predictions are {value}"


def linear_outputs(
    train_NF: np.ndarray,
    target_N: np.ndarray,
    dev: dict[str, np.ndarray],
    num_labels: int,
    num_distinct: int,
    metric: str,
) -> dict[str, np.ndarray]:
    """Outputs [M, L] of a linear model for each set of features [M, F] in `dev`, as a head would give them.

    The penalty is the one of `PENALTIES` whose fit to nine tenths of the training data has the best `metric` on the
    last tenth; the smallest of equals.

    Args:
        train_NF: features.
        target_N: label numbers, or numbers for a ridge regression.
        dev: features to predict for.
        num_labels: 0 for a regression.
        num_distinct: rows i and i + num_distinct are the two orders of one pair, never to be told apart.
        metric: a key of `classification_metrics` or `regression_metrics`.
    """
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    def fitted(penalty: float, rows: np.ndarray) -> Any:
        linear = LogisticRegression(C=1.0 / penalty, max_iter=1000) if num_labels else Ridge(alpha=penalty)
        return make_pipeline(StandardScaler(), linear).fit(train_NF[rows], target_N[rows])

    def score(predicted: np.ndarray) -> float:
        if not num_labels:
            return regression_metrics(predicted, target_N[held])[metric]
        return classification_metrics(predicted, target_N[held], num_labels)[metric]

    everything = np.arange(len(train_NF))
    is_held = np.random.default_rng(0).permutation(num_distinct)[everything % num_distinct] < num_distinct // 10
    held, rest = everything[is_held], everything[~is_held]
    best = PENALTIES[0]
    if len(held) and (not num_labels or len(np.unique(target_N[rest])) > 1):
        best = max(PENALTIES, key=lambda penalty: score(fitted(penalty, rest).predict(train_NF[held])))
    model = fitted(best, everything)
    if not num_labels:
        return {name: model.predict(features)[:, None] for name, features in dev.items()}
    # A label that the training data lack has no column in scikit-learn's answer.
    outputs = {name: np.full((len(features), num_labels), -np.inf) for name, features in dev.items()}
    for name, features in dev.items():
        outputs[name][:, model.classes_.astype(int)] = model.predict_log_proba(features)
    return outputs
