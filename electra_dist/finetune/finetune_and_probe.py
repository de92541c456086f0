"""Fine-tunes and probes an encoder: one result per task and seed, appended to a file so that a run can resume.

Guarantee: a result depends on (encoder, data of the task, settings, seed) and, in its last bits, on the machine.
`run_all` appends every finished result to results.jsonl and syncs the file before the next seed starts. A result that
is already there under the same identity (weights, vocabulary, data, settings) is not computed again. A seed that was
interrupted starts again from its beginning.

How: `finetune_task` trains a copy of the encoder with a new head. `probe_task` freezes the encoder: it computes
[state of CLS ; mean of the states] of every example once, and fits a linear model (logistic regression or ridge) to
these features. The penalty is chosen by the task's metric on a fixed tenth of the training data. A probe has nothing
random in it, so it has one result and no seeds.

Limits: SQuAD has no linear probe. A probe of MNLI keeps 400,000 x 2H floats in memory.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from electra_dist.config import canonical_json
from electra_dist.errors import UserError
from electra_dist.finetune.finetune_config import FinetuneConfig
from electra_dist.finetune.seed_results import Result
from electra_dist.finetune.task_metrics import linear_outputs
from electra_dist.finetune.tasks import Task, TaskOutcome, TextTask
from electra_dist.finetune.training_loop import Diverged, Progress, count_steps, fit, predict, quiet
from electra_dist.pretrained.load_encoder import Backbone, Pretrained
from electra_dist.run.jsonl import JsonlFile, read_records

RESULTS_FILE = "results.jsonl"
_PROBE_BATCH = 64  # examples per forward of a probe
_PROBE_SETTINGS = {"max_length", "both_orders"}  # the settings that a probe's result depends on


def finetune_task(
    encoder: Pretrained,
    task: Task,
    settings: FinetuneConfig,
    seed: int,
    device: torch.device,
    progress: Progress = quiet,
) -> Result:
    """Fine-tune a copy of `encoder` on `task` and score it on the development data.

    Args:
        encoder: the pretrained weights; they are not changed.
        task: the data, the kind of head and the metrics.
        settings: settings of the training.
        seed: seed of the head's weights, the order of the rows and the dropout.
        device: where the model is trained.
        progress: called during training and prediction.

    Returns:
        The result. If the loss diverged, its score is None and `failure` describes the reason; no error is raised.
    """
    start = time.monotonic()
    examples = task.examples(encoder, settings)
    # New layers draw from torch's global generator before `init_head` sets their weights; the caller's is restored.
    with torch.random.fork_rng(devices=[]):
        model = task.model(encoder, settings, seed).to(device)
    loss: float | None = None
    try:
        loss = fit(model, encoder.tower.num_layers, examples, settings, seed, progress)
    except Diverged as error:
        outcome = TaskOutcome({}, f"diverged: {error}")
    else:
        outcome = task.evaluate(model.eval(), encoder, settings, progress)
    return Result(
        task=task.name,
        seed=seed,
        mode="finetune",
        identity=identity(encoder, task, settings, "finetune"),
        metric=task.metric,
        score=outcome.metrics.get(task.metric),  # no metrics if the loss diverged
        metrics=outcome.metrics,
        failure=outcome.failure,
        train_loss=loss,
        steps=count_steps(len(examples.ids), settings),
        examples=len(examples.ids),
        seconds=time.monotonic() - start,
    )


def probe_task(
    encoder: Pretrained, task: Task, settings: FinetuneConfig, device: torch.device, progress: Progress = quiet
) -> Result:
    """Score a linear model on the frozen states of `encoder`.

    Args:
        encoder: the pretrained weights.
        task: a task on texts; SQuAD has no linear probe.
        settings: `max_length` and `both_orders` are used, the rest is not.
        device: where the encoder runs; the linear model is fitted on the host.
        progress: called while the encoder computes the features.

    Raises:
        UserError: `task` has no linear probe.
    """
    if not isinstance(task, TextTask):
        raise UserError(f"--probe: {task.name} has no linear probe; leave out --probe, or remove it from --task")
    start = time.monotonic()
    examples = task.examples(encoder, settings)
    backbone = encoder.backbone().to(device).eval()

    def features(ids: Sequence[Sequence[int]]) -> np.ndarray:
        feature_NF = np.zeros((len(ids), 2 * encoder.tower.hidden_size), np.float32)
        for rows, feature_BF in predict(
            partial(pooled, backbone), ids, encoder.special.pad, _PROBE_BATCH, device, progress
        ):
            feature_NF[rows] = feature_BF.float().cpu().numpy()
        return feature_NF

    dev_features = {prefix: features(task.dev_ids(prefix, encoder, settings)) for prefix in task.dev}
    outputs = linear_outputs(
        train_NF=features(examples.ids),
        target_N=examples.target_NK[:, 0].numpy(),
        dev=dev_features,
        num_labels=len(task.labels),
        num_distinct=len(task.train.a),
        metric=task.metric,
    )
    outcome = task.score(outputs)
    return Result(
        task=task.name,
        seed=0,
        mode="probe",
        identity=identity(encoder, task, settings, "probe"),
        metric=task.metric,
        score=outcome.metrics[task.metric],
        metrics=outcome.metrics,
        failure=outcome.failure,
        train_loss=None,
        steps=0,
        examples=len(examples.ids),
        seconds=time.monotonic() - start,
    )


def pooled(backbone: Backbone, ids_BS: torch.Tensor) -> torch.Tensor:
    """Return the features of a probe, fp32 [B, 2H]: the state of [CLS], and the mean of the states of all tokens.

    Args:
        backbone: the encoder, in evaluation mode.
        ids_BS: token ids, int64; padding is left out of the mean.
    """
    state_BSH = backbone(ids_BS).float()
    real_BS1 = (ids_BS != backbone.special.pad).unsqueeze(-1)
    return torch.cat([state_BSH[:, 0], (state_BSH * real_BS1).sum(1) / real_BS1.sum(1)], -1)


def identity(encoder: Pretrained, task: Task, settings: FinetuneConfig, mode: str) -> str:
    """Return a sha256 of everything that a result depends on except its seed, as hexadecimal digits.

    Args:
        encoder: its weights and vocabulary count.
        task: its name and the digest of its data count.
        settings: all settings count for "finetune"; for "probe" only those that shape its examples.
        mode: "finetune" or "probe".
    """
    tree: dict[str, Any] = {"encoder": encoder.digest, "data": task.digest, "task": task.name, "mode": mode}
    relevant = _PROBE_SETTINGS if mode == "probe" else None  # None: all
    tree["settings"] = settings.model_dump(mode="json", include=relevant)
    return hashlib.sha256(canonical_json(tree).encode()).hexdigest()


def run_all(
    encoder: Pretrained,
    work: Iterable[tuple[Task, FinetuneConfig]],
    seeds: Sequence[int],
    output: Path,
    device: torch.device,
    probe: bool = False,
    progress: Progress = quiet,
    note: Callable[[str], None] = print,
) -> list[Result]:
    """Compute the results of all tasks and seeds, except those that OUTPUT/results.jsonl already contains.

    Interrupted at any point, the same call resumes: finished seeds are read from the file, the others are computed.

    Args:
        encoder: the pretrained weights to fine-tune or to probe.
        work: tasks, each with its settings.
        seeds: seeds of fine-tuning; a probe has one result per task, with seed 0.
        output: folder of results.jsonl; created if missing.
        device: where the models run.
        probe: fit a linear model to frozen states instead of fine-tuning.
        progress: called during training and prediction.
        note: called with one line of text for each result, and for each remark about a task's data, such as the number
            of lines that were left out.

    Returns:
        All results, new ones and earlier ones, by task and then by seed.

    Raises:
        UserError: the output folder cannot be written, results.jsonl is damaged, or a task has no linear probe.
    """
    mode = "probe" if probe else "finetune"
    task_seeds = [0] if probe else seeds
    earlier_results = map(Result.from_record, read_records(output / RESULTS_FILE))
    finished = {(result.task, result.seed, result.identity): result for result in earlier_results}
    results = []
    file = JsonlFile(output / RESULTS_FILE)
    try:
        for task, settings in work:
            for remark in task.notes:
                note(remark)
            task_identity = identity(encoder, task, settings, mode)
            for seed in task_seeds:
                result = finished.get((task.name, seed, task_identity))
                if result is not None:
                    note(_result_line(result, "already there"))
                else:
                    if probe:
                        result = probe_task(encoder, task, settings, device, progress)
                    else:
                        result = finetune_task(encoder, task, settings, seed, device, progress)
                    file.append(dataclasses.asdict(result))
                    file.sync()
                    note(_result_line(result, f"{result.seconds:.0f} s"))
                results.append(result)
    finally:
        file.close()
    return results


def _result_line(result: Result, origin: str) -> str:
    """Format a result as one line for the terminal; `origin` is the time that it took, or "already there"."""
    seed = "" if result.mode == "probe" else f" seed {result.seed}"
    score = "-" if result.score is None else f"{result.score:.4f}"
    failure = f"  FAILED: {result.failure}" if result.failure else ""
    return f"{result.task}{seed}  {result.metric} {score}  ({origin}){failure}"
