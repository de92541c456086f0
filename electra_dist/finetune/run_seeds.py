"""Run the seeds of the tasks of a fine-tuning command, and resume after an interrupt.

Guarantee: every finished result is appended to results.jsonl, and the file is synced, before the next seed starts. If
the file already has a result with the same seed and identity (a digest of weights, vocabulary, task, data and
settings), and the folder of its model exists where models are saved, that result is used and not computed again. A
seed that was interrupted starts again from its first step. Folders of other models are never replaced.

Seeds run one after another in this process, or in several processes (`SeedProcesses`), with the same results and bytes
of models, because each is a function of (encoder, data, settings, seed) and a process computes with as many threads as
its parent. If this process ends, for whatever reason, its processes end, too.

How: processes are `concurrent.futures` with spawned (not forked) processes. Each process loads the model and the data
by itself. Before each seed it compares the identity of the result with the one that its parent computed, so that a
checkpoint that was written in the meantime is noticed. With N GPUs, process i computes on GPU i modulo N.

Cost: each process holds the model and the data in memory, and takes some seconds to start. On a CPU, N processes with
T threads each need N x T cores: set OMP_NUM_THREADS to the number of cores divided by N. A command without --parallel
gives the same bits with the same OMP_NUM_THREADS.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from functools import lru_cache
from multiprocessing.queues import Queue
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from electra_dist.corpus.build_report import remarks_on_unknown_tokens, unknown_tokens_of_rows
from electra_dist.errors import EXIT_CRASH, UserError
from electra_dist.finetune.finetune_and_probe import PROBE_SEED, finetune_task, identity, probe_task
from electra_dist.finetune.finetune_config import FinetuneConfig
from electra_dist.finetune.open_task import TaskRequest, open_task
from electra_dist.finetune.seed_folder import check_folder, copy_best, read_identity, seed_dir
from electra_dist.finetune.stored_scores import Measured, ScoreStore
from electra_dist.finetune.task import Task
from electra_dist.finetune.training_loop import Ids, Progress, count_steps, quiet
from electra_dist.pretrained.encoder import Pretrained, device_of_choice, load_pretrained
from electra_dist.pretrained.hf import TowerName
from electra_dist.pretrained.locate import Step
from electra_dist.store.atomic_files import lock_file, make_folder, writable

RESULTS_FILE = "results.jsonl"
_POLL_S = 1.0  # between two reports on progress
_MANY_EPOCHS = 10  # enough for a small table
_FEW_STEPS = 200  # of a fine-tuning; fewer often leave a model of a small table untrained


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeedJob:
    """Request to fine-tune on a task with one seed; a small object that can be sent to another process."""

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
    has one result, with seed 0. `note` is called with one line of text for the steps and each result of a task, each
    remark about its tokens, and each folder of a best model. `save_to` maps a task's name to the folder for its models
    (seed-0, seed-1, ... and best); no model is written for other tasks or for probes. `compute_jobs`, such as
    `SeedProcesses`, computes the seeds; None computes them in this process, one after another.

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
    jobs: list[SeedJob] = []
    for task, settings in work_of.values():
        task_identity = identity(encoder, task, settings, mode)
        model_dir = model_dirs.get(task.name)
        if model_dir is not None:
            check_folder(model_dir, task_identity, task.name, encoder.name, settings)
        missing = []
        for seed in task_seeds:
            folder = None if model_dir is None else model_dir / seed_dir(seed)
            earlier_result = store.find(task_identity, seed)
            if earlier_result is not None and _has_its_model(earlier_result, folder):
                note(_result_line(earlier_result, "already there"))
                results[task.name, seed] = earlier_result
            else:
                missing.append(SeedJob(task=task.name, seed=seed, identity=task_identity, folder=folder))
        jobs += missing
        if missing:
            ids = task.examples(encoder, settings).ids
            for remark in _remarks_on_unknown_tokens(encoder, task, settings, ids):
                note(remark)
            if not probe:
                note(_steps_line(encoder, task, settings, count_steps(len(ids), settings)))

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


@contextmanager
def only_command(output: Path) -> Iterator[None]:
    """Lock an output folder, which is made if needed, until the block ends; UserError if another process has it.

    Nothing is locked on a file system that has no locks for folders.
    """
    with writable(output / RESULTS_FILE):
        make_folder(output)
        descriptor = os.open(output, os.O_RDONLY)
    try:
        try:
            lock_file(descriptor, wait=False)
        except BlockingIOError:
            raise UserError(
                f"{output}: another fine-tuning writes to this folder; wait for its end, or pass another --output"
            ) from None
        yield
    finally:
        os.close(descriptor)


def _remarks_on_unknown_tokens(encoder: Pretrained, task: Task, settings: FinetuneConfig, rows: Ids) -> list[str]:
    """Return a remark if many tokens of the training examples, `rows` of ids, are [UNK].

    Raises UserError above `max_unk_rate`.
    """
    ids = np.concatenate([np.asarray(row, np.int64) for row in rows])
    counts = {"the training examples": unknown_tokens_of_rows(ids, encoder.vocabulary.special)}
    return remarks_on_unknown_tokens(counts, settings.max_unk_rate, "max_unk_rate", task.name)


def _steps_line(encoder: Pretrained, task: Task, settings: FinetuneConfig, num_steps: int) -> str:
    """Return a line on the number of steps of each seed of a task, with advice if they are few."""
    line = f"{task.name}: steps of {settings.batch} examples, for each seed: {num_steps:,}"
    if num_steps >= _FEW_STEPS:
        return line
    options = settings_to_learn_more(encoder, task, settings)
    return f"{line}, which is few: {' and '.join(options)} may help (docs/finetune.md)" if options else line


def settings_to_learn_more(encoder: Pretrained, task: Task, settings: FinetuneConfig) -> list[str]:
    """Return the options that help a small table or a short pretraining, without those that `settings` has already."""
    options = ["--set epochs=10"] if settings.epochs < _MANY_EPOCHS else []
    has_pooling = encoder.model.architecture == "modern" and "pooling" in task.optional_settings
    return [*options, "--set pooling=mean"] if has_pooling and settings.pooling != "mean" else options


def _has_its_model(result: Measured, folder: Path | None) -> bool:
    """Return whether `folder` holds the model of a result, or none is expected: no folder is given, or it diverged."""
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
        note(f"{best}: predictions only, because transformers has no class for --set head=paper")


def _result_line(result: Measured, origin: str) -> str:
    """Format a result as one line, such as "rte seed 0  accuracy 0.6643  (41 s)"; `origin` is the text in brackets."""
    seed_text = "" if result.mode == "probe" else f" seed {result.seed}"
    score_text = "-" if result.score is None else f"{result.score:.4f}"
    if result.layer is not None:
        score_text += f" at layer {result.layer} of {len(result.layer_scores) - 1}"
    failure_text = f"  FAILED: {'; '.join(result.failures)}" if result.failures else ""
    return f"{result.task}{seed_text}  {result.metric} {score_text}  ({origin}){failure_text}"


class ModelRequest(NamedTuple):
    """Arguments of `load_pretrained` that name a pretrained encoder; hashable, and can be sent to a process."""

    spec: str
    tower: TowerName
    vocab: Path | None
    step: Step = None


def compute_in_processes(
    num_processes: int,
    model: ModelRequest,
    tasks: Mapping[str, tuple[TaskRequest, FinetuneConfig]],
    progress: Progress,
    jobs: Sequence[SeedJob],
) -> Generator[tuple[SeedJob, Measured]]:
    """Compute jobs (one seed of one task each) in several processes; yield (job, result) as soon as a result is there.

    With its other arguments bound, it is the `compute_jobs` of `run_all`. `tasks` maps a task's name to its data and
    settings. Raises UserError if a process was killed, or if the model or the data have changed since this process
    read them. `progress` is called every second with ("seeds", results done, results in total).
    """
    if not jobs:
        return
    num_processes = min(num_processes, len(jobs))
    other_children = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")  # a forked process could not use a GPU
    numbers: Queue[int] = context.Queue()
    for number in range(num_processes):
        numbers.put(number)
    pool = ProcessPoolExecutor(
        num_processes, context, initializer=_prepare_process, initargs=(numbers, torch.get_num_threads())
    )
    progress("seeds", 0, len(jobs))
    try:
        job_of = {pool.submit(_compute, model, *tasks[job.task], job): job for job in jobs}
        remaining = set(job_of)
        num_done = 0
        while remaining:
            ended, remaining = wait(remaining, _POLL_S, FIRST_COMPLETED)
            progress("seeds", num_done, len(jobs))
            for future in ended:
                result = future.result()
                num_done += 1
                progress("seeds", num_done, len(jobs))
                yield job_of[future], result
    except BrokenProcessPool:
        raise UserError(
            "a process of --parallel was killed, perhaps for lack of memory; finished seeds are kept: run the "
            "command again with a smaller --parallel"
        ) from None
    except BaseException:
        # Without this, the end of this process would wait for the seeds that are being computed.
        for process in set(multiprocessing.active_children()) - other_children:
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def advice_on_threads(num_processes: int, num_threads: int, num_cores: int) -> str:
    """Return a line of advice if processes with `num_threads` threads each need more cores than there are; else ""."""
    if num_processes == 1 or num_processes * num_threads <= num_cores:
        return ""
    return (
        f"{num_processes} processes of {num_threads} threads on {num_cores} cores hinder each other; set "
        f"OMP_NUM_THREADS={max(1, num_cores // num_processes)} to make the command faster"
    )


def _prepare_process(numbers: Queue[int], num_threads: int) -> None:
    """Set the threads of a new process and its GPU (by a number from `numbers`), and make it end with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the process without a traceback
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(num_threads)
    if torch.cuda.is_available():
        torch.cuda.set_device(numbers.get() % torch.cuda.device_count())


def _end_with_parent() -> None:
    """Wait until the parent process has ended, then end this one at once."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(EXIT_CRASH)


def _compute(model: ModelRequest, task_request: TaskRequest, settings: FinetuneConfig, job: SeedJob) -> Measured:
    """Compute the result of one seed in this process; the model and the task stay in memory for the next seed."""
    encoder = _load(*model)
    task = _open(task_request)
    if identity(encoder, task, settings, "finetune") != job.identity:
        raise UserError(
            f"{model.spec} or {task_request.data} has changed since the command began, so its seeds would not be "
            f"comparable; run the command again"
        )
    return finetune_task(encoder, task, settings, job.seed, device_of_choice(), folder=job.folder)


_open = lru_cache(maxsize=1)(open_task)


_load = lru_cache(maxsize=1)(load_pretrained)
