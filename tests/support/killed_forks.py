"""Run a function in a fork of this process, and kill the fork at one of its durable operations (writes, renames).

The operations are those that `drills.kill_matrix.durable_operations` records.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from drills.kill_matrix.durable_operations import Kill, Operation, OperationLog


def operations_of(act: Callable[[], object], folder: Path) -> list[Operation]:
    """Run a function to its end in a fork; return the durable operations that it did below a folder, in order."""
    status, operations = _fork(act, folder, None)
    assert status == 0
    return operations


def run_killed(act: Callable[[], object], folder: Path, kill: Kill) -> None:
    """Run a function in a fork, and kill the fork with SIGKILL at the operation below a folder that `kill` names."""
    status, _ = _fork(act, folder, kill)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (kill, status)


def _fork(act: Callable[[], object], folder: Path, kill: Kill | None) -> tuple[int, list[Operation]]:
    """Run a function in a fork; return the wait status of the fork and the durable operations that it did.

    Operations below `folder` are recorded. `kill` names the one at which the fork is killed, which then returns no
    operations; None lets it end.
    """
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        status = 1
        try:
            os.close(reader)
            log = OperationLog(folder, "", "fork", 0, kill)
            act()
            assert not log.missed, log.missed
            with os.fdopen(writer, "wb") as out:
                pickle.dump(log.operations, out)
            status = 0
        except BaseException as error:  # noqa: BLE001  (the parent must not go on in the fork)
            print(repr(error), file=sys.stderr, flush=True)
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as source:
        content = source.read()
    _, status = os.waitpid(process, 0)
    return status, pickle.loads(content) if content else []
