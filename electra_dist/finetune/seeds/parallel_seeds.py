"""Compute several seeds of fine-tuning at the same time, each in a process of its own.

Guarantee: the results, and the bytes of the models that are written, are those of seeds that run one after another,
because each is a function of (encoder, data, settings, seed) and a process computes with as many threads as its
parent. If this process ends, for whatever reason, its processes end, too.

How: `concurrent.futures` with spawned (not forked) processes. Each process loads the model and the data by itself.
Before each seed it compares the identity of the result with the one that its parent computed, so that a checkpoint
that was written in the meantime is noticed. With N GPUs, process i computes on GPU i modulo N.

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
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache
from multiprocessing.queues import Queue
from pathlib import Path

import torch

from electra_dist.errors import EXIT_CRASH, UserError
from electra_dist.finetune.finetune_and_probe import finetune_task, identity
from electra_dist.finetune.finetune_config import FinetuneConfig
from electra_dist.finetune.scores import Measured
from electra_dist.finetune.seeds.open_task import TaskRequest, open_task
from electra_dist.finetune.seeds.run_seeds import SeedJob
from electra_dist.finetune.training_loop import Progress, quiet
from electra_dist.pretrained.encoder import Pretrained, TowerName, device_of_choice, load_pretrained


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """Arguments of `load_pretrained` that name a pretrained encoder; hashable, and can be sent to a process."""

    spec: str
    tower: TowerName
    vocab: Path | None


class SeedProcesses:
    """Processes that fine-tune with several seeds at once; pass them to `run_seeds.run_all` as `compute_jobs`."""

    def __init__(
        self,
        num_processes: int,
        model: ModelRequest,
        tasks: Mapping[str, tuple[TaskRequest, FinetuneConfig]],
        progress: Progress = quiet,
    ) -> None:
        """Store what the processes will need, but start none. `tasks` maps a task's name to its data and settings."""
        self._num_processes = num_processes
        self._model = model
        self._tasks = tasks
        self._progress = progress

    def __call__(self, jobs: Sequence[SeedJob]) -> Generator[tuple[SeedJob, Measured]]:
        """Compute jobs (one seed of one task each) in the processes; yield each with its result as soon as it is done.

        Raises UserError if a process was killed, or if the model or the data have changed since this process read
        them. `progress` is called after each result with ("seeds", results done, results in total).
        """
        if not jobs:
            return
        num_processes = min(self._num_processes, len(jobs))
        other_children = set(multiprocessing.active_children())
        context = multiprocessing.get_context("spawn")  # a forked process could not use a GPU
        numbers: Queue[int] = context.Queue()
        for number in range(num_processes):
            numbers.put(number)
        pool = ProcessPoolExecutor(
            num_processes, context, initializer=_prepare_process, initargs=(numbers, torch.get_num_threads())
        )
        self._progress("seeds", 0, len(jobs))
        try:
            job_of = {pool.submit(_compute, self._model, *self._tasks[job.task], job): job for job in jobs}
            for num_done, future in enumerate(as_completed(job_of), start=1):
                result = future.result()
                self._progress("seeds", num_done, len(jobs))
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
    encoder = _load(model)
    task = _open(task_request)
    if identity(encoder, task, settings, "finetune") != job.identity:
        raise UserError(
            f"{model.spec} or {task_request.data} has changed since the command began, so its seeds would not be "
            f"comparable; run the command again"
        )
    return finetune_task(encoder, task, settings, job.seed, device_of_choice(), folder=job.folder)


_open = lru_cache(maxsize=1)(open_task)


@lru_cache(maxsize=1)
def _load(request: ModelRequest) -> Pretrained:
    return load_pretrained(request.spec, request.tower, request.vocab)
