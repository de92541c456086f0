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

import numpy as np
import torch

from electra_dist.errors import UserError
from electra_dist.finetune.finetune_config import FinetuneConfig
from electra_dist.finetune.linear_probe import linear_outputs
from electra_dist.finetune.models import mean_state
from electra_dist.finetune.seed_folder import write_seed_folder
from electra_dist.finetune.stored_scores import Measured, best_layer, digest_of
from electra_dist.finetune.task import Task, TaskOutcome, TextFile
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
