"""Name the Slurm jobs of a run, submit batch scripts (sbatch), ask for jobs (squeue) and unused nodes (sinfo)."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from electra_dist.corpus.prepare.sbatch_environment import directive, environment_of_submission
from electra_dist.errors import UserError
from electra_dist.store.atomic_files import read_regular

_TIMEOUT_S = 20.0  # after which a program of Slurm counts as not answering


def job_name(run_dir: Path) -> str:
    """Return the name of a run's Slurm jobs: the folder's name and 8 hex digits of a hash of its absolute path.

    The name must be unique for each run folder: `--dependency=singleton` lets only one job of a name run at a time,
    and the batch script cancels the waiting jobs of a run by their name.
    """
    # Only characters that need no quoting in a shell or in an option of Slurm are kept.
    readable_name = re.sub(r"[^A-Za-z0-9._-]+", "-", run_dir.name).strip("-") or "run"
    digest = hashlib.sha256(os.fsencode(run_dir)).hexdigest()
    return f"{readable_name}-{digest[:8]}"


def user_options(sbatch_options: Iterable[str], reserved: Container[str]) -> list[tuple[str, str]]:
    """Split the user's further sbatch options into pairs of name and value; a flag has the value "".

    Each option is `name=value` or `name`, with or without dashes in front, such as account=vision. A UserError means
    that a name is missing, or is one of `reserved`, the options that the script sets itself.
    """
    options = []
    for option in sbatch_options:
        name, _, value = option.lstrip("-").partition("=")
        if not name:
            raise UserError(f"--sbatch {option}: the name of an sbatch option is missing; write NAME=VALUE or NAME")
        if name in reserved:
            raise UserError(
                f"--sbatch {option}: the script sets `{name}` itself; leave it out, or use the option of "
                f"`electra-dist submit` for it"
            )
        options.append((name, value))
    return options


def option_text(name: str, value: object) -> str:
    """Return an sbatch option as `--name=value`, or as `--name` if the value is "", quoted for an #SBATCH line."""
    option = f"--{directive(name)}"
    return option if value == "" else f"{option}={directive(value)}"


def run_sbatch(script: Path, options: Sequence[str] = ()) -> str:
    """Submit a batch script by sbatch with further `options`; return the job id. UserError: sbatch refuses it."""
    script_options = re.findall(r"^#SBATCH --([a-z-]+)", read_regular(script).decode("utf-8", "replace"), re.MULTILINE)
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", *options, str(script)],
            env=environment_of_submission(os.environ, script_options),
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
    except FileNotFoundError:
        raise UserError(
            f"sbatch is not installed on this machine; run it on a login node: sbatch {shlex.quote(str(script))}"
        ) from None
    if done.returncode != 0:
        reason = " ".join(done.stderr.replace("sbatch: error:", " ").split())
        raise UserError(f"sbatch refused {script}: {reason}; change the option that it names and submit again")
    # With --parsable, sbatch prints `JOBID` or, in a federation, `JOBID;CLUSTER`.
    return done.stdout.strip().partition(";")[0]


@dataclass(frozen=True, kw_only=True)
class QueuedJob:
    """One job in Slurm's queue, as squeue shows it."""

    job: str  # job id
    state: str  # PENDING, RUNNING, COMPLETING, ...
    reason: str  # why it does not run; "None" if it runs
    nodes: str  # where it runs, for example n[1-2]; empty if it does not run

    @property
    def is_held(self) -> bool:
        """Return whether the job is held, by a person or by Slurm after a failed start, until a person releases it."""
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
    """Run a command and return the lines of its output; None if it is missing, fails, or takes longer than 20 s."""
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", check=False, timeout=_TIMEOUT_S
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    return done.stdout.splitlines()
