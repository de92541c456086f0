"""Processes of a run on this node, found by a mark in their environment."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

MARK = "ELECTRA_DIST_SUPERVISED"  # run folder and node of the supervisor, in the environment of all it starts


def mark_of(run_dir: Path, node: int) -> str:
    """What tells this run's processes on this node from all others."""
    return f"{Path(run_dir).absolute()}#{node}"


def marked_pids(mark: str) -> list[int]:
    """Processes, other than this one, that were started with this mark."""
    entry, found = f"{MARK}={mark}".encode(), []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if entry in (process / "environ").read_bytes().split(b"\0") and int(process.name) != os.getpid():
                found.append(int(process.name))
    return [pid for pid in found if is_alive(pid)]


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that is dead but not yet collected does not."""
    return _field(pid, "State")[:1] not in ("", "Z", "X")


def _field(pid: int, name: str) -> str:
    """A line of /proc/PID/status; "" of a process that is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return line.partition(":")[2].strip()
    return ""
