"""End the processes of a preparation together with the process that started them, even if that one is killed."""

from __future__ import annotations

import ctypes
import multiprocessing
import signal
import sys

_PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends. Has an effect on Linux only.

    A task that went on after a `kill -9` of its parent could write a file while a restart reads it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def begin_worker() -> None:
    """Prepare a worker process: it ends with its parent, and the processes that it starts are forks of it.

    Without the second, the extractor's process would be the child of a further server process, and outlive the worker.
    """
    die_with_parent()
    multiprocessing.set_start_method("fork", force=True)
