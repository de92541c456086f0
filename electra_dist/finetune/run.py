"""`finetune_task` and `probe_task`: one result each; `run_all`: tasks times seeds, going on where it was.

Guarantee: a result depends on (encoder, task's data, settings, seed) and, for last bits, on the machine. `run_all`
appends every finished result to results.jsonl and syncs it before the next seed starts; one that is already there
under the same identity (weights, vocabulary, data, settings) is not computed again. A seed that was interrupted starts
again from its beginning.

A probe freezes the encoder: [state of CLS ; mean of the states] of every example is computed once, standardised, and a
linear model on top is fitted to its optimum: logistic regression or ridge, its penalty chosen by the task's metric on
a tenth of the training data, always the same one. Nothing in it is random, so there is one result and no seeds.

Where it stops: SQuAD has no linear probe. `--probe` of MNLI keeps 400,000 x 2H floats in memory.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from electra_dist.config import canonical_json
from electra_dist.errors import UserError
from electra_dist.finetune.config import FinetuneConfig
from electra_dist.finetune.fit import Diverged, Progress, count_steps, fit, predict, quiet
from electra_dist.finetune.metrics import linear_outputs
from electra_dist.finetune.result import Result
from electra_dist.finetune.tasks import Task, TaskOutcome, TextTask
from electra_dist.pretrained.encoder import Backbone, Pretrained
from electra_dist.run.jsonl import JsonlFile, read_records

RESULTS_FILE = "results.jsonl"


def finetune_task(
    encoder: Pretrained,
    task: Task,
    settings: FinetuneConfig,
    seed: int,
    device: torch.device,
    progress: Progress = quiet,
) -> Result:
    """Fine-tune a copy of `encoder` on `task` and score it."""
    start = time.monotonic()
    examples = task.examples(encoder, settings)
    with torch.random.fork_rng(devices=[]):  # a new layer draws from torch's generator before `init_head` fills it
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
        score=outcome.metrics.get(task.metric),
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
    """Score a linear model on `encoder`'s frozen states."""
    if not isinstance(task, TextTask):
        raise UserError(f"--probe: {task.name} has no linear probe; leave it out, or fine-tune")
    start = time.monotonic()
    examples = task.examples(encoder, settings)
    backbone = encoder.backbone().to(device).eval()

    def features(ids: Sequence[Sequence[int]]) -> np.ndarray:
        feature_NF = np.zeros((len(ids), 2 * encoder.tower.hidden_size), np.float32)
        for rows, output in predict(
            lambda ids_BS: pooled(backbone, ids_BS), ids, encoder.special.pad, 64, device, progress
        ):
            feature_NF[rows] = output.float().cpu().numpy()
        return feature_NF

    dev_features = {prefix: features(task.dev_ids(prefix, encoder, settings)) for prefix in task.dev}
    target_N = examples.target_NK[:, 0].numpy()
    num_labels, num_distinct = len(task.labels), len(task.train.a)
    outputs = linear_outputs(features(examples.ids), target_N, dev_features, num_labels, num_distinct, task.metric)
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
    """[B, 2H]: the state of [CLS] and the mean of the states of all tokens."""
    state_BSH = backbone(ids_BS).float()
    real_BS1 = (ids_BS != backbone.special.pad).unsqueeze(-1)
    return torch.cat([state_BSH[:, 0], (state_BSH * real_BS1).sum(1) / real_BS1.sum(1)], -1)


def identity(encoder: Pretrained, task: Task, settings: FinetuneConfig, mode: str) -> str:
    """Digest of everything that a result depends on but its seed."""
    tree: dict[str, Any] = {"encoder": encoder.digest, "data": task.digest, "task": task.name, "mode": mode}
    # A probe has no training: of the settings only those count that make its examples.
    tree["settings"] = settings.model_dump(
        mode="json", include={"max_length", "both_orders"} if mode == "probe" else None
    )
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
    """Every task with every seed; finished ones are read from OUTPUT/results.jsonl.

    Args:
        encoder: what is measured.
        work: tasks, each with its settings.
        seeds: of fine-tuning; a probe has none.
        output: folder, made if missing.
        device: where to compute.
        probe: freeze the encoder.
        progress: called while something is computed.
        note: called with a line for each result, and for failures.
    """
    finished = {(r.task, r.seed, r.identity): r for r in map(Result.from_record, read_records(output / RESULTS_FILE))}
    mode = "probe" if probe else "finetune"
    results = []
    file = JsonlFile(output / RESULTS_FILE)
    try:
        for task, settings in work:
            for text in task.notes:
                note(text)
            wanted = identity(encoder, task, settings, mode)
            for seed in [0] if probe else seeds:
                result = finished.get((task.name, seed, wanted))
                how = "already there"
                if result is None:
                    if probe:
                        result = probe_task(encoder, task, settings, device, progress)
                    else:
                        result = finetune_task(encoder, task, settings, seed, device, progress)
                    file.append(dataclasses.asdict(result))
                    file.sync()
                    how = f"{result.seconds:.0f} s"
                results.append(result)
                note(_line(result, how))
    finally:
        file.close()
    return results


def _line(result: Result, how: str) -> str:
    score = "-" if result.score is None else f"{result.score:.4f}"
    failure = f"  FAILED: {result.failure}" if result.failure else ""
    seed = "" if result.mode == "probe" else f" seed {result.seed}"
    return f"{result.task}{seed}  {result.metric} {score}  ({how}){failure}"
