"""Fine-tune an encoder with one seed, or probe it, and score the result; `run_seeds.py` runs several seeds.

Guarantee: a result depends on (encoder, data of the task, settings, seed) and, in its last bits, on the machine.
`identity` is a digest of the first three.

How: `finetune_task` trains a copy of the encoder with a new head, and writes the model if it is given a folder.
`probe_task` freezes the encoder: it computes [state of CLS ; mean of the states] of every example at every layer once,
and fits a linear model (logistic regression or ridge) to the features of each layer. The strength of the model's L2
penalty, and the layer, are those with the best metric on a fixed tenth of the training data, which is held out for
this choice. The development data decide nothing. The last layer of a discriminator is specialized for its objective,
so it is often not the best one. A probe has nothing random in it, so a task has one result, not one per seed.

Limits: SQuAD has no linear probe. A probe of MNLI keeps (L + 1) x 400,000 x 2H floats in memory, where L is the number
of the encoder's layers and H its hidden size.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from electra_dist.errors import UserError
from electra_dist.finetune.finetune_config import FinetuneConfig
from electra_dist.finetune.models import mean_state
from electra_dist.finetune.seed_folder import write_seed_folder
from electra_dist.finetune.stored_scores import Measured, best_layer, digest_of
from electra_dist.finetune.task import Task, TaskOutcome, TextFile
from electra_dist.finetune.task_metrics import classification_metrics, regression_metrics
from electra_dist.finetune.text_task import TextTask
from electra_dist.finetune.training_loop import Diverged, Ids, Progress, Trained, count_steps, fit, predict, quiet
from electra_dist.pretrained.encoder import Backbone, Pretrained

_PROBE_BATCH = 64  # examples per forward pass of a probe
_PROBE_SETTINGS = {"max_length", "both_orders"}  # the settings that a probe's result depends on
PROBE_SEED = 0  # recorded as the seed of a probe, in which nothing is random


def finetune_task(
    encoder: Pretrained,
    task: Task,
    settings: FinetuneConfig,
    seed: int,
    device: torch.device,
    progress: Progress = quiet,
    folder: Path | None = None,
) -> Measured:
    """Fine-tune a copy of `encoder` on `task`, and score the trained copy on the development data.

    `seed` determines the head's initial weights, the order of the training examples and the dropout. The trained model
    and its predictions replace an earlier model in `folder`; with None, nothing is written. If the loss or an output
    of the model becomes NaN or infinite, the function raises no error and writes no model: the result has the score
    None, and its `failures` say why.
    """
    start = time.monotonic()
    examples = task.examples(encoder, settings)
    # Creating the head's layers draws from torch's global generator, so the caller's state is restored afterwards.
    # The head's initial weights depend on `seed` only: `task.model` overwrites what the layers drew.
    with torch.random.fork_rng(devices=[]):
        model = task.model(encoder, settings, seed).to(device)

    trained: Trained | None = None
    of_test_sets: tuple[TextFile, ...] = ()
    try:

        def dev_score() -> float:
            return task.evaluate(model, encoder, settings, progress).metrics[task.metric]

        trained = fit(model, encoder.tower.num_layers, examples, settings, seed, progress, dev_score)
        outcome = task.evaluate(model.eval(), encoder, settings, progress)
        if folder is not None:
            of_test_sets = task.predict_test_sets(model, encoder, settings, progress)
    except Diverged as error:
        # A diverged model has no metrics: its result has a reason instead.
        trained = None
        outcome = TaskOutcome(metrics={}, failures=(f"diverged: {error}",))
    result = Measured(
        task=task.name,
        seed=seed,
        mode="finetune",
        identity=identity(encoder, task, settings, "finetune"),
        metric=task.metric,
        score=outcome.metrics.get(task.metric),  # None if the loss diverged
        metrics=outcome.metrics,
        failures=outcome.failures,
        train_loss=None if trained is None else trained.loss,
        steps=0 if trained is None else trained.steps,
        planned_steps=count_steps(len(examples.ids), settings),
        examples=len(examples.ids),
        seconds=time.monotonic() - start,
        standard_error=outcome.standard_error,
        items=outcome.items,
    )
    if folder is not None and outcome.metrics:
        files = outcome.predictions + of_test_sets + task.model_files(encoder, settings)
        write_seed_folder(folder, encoder, model, settings, result, files, task.data)
    return result


def probe_task(
    encoder: Pretrained, task: Task, settings: FinetuneConfig, device: torch.device, progress: Progress = quiet
) -> Measured:
    """Fit a linear model to the frozen states of each layer of `encoder`, and return the result at the best layer.

    The best layer is the one with the highest score on a held-out tenth of the training examples; with fewer than 10
    examples, the last layer is taken. The result's `layer_scores` are the scores at all layers; layer 0 is the
    embeddings. Of `settings`, only `max_length` and `both_orders` have an effect. `progress` is called with
    ("predict", rows done, rows in total), then with ("fit layers", layers done, layers in total).
    """
    if not isinstance(task, TextTask):
        raise UserError(
            f"--probe: {task.name} has no linear probe; leave out --probe, or remove {task.name} from --task"
        )
    start = time.monotonic()
    examples = task.examples(encoder, settings)
    backbone = encoder.backbone().to(device).eval()
    num_states = encoder.tower.num_layers + 1
    shape = (num_states, 2 * encoder.tower.hidden_size)
    train_LNF = _probe_features(backbone, shape, examples.ids, device, progress)
    dev_features = {}
    for prefix in task.dev:  # the prefix of a development file's metrics; MNLI has two files
        dev_ids = task.dev_ids(prefix, encoder, settings)
        dev_features[prefix] = _probe_features(backbone, shape, dev_ids, device, progress)

    outcomes = []
    held_out_scores = []
    outputs_of_layers = []
    for layer in range(num_states):
        linear_probe = linear_outputs(
            train_NF=train_LNF[layer],
            target_N=examples.target_NK[:, 0].numpy(),
            dev={prefix: feature_LNF[layer] for prefix, feature_LNF in dev_features.items()},
            num_labels=len(task.labels),
            num_distinct=len(task.train.a),
            metric=task.metric,
        )
        outcomes.append(task.score(linear_probe.outputs))
        held_out_scores.append(linear_probe.held_out_score)
        outputs_of_layers.append(linear_probe.outputs)
        progress("fit layers", layer + 1, num_states)
    layer = best_layer(held_out_scores)
    outcome = outcomes[layer]
    standard_error, items = task.standard_error(outputs_of_layers[layer])
    return Measured(
        task=task.name,
        seed=PROBE_SEED,
        mode="probe",
        identity=identity(encoder, task, settings, "probe"),
        metric=task.metric,
        score=outcome.metrics[task.metric],
        metrics=outcome.metrics,
        failures=outcome.failures,
        examples=len(examples.ids),
        seconds=time.monotonic() - start,
        layer=layer,
        layer_scores=[layer_outcome.metrics[task.metric] for layer_outcome in outcomes],
        held_out_scores=held_out_scores,
        standard_error=standard_error,
        items=items,
    )


def _probe_features(
    backbone: Backbone, shape: tuple[int, int], ids: Ids, device: torch.device, progress: Progress
) -> np.ndarray:
    """Return the features of N examples at each layer, fp32 [layers, N, features], as `pooled` makes them.

    `shape` is (layers, features); the input of the first layer counts as a layer.
    """

    def pooled_batch(ids_BS: torch.Tensor) -> torch.Tensor:
        is_token_BS = ids_BS != backbone.special.pad
        return torch.stack([pooled(state_BSH, is_token_BS) for state_BSH in backbone.layer_states(ids_BS)])

    num_states, num_features = shape
    feature_LNF = np.zeros((num_states, len(ids), num_features), np.float32)
    # `predict` yields batches in order of length; the row numbers put the features back in the order of `ids`.
    for rows, feature_LBF in predict(pooled_batch, ids, backbone.special.pad, _PROBE_BATCH, device, progress):
        feature_LNF[:, rows] = feature_LBF.float().cpu().numpy()
    return feature_LNF


def pooled(state_BSH: torch.Tensor, is_token_BS: torch.Tensor) -> torch.Tensor:
    """Return for each row its [CLS] state and the mean state of all tokens but padding, concatenated: fp32 [B, 2H]."""
    wide_state_BSH = state_BSH.float()
    cls_state_BH = wide_state_BSH[:, 0]
    return torch.cat([cls_state_BH, mean_state(wide_state_BSH, is_token_BS)], -1)


def identity(encoder: Pretrained, task: Task, settings: FinetuneConfig, mode: str) -> str:
    """Return the sha256, in hex, of all that a result depends on (encoder, task, data, settings) except its seed.

    Two results with the same seed and the same identity are interchangeable. `mode` is "finetune" or "probe"; a
    probe's result depends on fewer settings.
    """
    relevant_settings = _PROBE_SETTINGS if mode == "probe" else None  # None means all settings
    return digest_of(
        {
            "encoder": encoder.digest,
            "data": task.digest,
            "task": task.name,
            "mode": mode,
            "settings": settings.identity(relevant_settings),
        }
    )


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
