"""Run all tasks and seeds of a fine-tuning command, and resume after an interrupt.

Guarantee: every finished result is appended to results.jsonl, and the file is synced, before the next seed starts. If
the file already has a result with the same task, seed and identity (a digest of weights, vocabulary, data and
settings), and the folder of its model exists where models are saved, that result is used and not computed again. A
seed that was interrupted starts again from its first step. Folders of other models are never replaced.

How: seeds run one after another in this process, or in several processes (`parallel_seeds.py`), with the same results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import torch

from electra_dist.corpus.unknown_tokens import remarks_on_unknown_tokens, unknown_tokens_of_rows
from electra_dist.errors import UserError
from electra_dist.finetune.finetune_and_probe import PROBE_SEED, finetune_task, identity, probe_task
from electra_dist.finetune.finetune_config import FinetuneConfig
from electra_dist.finetune.output.seed_folder import check_folder, copy_best, read_identity, seed_dir
from electra_dist.finetune.scores import Measured, ScoreStore
from electra_dist.finetune.task import Task
from electra_dist.finetune.training_loop import Progress, quiet
from electra_dist.pretrained.encoder import Pretrained
from electra_dist.store.atomic_files import make_folder, writable

RESULTS_FILE = "results.jsonl"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeedJob:
    """Order to fine-tune on a task with one seed. It has only the task's name, so it can be sent to a process."""

    task: str
    seed: int
    identity: str  # digest of the result's model, data and settings; the computing process compares it
    folder: Path | None  # where the model is written; None to write none


ComputeJobs = Callable[[Sequence[SeedJob]], Generator[tuple[SeedJob, Measured]]]  # yields results in any order


def run_all(
    encoder: Pretrained,
    work: Iterable[tuple[Task, FinetuneConfig]],
    seeds: Sequence[int],
    output: Path,
    device: torch.device,
    probe: bool = False,
    progress: Progress = quiet,
    note: Callable[[str], None] = print,
    save_to: Mapping[str, Path] | None = None,
    compute_jobs: ComputeJobs | None = None,
) -> list[Measured]:
    """Return the results of all tasks and seeds; compute only those that OUTPUT/results.jsonl does not contain yet.

    `work` has the tasks with their settings. With `probe`, linear models are fitted to frozen states, and each task
    has one result, with seed 0. `note` is called with one line of text for each result, each remark about a task's
    data and each folder of a best model. `save_to` maps a task's name to the folder for its models (seed-0, seed-1,
    ... and best); no model is written for other tasks or for probes. `compute_jobs`, such as `SeedProcesses`, computes
    the seeds; None computes them in this process, one after another.

    The results are ordered by task and then by seed. Raises UserError if a folder has models of another task, encoder
    or settings, if results.jsonl is damaged, or if a task has no linear probe.
    """
    mode = "probe" if probe else "finetune"
    task_seeds = [PROBE_SEED] if probe else seeds
    work_of = {task.name: (task, settings) for task, settings in work}
    model_dirs = {} if probe or save_to is None else save_to
    with writable(output / RESULTS_FILE):
        make_folder(output)
    store = ScoreStore(output / RESULTS_FILE)
    results: dict[tuple[str, int], Measured] = {}
    jobs = []
    for task, settings in work_of.values():
        for remark in task.notes:
            note(remark)
        task_identity = identity(encoder, task, settings, mode)
        model_dir = model_dirs.get(task.name)
        if model_dir is not None:
            obstacle = task.saving_obstacle(encoder, settings)
            if obstacle:
                raise UserError(obstacle)
            check_folder(model_dir, task_identity, task.name)
        is_new = False  # whether a seed of the task must be computed
        for seed in task_seeds:
            folder = None if model_dir is None else model_dir / seed_dir(seed)
            earlier_result = store.find(task_identity, seed)
            if earlier_result is not None and _has_its_model(earlier_result, folder):
                note(_result_line(earlier_result, "already there"))
                results[task.name, seed] = earlier_result
            else:
                jobs.append(SeedJob(task=task.name, seed=seed, identity=task_identity, folder=folder))
                is_new = True
        if is_new:
            for remark in _remarks_on_unknown_tokens(encoder, task, settings):
                note(remark)

    def compute_here(jobs: Sequence[SeedJob]) -> Generator[tuple[SeedJob, Measured]]:
        for job in jobs:
            task, settings = work_of[job.task]
            if probe:
                yield job, probe_task(encoder, task, settings, device, progress)
            else:
                yield job, finetune_task(encoder, task, settings, job.seed, device, progress, job.folder)

    with closing((compute_jobs or compute_here)(jobs)) as new_results:
        for job, result in new_results:
            # The result is on disk before the next seed starts, so an interrupt loses the seeds in progress only.
            store.add(result)
            note(_result_line(result, f"{result.seconds:.0f} s"))
            results[job.task, job.seed] = result
    ordered_results = [results[name, seed] for name in work_of for seed in task_seeds]
    for name, model_dir in model_dirs.items():
        _note_best(model_dir, [result for result in ordered_results if result.task == name], note)
    return ordered_results


def _remarks_on_unknown_tokens(encoder: Pretrained, task: Task, settings: FinetuneConfig) -> list[str]:
    """Return a remark if many tokens of the training examples are [UNK]; raise UserError above `max_unk_rate`."""
    ids = np.concatenate([np.asarray(row, np.int64) for row in task.examples(encoder, settings).ids])
    counts = {"the training examples": unknown_tokens_of_rows(ids, encoder.vocabulary.special)}
    return remarks_on_unknown_tokens(counts, settings.max_unk_rate, "max_unk_rate", task.name)


def _has_its_model(result: Measured, folder: Path | None) -> bool:
    """Return whether `folder` has a result's model; True if none is expected (folder None, or the loss diverged)."""
    if folder is None or result.score is None:
        return True
    return read_identity(folder) == result.identity


def _note_best(model_dir: Path, results: Sequence[Measured], note: Callable[[str], None]) -> None:
    """Copy the best seed's folder to MODEL_DIR/best, and report what the copy contains; `results` are of one task."""
    best = copy_best(model_dir, results)
    if best is None:
        note(f"{model_dir}: no model, because every seed diverged")
    elif (best / "config.json").exists():
        note(f"{best}: the model of the best seed, for transformers")
    else:
        note(f"{best}: predictions only; add --set span_head=linear to get a model for transformers")


def _result_line(result: Measured, origin: str) -> str:
    """Format a result as one line, such as "rte seed 0  accuracy 0.6643  (41 s)"; `origin` is the text in brackets."""
    seed_text = "" if result.mode == "probe" else f" seed {result.seed}"
    score_text = "-" if result.score is None else f"{result.score:.4f}"
    if result.layer is not None:
        score_text += f" at layer {result.layer} of {len(result.layer_scores) - 1}"
    failure_text = f"  FAILED: {'; '.join(result.failures)}" if result.failures else ""
    return f"{result.task}{seed_text}  {result.metric} {score_text}  ({origin}){failure_text}"
