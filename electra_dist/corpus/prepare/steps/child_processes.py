"""End the processes of a preparation together with the process that started them, even if that one is killed."""

from __future__ import annotations

import ctypes
import signal
import sys
from typing import Any

_PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends. Has an effect on Linux only.

    A task that went on after a `kill -9` of its parent could write a file while a restart reads it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def begin_task(data: Any = None, rank: int = 0, world_size: int = 1) -> None:
    """Bind a worker process to its parent; the first step of every pipeline that local processes run."""
    die_with_parent()
