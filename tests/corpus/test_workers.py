"""Worker processes of builds and preparations: a killed one ends the work, and isolated tasks never run here."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from electra_dist.corpus.workers import WorkerKilled, WorkerPool


def start() -> Callable[[int], int]:
    """Return a task that gives the number of its process, or kills its process if it is given a negative number."""

    def work(number: int) -> int:
        if number < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return os.getpid()

    return work


@pytest.mark.parametrize("isolated", [False, True])
def test_a_killed_worker_ends_the_work_with_an_error(isolated: bool) -> None:
    with (
        pytest.raises(WorkerKilled, match="a corpus worker was killed"),
        WorkerPool(start, 2, preload="electra_dist.errors", isolated=isolated) as pool,
    ):
        list(pool.results([1, 2, -1, 3, 4]))


def test_the_only_worker_is_this_process_unless_its_tasks_are_isolated() -> None:
    with WorkerPool(start, 1, preload="electra_dist.errors") as pool:
        assert set(pool.results([1, 2])) == {os.getpid()}
    with WorkerPool(start, 1, preload="electra_dist.errors", isolated=True) as pool:
        [worker] = set(pool.results([1, 2]))
        assert worker != os.getpid()


def start_reading_the_environment() -> Callable[[str], str | None]:
    """Return a task that gives the value of an environment variable."""
    return os.environ.get


def test_workers_have_the_environment_of_the_pool_that_starts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """All pools share one process that workers are forked from; it keeps the environment of the first pool."""
    values = []
    for value in ("first", "second"):
        monkeypatch.setenv("ELECTRA_TEST_CREDENTIAL", value)
        with WorkerPool(start_reading_the_environment, 2, preload="electra_dist.errors") as pool:
            values += list(pool.results(["ELECTRA_TEST_CREDENTIAL"]))
    assert values == ["first", "second"]
