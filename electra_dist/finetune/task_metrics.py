"""Computes metrics of predictions, detects degenerate predictions, and fits the linear model of a probe.

Guarantee: all metrics are fractions, computed by scikit-learn and scipy. Classification has accuracy, Matthews
correlation and F1 (of label 1 if there are two labels, otherwise the unweighted mean over labels); regression has
Pearson and Spearman. A correlation that is undefined, because all predictions are equal, counts as 0, and `degenerate`
describes the case.
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
    raise UserError(f"{error}; install what fine-tuning needs: run `pip install electra-dist[finetune]`") from None

PENALTIES = (1.0, 10.0, 100.0, 1e3, 1e4)  # L2 penalties that a probe tries, on standardized features


def classification_metrics(predicted: np.ndarray, true: np.ndarray, num_labels: int) -> dict[str, float]:
    """Return `accuracy`, `mcc` (Matthews correlation) and `f1` of predicted label numbers, as fractions.

    Args:
        predicted: predicted label numbers, [N].
        true: correct label numbers, [N].
        num_labels: number of labels of the task. With 2, F1 is that of label 1; with more, the mean over all labels.
    """
    labels = list(range(num_labels))
    average = "binary" if num_labels == 2 else "macro"
    return {
        "accuracy": float(sk.accuracy_score(true, predicted)),
        "mcc": float(sk.matthews_corrcoef(true, predicted)),
        "f1": float(sk.f1_score(true, predicted, labels=labels, average=average, zero_division=0.0)),
    }


def regression_metrics(predicted: np.ndarray, true: np.ndarray) -> dict[str, float]:
    """Return the `pearson` and `spearman` correlations of two arrays [N]; both are 0 if either array is constant."""
    if np.ptp(predicted) == 0 or np.ptp(true) == 0:
        return {"pearson": 0.0, "spearman": 0.0}
    return {
        "pearson": float(stats.pearsonr(predicted, true).statistic),
        "spearman": float(stats.spearmanr(predicted, true).statistic),
    }


def degenerate(predicted: np.ndarray, labels: Sequence[str]) -> str:
    """Return a one-line description if all predictions are equal, otherwise an empty string.

    Args:
        predicted: label numbers or predicted values, [N]. Fewer than two predictions are never degenerate.
        labels: names of the labels; empty for a regression.
    """
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
    """Fit a linear model to frozen features and return its outputs, in the form of a head's outputs.

    The model is an L2-penalized logistic regression, or a ridge regression, on standardized features. Each penalty of
    `PENALTIES` is tried: the model is fitted to nine tenths of the training data and scored by `metric` on the last
    tenth. The best penalty is used, the smallest one if several are equally good. The final model is fitted to all
    training data. Nothing depends on a seed.

    Args:
        train_NF: training features.
        target_N: label numbers, or numbers for a regression.
        dev: name -> features [M, F] to predict for.
        num_labels: number of labels; 0 for a regression.
        num_distinct: number of distinct examples. Rows i and i + num_distinct are the two orders of one pair and stay
            on the same side of the split.
        metric: a key of `classification_metrics` or of `regression_metrics`, by which the penalty is chosen.

    Returns:
        Name -> log-probabilities [M, num_labels], -inf for a label without training examples; or predicted numbers
        [M, 1] for a regression.
    """
    is_held_N = _held_out_rows(len(train_NF), num_distinct)
    penalty = _best_penalty(train_NF, target_N, is_held_N, num_labels, metric)
    model = _fit_linear(train_NF, target_N, penalty, num_labels)
    if num_labels == 0:
        return {name: model.predict(features)[:, None] for name, features in dev.items()}
    # scikit-learn's output has columns for the labels of the training data only.
    outputs = {name: np.full((len(features), num_labels), -np.inf) for name, features in dev.items()}
    for name, features in dev.items():
        outputs[name][:, model.classes_.astype(int)] = model.predict_log_proba(features)
    return outputs


def _held_out_rows(num_rows: int, num_distinct: int) -> np.ndarray:
    """Return which rows are held out, bool [num_rows]: a fixed random tenth of the distinct examples.

    Rows i and i + num_distinct are the two orders of one pair, and both or none are held out.
    """
    example_N = np.arange(num_rows) % num_distinct
    is_held_N: np.ndarray = np.random.default_rng(0).permutation(num_distinct)[example_N] < num_distinct // 10
    return is_held_N


def _best_penalty(
    train_NF: np.ndarray, target_N: np.ndarray, is_held_N: np.ndarray, num_labels: int, metric: str
) -> float:
    """Return the penalty whose linear model has the best `metric` on the held-out rows.

    It is the smallest penalty if nothing can be measured, because no row is held out or the other rows have one label
    only.
    """
    held_NF = train_NF[is_held_N]
    held_target_N = target_N[is_held_N]
    fit_NF = train_NF[~is_held_N]
    fit_target_N = target_N[~is_held_N]
    if len(held_NF) == 0:
        return PENALTIES[0]
    if num_labels > 0 and len(np.unique(fit_target_N)) < 2:
        return PENALTIES[0]

    def held_out_score(penalty: float) -> float:
        """Fit with one penalty to the other rows; return the metric on the held-out rows."""
        predicted_N = _fit_linear(fit_NF, fit_target_N, penalty, num_labels).predict(held_NF)
        if num_labels == 0:
            return regression_metrics(predicted_N, held_target_N)[metric]
        return classification_metrics(predicted_N, held_target_N, num_labels)[metric]

    return max(PENALTIES, key=held_out_score)


def _fit_linear(features_NF: np.ndarray, target_N: np.ndarray, penalty: float, num_labels: int) -> Any:
    """Fit standardization and a linear model to features, and return both as a scikit-learn pipeline.

    The model is a logistic regression, or a ridge regression if `num_labels` is 0.
    """
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    linear = Ridge(alpha=penalty) if num_labels == 0 else LogisticRegression(C=1.0 / penalty, max_iter=1000)
    return make_pipeline(StandardScaler(), linear).fit(features_NF, target_N)
