"""Fit the linear model of a probe to frozen features, with the penalty that suits held-out training rows best."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from electra_dist.finetune.task_metrics import classification_metrics, regression_metrics

PENALTIES = (1.0, 10.0, 100.0, 1e3, 1e4)  # L2 penalties that a probe tries, on standardized features


class LinearProbe(NamedTuple):
    """Outputs of a linear model for development data, and its score on the held-out part of the training data."""

    outputs: dict[str, np.ndarray]  # development file -> log-probabilities [M, labels], or predicted numbers [M, 1]
    held_out_score: float | None  # None if nothing could be measured, because there are too few examples


def linear_outputs(
    train_NF: np.ndarray,
    target_N: np.ndarray,
    dev: dict[str, np.ndarray],
    num_labels: int,
    num_distinct: int,
    metric: str,
) -> LinearProbe:
    """Fit a linear model to frozen features of the training data, and return its outputs for development data.

    The model is an L2-penalized logistic regression, or a ridge regression if `num_labels` is 0, on standardized
    features. Each penalty of `PENALTIES` is tried: the model is fitted to nine tenths of the training data and scored
    by `metric` on the last tenth. The final model is fitted to all training data with the best penalty, the smallest
    of equally good ones. Nothing depends on a seed.

    `num_distinct` is the number of distinct examples: N, or N / 2 if rows i and i + N / 2 are the two orders of one
    pair of texts. A label without training examples has the log-probability -inf.
    """
    is_held_out_N = _held_out_rows(len(train_NF), num_distinct)
    penalty, held_out_score = _best_penalty(train_NF, target_N, is_held_out_N, num_labels, metric)
    model = _fit_linear(train_NF, target_N, penalty, num_labels)
    if num_labels == 0:
        predicted = {name: model.predict(features)[:, None] for name, features in dev.items()}
        return LinearProbe(predicted, held_out_score)

    # scikit-learn's output has columns for the labels of the training data only; `classes_` holds their numbers.
    trained_labels = model.classes_.astype(int)
    outputs = {}
    for name, features in dev.items():
        logp_ML = np.full((len(features), num_labels), -np.inf)
        logp_ML[:, trained_labels] = model.predict_log_proba(features)
        outputs[name] = logp_ML
    return LinearProbe(outputs, held_out_score)


def _held_out_rows(num_rows: int, num_distinct: int) -> np.ndarray:
    """Return which training rows to hold out, bool [num_rows]: those of a fixed random tenth of the examples.

    There are `num_distinct` examples. If a pair of texts is used in both orders, an example has two rows, i and
    i + `num_distinct`, which are held out together. Of fewer than 10 examples none is held out.
    """
    # Every example has a distinct random rank; the examples with the lowest tenth of the ranks are held out.
    rank_of_example = np.random.default_rng(0).permutation(num_distinct)
    num_held_out = num_distinct // 10
    # If pairs are used in both orders, rows i and i + num_distinct are one pair. Both or none of them are held out, so
    # that a model is never scored on a pair that it was fitted to.
    example_N = np.arange(num_rows) % num_distinct
    is_held_out_N: np.ndarray = rank_of_example[example_N] < num_held_out
    return is_held_out_N


def _best_penalty(
    train_NF: np.ndarray, target_N: np.ndarray, is_held_out_N: np.ndarray, num_labels: int, metric: str
) -> tuple[float, float | None]:
    """Return which of `PENALTIES` gives the best score on the held-out rows, and this score.

    The model of each penalty is fitted to the other rows. If nothing is held out, or the other rows have one label
    only, the smallest penalty and None are returned.
    """
    held_out_features = train_NF[is_held_out_N]
    held_out_targets = target_N[is_held_out_N]
    fitted_features = train_NF[~is_held_out_N]
    fitted_targets = target_N[~is_held_out_N]
    smallest_penalty = PENALTIES[0]
    if len(held_out_features) == 0:
        return smallest_penalty, None
    is_classification = num_labels > 0
    if is_classification and len(np.unique(fitted_targets)) < 2:
        return smallest_penalty, None

    def held_out_score(penalty: float) -> float:
        model = _fit_linear(fitted_features, fitted_targets, penalty, num_labels)
        predictions = model.predict(held_out_features)
        if is_classification:
            return classification_metrics(predictions, held_out_targets, num_labels)[metric]
        return regression_metrics(predictions, held_out_targets)[metric]

    score_of = {penalty: held_out_score(penalty) for penalty in PENALTIES}
    best_penalty = max(PENALTIES, key=lambda penalty: score_of[penalty])  # the smallest of equally good ones
    return best_penalty, score_of[best_penalty]


def _fit_linear(features_NF: np.ndarray, target_N: np.ndarray, penalty: float, num_labels: int) -> Any:
    """Fit standardization and a linear model (ridge if `num_labels` is 0); return both as a scikit-learn pipeline.

    If all targets are one label, the result is a model that always predicts it.
    """
    from sklearn.dummy import DummyClassifier
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    # `penalty` is the factor of the squared weights in the loss: `alpha` of Ridge, 1 / C of LogisticRegression.
    if num_labels == 0:
        ridge = make_pipeline(StandardScaler(), Ridge(alpha=penalty))
        return ridge.fit(features_NF, target_N)
    if len(np.unique(target_N)) == 1:
        return DummyClassifier().fit(features_NF, target_N)
    logistic = make_pipeline(StandardScaler(), LogisticRegression(C=1.0 / penalty, max_iter=1000))
    return logistic.fit(features_NF, target_N)
