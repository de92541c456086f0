"""Run functions in forks of this process, which has imported torch and DeepSpeed: the ranks of a run, and others.

The process that forks must have no threads and no process group. A fork ends with its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

from support.real_runs import free_port

_CRASHED = 1
_FOLLOW_S = 20.0  # for the other processes, after one has crashed
_POLL_S = 0.01
_THREADS_END_S = 60.0
_PR_SET_PDEATHSIG = 1


def fork_ranks(
    rank_main: Callable[[int], int], num_ranks: int, output: Path, limit_s: float, world_size: int | None = None
) -> list[int]:
    """Call `rank_main` with the number of each rank in a fork with a rank's variables; return the codes of `wait_for`.

    What the ranks print is appended to `output`. `world_size` is the number of ranks that the variables name, if it is
    not the number of forks.
    """
    size = str(world_size or num_ranks)
    variables = {"WORLD_SIZE": size, "LOCAL_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    rank_of_pid = {}
    for rank in range(num_ranks):
        environment = {**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        rank_of_pid[fork(lambda rank=rank: rank_main(rank), output, environment)] = rank
    codes = wait_for(rank_of_pid, limit_s)
    return [codes[rank] for rank in range(num_ranks)]


def run_in_fork(act: Callable[[], object], output: Path) -> None:
    """Call a function in a fork, because it starts threads, and wait for its end; RuntimeError if it fails."""

    def call() -> int:
        act()
        return 0

    _, status = os.waitpid(fork(call, output, {}), 0)
    if status:
        raise RuntimeError(f"a part of the drill failed: {output.read_text(errors='replace')[-3000:]}")


def fork(act: Callable[[], int], output: Path, environment: Mapping[str, str]) -> int:
    """Call `act` in a forked process, which ends with its result as exit code, and return the process id.

    Args:
        act: runs in the new process; an exception ends it with 1 and a traceback.
        output: file to which stdout and stderr are appended.
        environment: variables to add to the environment.
    """
    wait_for_other_threads()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        descriptor = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o666)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.environ.update(environment)
        code = act()
    except BaseException:  # noqa: BLE001  (the exit code is what counts)
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def wait_for_other_threads() -> None:
    """Wait until this process has one thread, apart from one of pyarrow's allocator, which expects forks.

    A thread of an S3 request still ends for a moment after its answer was returned, and holds a lock of OpenSSL
    meanwhile. A process that was forked in that moment would wait for this lock for ever.
    """
    deadline = time.monotonic() + _THREADS_END_S
    while len(threads := thread_names()) > 1:
        assert time.monotonic() < deadline, threads
        time.sleep(_POLL_S / 10)


def thread_names() -> list[str]:
    """Return what the kernel calls the threads of this process, without the one of pyarrow's allocator."""
    names = []
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            names.append((thread / "comm").read_text().strip())
    return [name for name in names if name != "jemalloc_bg_thd"]


def wait_for(ranks: Mapping[int, int], limit_s: float) -> dict[int, int]:
    """Wait until all processes have ended.

    When one was killed, the others are killed at once. When one has crashed, the others get some seconds to end by
    themselves. Those that do not, and all that still run when time is over, are aborted, which is never taken for
    the planned kill.

    Args:
        ranks: process id -> rank.
        limit_s: seconds after which the processes that still run are aborted.

    Returns:
        rank -> exit code; negative: the signal that ended it.
    """
    codes: dict[int, int] = {}
    running = dict(ranks)
    deadline = time.monotonic() + limit_s
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in running:
            code = codes[running.pop(pid)] = os.waitstatus_to_exitcode(status)
            if code == _CRASHED:
                deadline = min(deadline, time.monotonic() + _FOLLOW_S)
        elif pid == 0:
            time.sleep(_POLL_S)
        was_killed = -signal.SIGKILL in codes.values()
        if was_killed or time.monotonic() > deadline:
            for other in running:
                os.kill(other, signal.SIGKILL if was_killed else signal.SIGABRT)
    return codes
