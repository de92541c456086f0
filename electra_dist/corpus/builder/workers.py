"""Run the tasks of a corpus build in worker processes, and yield the results as they come.

Guarantee: at most two tasks per worker are submitted ahead; the workers end with the main process, even if that is
killed with SIGKILL. The order of the results is not fixed; the stages of a build do not depend on it.

How: a `ProcessPoolExecutor` of spawned processes, which inherit no locks or threads. With one worker the calling
process does the work itself. Each worker tokenizes in one thread.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Generic, TypeVar

from electra_dist.errors import UserError

_TASKS_PER_WORKER = 2  # tasks that are submitted to the pool, per worker
Task = TypeVar("Task")
Result = TypeVar("Result")
_work: Callable[[Any], Any] | None = None  # one per worker process, created by _start_worker


class WorkerPool(Generic[Task, Result]):
    """Worker processes that all do one kind of task. Use it as a context manager, which ends the processes."""

    def __init__(self, start: Callable[[], Callable[[Task], Result]], num_workers: int) -> None:
        """Start nothing yet; with one worker, the calling process does the work.

        `start` is called once in each process and returns the function that does a task. `start` is pickled, so it
        must be a function of a module or a `functools.partial` of one.
        """
        self._start = start
        self._num_workers = num_workers
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> WorkerPool[Task, Result]:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        if self._num_workers > 1:
            self._pool = ProcessPoolExecutor(
                max_workers=self._num_workers,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_start_worker,
                initargs=(self._start,),
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: object) -> None:
        """Wait for the tasks that run, cancel all others, and end the processes."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def results(self, tasks: Iterable[Task]) -> Generator[Result]:
        """Yield the results of all tasks, in the order in which they are ready.

        A task is taken from `tasks` when a worker will soon be free, so the caller may decide late what comes next.
        Raises UserError if a worker was killed, for example because memory ran out.
        """
        if self._pool is None:
            work = self._start()
            for task in tasks:
                yield work(task)
            return
        pending: set[Future[Result]] = set()
        try:
            for task in tasks:
                pending.add(self._pool.submit(_do, task))
                if len(pending) >= _TASKS_PER_WORKER * self._num_workers:
                    done, pending = wait(pending, return_when=FIRST_COMPLETED)
                    yield from (future.result() for future in done)
            while pending:
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        except BrokenProcessPool:
            raise UserError(
                "a corpus worker was killed (out of memory?); run the command again with fewer --workers: finished "
                "work is kept"
            ) from None


def _start_worker(start: Callable[[], Callable[[Any], Any]]) -> None:
    """Set up a worker process: ignore Ctrl-C, end with the main process, and make the function that does tasks."""
    global _work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the main process stops the pool
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    end_with_main_process()
    _work = start()


def end_with_main_process() -> None:
    """End this worker process as soon as the process that started the pool has ended, even by SIGKILL."""
    threading.Thread(target=_wait_for_main_process, daemon=True).start()


def _wait_for_main_process() -> None:
    main_process = multiprocessing.parent_process()
    assert main_process is not None
    main_process.join()
    os._exit(1)  # sys.exit would end this thread only


def _do(task: Any) -> Any:
    assert _work is not None
    return _work(task)
