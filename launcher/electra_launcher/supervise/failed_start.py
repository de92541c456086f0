"""Find out why a start of this node's ranks has failed: which rank explains it, at which step, on which rows.

It also reads how many processes the kernel has killed for lack of memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from electra_dist.errors import EXIT_DONE
from electra_dist.run.error_classes import HANG, Finding, classify, decisive
from electra_dist.run.failures import Failure, is_repetition
from electra_dist.run.heartbeat import Beat
from electra_dist.run.processes import node_name
from electra_launcher.supervise.rank_placement import Placement


@dataclass(frozen=True, kw_only=True)
class FailedStart:
    """Evidence about a start of this node's ranks that has failed."""

    name: str  # such as job-4711-0-start-000002
    placement: Placement
    codes: Mapping[int, int]  # rank -> exit code of those that ended by themselves
    outputs: Mapping[int, str]  # rank -> the end of its stderr
    pids: Mapping[int, int]  # rank -> process id
    is_hung: bool  # whether ranks of this node were silent for too long
    num_killed_for_memory: int  # processes of this node that the kernel killed meanwhile
    global_batch: int  # rows of a step


def explain(start: FailedStart, beats: Sequence[Beat], earlier: Sequence[Failure]) -> Failure | None:
    """Return why a start has failed on this node; None if it failed only because ranks of other nodes did.

    `beats` are the heartbeats of all ranks. `earlier` are the earlier failures with which this one is compared: those
    of the same submission.
    """
    newest = {beat.rank: beat for beat in beats if start.pids.get(beat.rank) == beat.pid}
    findings = {
        rank: classify(code, start.outputs.get(rank, ""), start.num_killed_for_memory)
        for rank, code in sorted(start.codes.items())
        if code != EXIT_DONE
    }
    if start.is_hung and newest:
        behind = min(newest, key=lambda rank: (newest[rank].step, newest[rank].time))
        findings = {behind: Finding(error=HANG)}
    found = decisive(findings.items())
    if found is None:
        return None
    rank, finding = found
    beat = newest.get(rank)
    step = None if beat is None or beat.phase == "setup" else beat.step
    positions = None
    if step is not None and beat is not None and beat.phase == "step":
        num_rows = start.global_batch // start.placement.num_ranks
        first = step * start.global_batch + rank * num_rows
        positions = [first, first + num_rows - 1]
    return Failure(
        time=datetime.now(UTC).isoformat(timespec="milliseconds"),
        start=start.name,
        node=node_name(),
        rank=rank,
        code=start.codes.get(rank),
        error=finding.error.name,
        line=finding.line,
        step=step,
        positions=positions,
        repeated=is_repetition(finding, step, earlier),
    )


def kills_for_memory(vmstat: Path = Path("/proc/vmstat")) -> int:
    """Return how many processes the kernel of this node has killed for lack of memory since its boot; 0 if unknown."""
    try:
        lines = vmstat.read_text(encoding="ascii").splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
    except (OSError, ValueError, IndexError):
        return 0
