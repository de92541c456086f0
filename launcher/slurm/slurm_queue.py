"""Ask Slurm (squeue, sinfo) for the jobs of a run in the queue and for the nodes that are out of service.

Limits: without Slurm, or if its controller does not answer, `queue_view` returns None and raises no exception.
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
        """Return whether a person, or Slurm after a failed start, holds the job, so that a person must release it."""
        return self.state != "RUNNING" and re.search("held|hold", self.reason, re.IGNORECASE) is not None


@dataclass(frozen=True, kw_only=True)
class NodeOut:
    """One node that Slurm does not use: drained, down or failed."""

    node: str
    state: str  # drained, draining, down, down*, ...
    reason: str  # as the administrator or Slurm entered it


@dataclass(frozen=True, kw_only=True)
class QueueView:
    """What Slurm knows now: the run's jobs in the queue, and the nodes of the cluster that Slurm does not use."""

    jobs: tuple[QueuedJob, ...]
    out: tuple[NodeOut, ...]


def queue_view(job_name: str) -> QueueView | None:
    """Ask Slurm for the jobs of this name (squeue) and for all nodes that are out of service (sinfo).

    Waits up to 20 s for each. The result is None if squeue is not installed, fails or does not answer; if only sinfo
    fails, the result lists no nodes.
    """
    job_lines = _lines("squeue", "--noheader", f"--name={job_name}", "--format=%A|%T|%N|%r")
    node_lines = _lines(
        "sinfo", "--noheader", "--Node", "--states=drain,draining,drained,down,fail", "--format=%N|%T|%E"
    )
    if job_lines is None:
        return None
    return QueueView(jobs=parse_jobs(job_lines), out=parse_nodes(node_lines or []))


def parse_jobs(lines: list[str]) -> tuple[QueuedJob, ...]:
    """Parse squeue's lines `job|state|nodes|reason`, such as `4712|RUNNING|n[1-2]|None`; ignore other lines."""
    jobs = []
    for line in lines:
        fields = line.split("|", 3)  # at most four fields: the reason may contain the separator
        if len(fields) == 4:
            job, state, nodes, reason = fields
            jobs.append(QueuedJob(job=job, state=state, nodes=nodes, reason=reason))
    return tuple(jobs)


def parse_nodes(lines: list[str]) -> tuple[NodeOut, ...]:
    """Parse sinfo's lines `node|state|reason`, such as `n3|drained|bad GPU`; ignore other lines.

    A node that is in several partitions has a line for each; the last one counts.
    """
    fields_by_node: dict[str, list[str]] = {}
    for line in lines:
        fields = line.split("|", 2)  # at most three fields: the reason may contain the separator
        fields_by_node[fields[0]] = fields
    nodes = []
    for fields in fields_by_node.values():
        if len(fields) == 3:
            node, state, reason = fields
            nodes.append(NodeOut(node=node, state=state, reason=reason))
    return tuple(nodes)


def _lines(*command: str) -> list[str] | None:
    """Run a command and return its output as lines; None if it is missing, fails, or takes longer than 20 s."""
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", check=False, timeout=_TIMEOUT_S
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    return done.stdout.splitlines()
