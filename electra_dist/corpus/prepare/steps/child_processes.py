"""End the processes of a preparation together with the process that started them, even if that one is killed."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends; this works on Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def begin_worker() -> None:
    """Set up a worker process: it ends when the main command ends, and the processes that it starts are its forks.

    If a worker went on after a `kill -9` of the command, it could write a file while a restarted command reads it.
    `die_with_parent` does not help here: the worker's parent is the fork server, which lives as long as its workers. A
    thread therefore waits for the end of the command.
    """
    threading.Thread(target=_end_with_command, daemon=True).start()
    # Otherwise the extractor's process would be the child of a further fork server, and outlive the worker.
    multiprocessing.set_start_method("fork", force=True)


def _end_with_command() -> None:
    command = multiprocessing.parent_process()
    assert command is not None
    command.join()
    os.kill(os.getpid(), signal.SIGKILL)
