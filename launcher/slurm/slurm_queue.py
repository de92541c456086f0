"""Ask Slurm (squeue, sinfo) for the jobs of a run in the queue and for the nodes that are out of service.

Limits: without Slurm, or if its controller does not answer, the result is None; that is never an error.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass

_TIMEOUT_S = 20.0


@dataclass(frozen=True, kw_only=True)
class QueuedJob:
    """One job in Slurm's queue, as squeue shows it."""

    job: str  # job id
    state: str  # PENDING, RUNNING, COMPLETING, ...
    reason: str  # why it does not run; "None" if it runs
    nodes: str  # where it runs, for example n[1-2]; empty if it does not run

    @property
    def is_held(self) -> bool:
        """Return whether a person must release the job, because a person or, after a failed start, Slurm holds it."""
        return self.state != "RUNNING" and re.search("held|hold", self.reason, re.IGNORECASE) is not None


@dataclass(frozen=True, kw_only=True)
class NodeOut:
    """One node that Slurm does not use: drained, down or failed."""

    node: str
    state: str  # drained, draining, down, down*, ...
    reason: str  # as the administrator or Slurm entered it


@dataclass(frozen=True, kw_only=True)
class QueueView:
    """Queued jobs of the run, and nodes that Slurm does not use."""

    jobs: tuple[QueuedJob, ...]
    out: tuple[NodeOut, ...]


def queue_view(job_name: str) -> QueueView | None:
    """Ask Slurm for the jobs of this name and for all nodes that are out of service.

    Calls squeue and sinfo, which may take up to 20 s each.

    Args:
        job_name: the name of the run's jobs, see `launcher.slurm.submission.job_name`.

    Returns:
        The view; None if squeue is not installed, fails or does not answer.
    """
    jobs = _lines("squeue", "--noheader", f"--name={job_name}", "--format=%A|%T|%N|%r")
    nodes = _lines("sinfo", "--noheader", "--Node", "--states=drain,draining,drained,down,fail", "--format=%N|%T|%E")
    if jobs is None:
        return None
    return QueueView(jobs=parse_jobs(jobs), out=parse_nodes(nodes or []))


def parse_jobs(lines: list[str]) -> tuple[QueuedJob, ...]:
    """Parse squeue's lines `job|state|nodes|reason`; lines of another form are ignored."""
    rows = [line.split("|", 3) for line in lines]
    return tuple(QueuedJob(job=row[0], state=row[1], nodes=row[2], reason=row[3]) for row in rows if len(row) == 4)


def parse_nodes(lines: list[str]) -> tuple[NodeOut, ...]:
    """Parse sinfo's lines `node|state|reason`; lines of another form are ignored.

    A node that is in several partitions has a line for each; the last one counts.
    """
    rows_by_node = {line.split("|", 2)[0]: line.split("|", 2) for line in lines}
    return tuple(NodeOut(node=row[0], state=row[1], reason=row[2]) for row in rows_by_node.values() if len(row) == 3)


def _lines(*command: str) -> list[str] | None:
    """Run a command and return its output as lines; None if it is missing, fails, or takes longer than 20 s."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout.splitlines() if done.returncode == 0 else None
