"""What Slurm knows of a run: its jobs in the queue, and nodes that are out of service. Asks squeue and sinfo.

Where it stops: a cluster without Slurm, or whose controller does not answer, has no view (None); it is never an error.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass

_TIMEOUT_S = 20.0


@dataclass(frozen=True, kw_only=True)
class QueuedJob:
    """A line of squeue."""

    job: str
    state: str  # PENDING, RUNNING, COMPLETING, ...
    reason: str  # why it does not run; "None" if it does
    nodes: str  # where it runs, as n[1-2]

    @property
    def is_held(self) -> bool:
        """Whether it waits for a person: held by one, or by Slurm after a start that failed."""
        return self.state != "RUNNING" and re.search("held|hold", self.reason, re.IGNORECASE) is not None


@dataclass(frozen=True, kw_only=True)
class NodeOut:
    """A node that Slurm does not use."""

    node: str
    state: str  # drained, draining, down, down*, ...
    reason: str


@dataclass(frozen=True, kw_only=True)
class QueueView:
    """Both."""

    jobs: tuple[QueuedJob, ...]
    out: tuple[NodeOut, ...]


def queue_view(job_name: str) -> QueueView | None:
    """What Slurm says now of the jobs of this name; None without Slurm."""
    jobs = _lines("squeue", "--noheader", f"--name={job_name}", "--format=%A|%T|%N|%r")
    nodes = _lines("sinfo", "--noheader", "--Node", "--states=drain,draining,drained,down,fail", "--format=%N|%T|%E")
    if jobs is None:
        return None
    return QueueView(jobs=parse_jobs(jobs), out=parse_nodes(nodes or []))


def parse_jobs(lines: list[str]) -> tuple[QueuedJob, ...]:
    """squeue's lines `job|state|nodes|reason`."""
    fields = [line.split("|", 3) for line in lines]
    return tuple(QueuedJob(job=f[0], state=f[1], nodes=f[2], reason=f[3]) for f in fields if len(f) == 4)


def parse_nodes(lines: list[str]) -> tuple[NodeOut, ...]:
    """sinfo's lines `node|state|reason`, each node once (it has a line for each of its partitions)."""
    fields = {line.split("|", 2)[0]: line.split("|", 2) for line in lines}
    return tuple(NodeOut(node=f[0], state=f[1], reason=f[2]) for f in fields.values() if len(f) == 3)


def _lines(*command: str) -> list[str] | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout.splitlines() if done.returncode == 0 else None
