"""Run the tasks of a corpus build or of a preparation in worker processes, and yield the results as they come.

Guarantee: at most two tasks per worker are submitted ahead; the workers end with the main process, even if that is
killed with SIGKILL. A worker that is killed ends the work with an error. The order of the results is not fixed; what
is built does not depend on it.

How: a `ProcessPoolExecutor` of processes that are forks of one process, which has imported everything and has no
threads. They therefore inherit no locks and begin at once. With one worker the calling process does the work itself,
unless its tasks are isolated. Each worker tokenizes in one thread.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Generic, TypeVar

from electra_dist.errors import UserError

_TASKS_PER_WORKER = 2  # tasks that are submitted to the pool, per worker
_WATCH_INTERVAL_S = 2.0
_SOCKET_PATH_BYTES = 107  # the longest path of a socket on Linux
_SOCKET_NAME_BYTES = len("/pymp-12345678/listener-12345678")  # what multiprocessing appends to TMPDIR
Task = TypeVar("Task")
Result = TypeVar("Result")
_work: Callable[[Any], Any] | None = None  # one per worker process, created by _start_worker


class WorkerKilled(UserError):
    """Error for a worker that ended without a result, for example because the kernel killed it for lack of memory."""


class WorkerPool(Generic[Task, Result]):
    """Worker processes that all do one kind of task. Use it as a context manager, which ends the processes."""

    def __init__(
        self,
        start: Callable[[], Callable[[Task], Result]],
        num_workers: int,
        *,
        preload: str,
        isolated: bool = False,
    ) -> None:
        """Start no process yet. If `num_workers` is 1, the calling process does the work.

        `start` is called once in each process and returns the function that does a task. `start` is pickled, so it
        must be a function of a module or a `functools.partial` of one. Workers are forks of one process, which has
        imported the module `preload`. `isolated` is for tasks that may take hours or crash: they run in processes even
        with one worker, and when one fails, the others are killed.
        """
        self._start = start
        self._num_workers = num_workers
        self._preload = preload
        self._isolated = isolated
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> WorkerPool[Task, Result]:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        if self._num_workers > 1 or self._isolated:
            _shorten_socket_paths()
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload([self._preload])
            self._pool = ProcessPoolExecutor(
                self._num_workers, context, _start_worker, (self._start, dict(os.environ))
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: object) -> None:
        """Cancel the tasks that have not begun, wait for the others or kill them, and end the processes."""
        if self._pool is None:
            return
        if error is not None and (self._isolated or isinstance(error, WorkerKilled)):
            for process in self._processes():
                process.kill()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def results(self, tasks: Iterable[Task]) -> Generator[Result]:
        """Yield the results of all tasks, in the order in which they are ready.

        A task is taken from `tasks` when a worker will soon be free, so the caller may decide late what comes next.
        Raises WorkerKilled if a worker was killed, for example because memory ran out.
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
                    done, pending = self._wait(pending)
                    yield from (future.result() for future in done)
            while pending:
                done, pending = self._wait(pending)
                yield from (future.result() for future in done)
        except BrokenProcessPool:
            raise WorkerKilled(
                "a corpus worker was killed (out of memory?); run the command again with fewer --workers: finished "
                "work is kept"
            ) from None

    def _wait(self, pending: set[Future[Result]]) -> tuple[set[Future[Result]], set[Future[Result]]]:
        """Wait for at least one task; return the tasks that have ended, and those that have not.

        If a worker process ends, raise BrokenProcessPool, as the pool would. The pool itself misses the end of a
        worker that starts while the pool's thread makes its list of workers.
        """
        while True:
            done, still_pending = wait(pending, timeout=_WATCH_INTERVAL_S, return_when=FIRST_COMPLETED)
            if done:
                return done, still_pending
            if any(process.exitcode is not None for process in self._processes()):
                raise BrokenProcessPool

    def _processes(self) -> list[Any]:
        assert self._pool is not None
        return list((self._pool._processes or {}).values())


def _shorten_socket_paths() -> None:
    """Make multiprocessing use /tmp for its sockets if TMPDIR is too long: a socket's path has at most 107 bytes."""
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) + _SOCKET_NAME_BYTES > _SOCKET_PATH_BYTES:
        tempfile.tempdir = "/tmp"
        try:
            multiprocessing.util.get_temp_dir()  # makes a private folder, which this process keeps to
        finally:
            tempfile.tempdir = folder


def _start_worker(start: Callable[[], Callable[[Any], Any]], environment: dict[str, str]) -> None:
    """Set up a worker process: ignore Ctrl-C, end with the main process, and make the function that does tasks."""
    global _work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the main process stops the pool
    # The process from which workers are forked has the environment that the first pool of the program found: variables
    # that were set since, such as credentials of a store, would be missing.
    os.environ.clear()
    os.environ.update(environment)
    # A worker that went on after a `kill -9` of the command could write a file while a restarted command reads it.
    threading.Thread(target=_end_with_main_process, daemon=True).start()
    _work = start()


def _end_with_main_process() -> None:
    main_process = multiprocessing.parent_process()
    assert main_process is not None
    main_process.join()
    os._exit(1)  # sys.exit would end this thread only


def _do(task: Any) -> Any:
    assert _work is not None
    return _work(task)
