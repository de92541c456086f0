"""A plugin of pytest that runs test files in the given order until the time is up.

    pytest -p support.until_time_is_up --until=SECONDS --file=FILE --file=FILE tests

SECONDS are those of time.monotonic(). Of the folder `tests` only the given files are collected. They are options,
not arguments: for arguments, pytest would import the conftest.py of each folder, and so torch, also in the process
that only distributes the tests.

How: once the time is up, a test that has not begun is left out. One that still runs GRACE_S later is skipped in the
middle, and what it has started is ended as after a failure. The last line says how many tests that were.

Guarantee: the very first test always begins, however short the time is.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

GRACE_S = 10.0
_NOT_RUN = pytest.StashKey[list[str]]()
_PLACES = pytest.StashKey[dict[Path, int]]()  # of the files in the order


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options for the files and for the end of the time."""
    parser.addoption("--until", type=float, required=True, help="begin no test later than this monotonic time")
    parser.addoption("--file", action="append", default=[], help="collect this file; may be repeated")


def pytest_configure(config: pytest.Config) -> None:
    """Read the order of the files, and begin the list of the tests that are not run."""
    config.stash[_NOT_RUN] = []
    files = enumerate(config.option.file)
    config.stash[_PLACES] = {(config.invocation_params.dir / file).resolve(): place for place, file in files}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out all files that no option names, and all folders that have none of these files below them."""
    files = config.stash[_PLACES]
    if collection_path in files or any(collection_path in file.parents for file in files):
        return None
    return True


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the tests by the order of the options; tests/conftest.py has sorted them otherwise."""
    items.sort(key=lambda item: config.stash[_PLACES][item.path])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Leave out a test if the time is up, unless it is the very first one."""
    if time.monotonic() < item.config.option.until or item is item.session.items[0]:
        return None
    item.config.stash[_NOT_RUN].append(item.nodeid)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, Any]:
    """Stop the fixtures of a test that take too long."""
    with _stopped_in_time(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Stop a test that takes too long."""
    with _stopped_in_time(item):
        return (yield)


@contextlib.contextmanager
def _stopped_in_time(item: pytest.Item) -> Iterator[None]:
    """Skip a test in the middle if it still runs GRACE_S after the end of the time."""
    has_stopped = False

    def stop(*_: object) -> None:
        """Leave the test by an exception."""
        nonlocal has_stopped
        has_stopped = True
        pytest.skip("was not finished in time")

    left_s = max(0.0, item.config.option.until - time.monotonic()) + GRACE_S
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, left_s)
    try:
        yield
    except (Exception, pytest.skip.Exception, pytest.fail.Exception):
        if not has_stopped:
            raise
        item.config.stash[_NOT_RUN].append(item.nodeid)
        pytest.skip("was not finished in time")  # whatever the test has made of the exception
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send the list of a worker of pytest-xdist to the process that reports."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["not_run"] = session.config.stash[_NOT_RUN]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take the list of a worker that has ended."""
    node.config.stash[_NOT_RUN] += getattr(node, "workeroutput", {}).get("not_run", [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say how much was not run."""
    not_run = config.stash[_NOT_RUN]
    if not_run:
        num_files = len({name.partition("::")[0] for name in not_run})
        tests = f"{len(not_run)} test{'s' * (len(not_run) > 1)}"
        files = f"{num_files} file{'s' * (num_files > 1)}"
        were = "were" if len(not_run) > 1 else "was"
        line = f"time is up: {tests} of {files} {were} not run or not finished; make test runs all"
        terminalreporter.write_line(line, yellow=True)
