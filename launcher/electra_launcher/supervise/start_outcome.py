"""Decide what it means that a node's ranks have ended, from the ledger and the ranks' exit codes, and why they failed.

Guarantee: `outcome` and `explain` are functions of their arguments, and touch no file. Whether the run is done is read
only from the ledger: rank 0, perhaps on another node, writes the event "done" after it has committed the last
checkpoint.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from electra_dist.errors import EXIT_CRASH, EXIT_DONE, EXIT_STOPPED, EXIT_UNHEALTHY, EXIT_USER_ERROR
from electra_dist.run.error_classes import HANG, Finding, classify, decisive
from electra_dist.run.failures import Failure, is_repetition
from electra_dist.run.heartbeat import Beat
from electra_dist.run.ledger import LedgerEvent
from electra_dist.run.this_node import node_name
from electra_launcher.supervise.rank_processes import Placement


@dataclass(frozen=True, kw_only=True)
class StartEnd:
    """How the ranks of this node ended: their exit codes, and the events that were written to the ledger."""

    events: Sequence[LedgerEvent]  # the ledger's events since the ranks were started
    codes: Mapping[int, int]  # rank -> exit code of the ranks that have ended; -N: signal N ended it
    num_ranks: int  # ranks that were started on this node
    at_fault: bool = True  # whether this node is the faulty one if ranks (on all nodes) end with EXIT_UNHEALTHY


@dataclass(frozen=True, kw_only=True)
class StartOutcome:
    """How a start of the ranks ended: an exit code of `electra_dist/errors.py`, and the reason as one line."""

    code: int
    why: str
    ends_alone: bool = False  # whether the ranks of this node ended with 75 by themselves: no other rank knows of it

    @property
    def ends_others(self) -> bool:
        """Return whether ranks on other nodes must be ended, because they would wait in vain for this node's ranks."""
        return self.ends_alone or self.code not in (EXIT_DONE, EXIT_STOPPED)


def outcome(end: StartEnd) -> StartOutcome:
    """Decide how a start of the ranks ended; return the exit code for this node, and the reason.

    The ledger has precedence over exit codes: a rank that was killed after the "done" event does not fail the run. If
    one node is faulty, the ranks of all nodes end with EXIT_UNHEALTHY. The sound nodes then get EXIT_STOPPED, so that
    the next job leaves out only the faulty node. An end that nothing explains gives EXIT_CRASH; only then are the
    ranks started again.
    """
    newest_events = {event.event: event for event in end.events}  # name of the event -> newest event of that name
    if "done" in newest_events:
        step = newest_events["done"].step
        return StartOutcome(code=EXIT_DONE, why=f"the target step {step:,} is reached")
    if "stop" in newest_events:
        stop = newest_events["stop"]
        why = f"stopped and saved at step {stop.step:,}: {stop.why}"
        return StartOutcome(code=EXIT_STOPPED, why=why)
    if "storage" in newest_events:
        lost = newest_events["storage"]
        why = f"storage stayed full or away, at step {lost.step:,}: {lost.why}; start again"
        return StartOutcome(code=EXIT_STOPPED, why=why)
    codes = set(end.codes.values())
    if EXIT_USER_ERROR in codes:
        why = "user error; fix what the `error:` line above names, then start again"
        return StartOutcome(code=EXIT_USER_ERROR, why=why)
    if len(end.codes) == end.num_ranks and codes == {EXIT_STOPPED}:
        why = "all ranks ended with 75, and the ledger has no event for it: its disk was probably full or away"
        return StartOutcome(code=EXIT_STOPPED, why=why, ends_alone=True)
    if EXIT_UNHEALTHY in codes and end.at_fault:
        why = "this node is unhealthy; see strikes.jsonl in the run folder"
        return StartOutcome(code=EXIT_UNHEALTHY, why=why)
    if EXIT_UNHEALTHY in codes:
        why = "another node is unhealthy; see strikes.jsonl in the run folder"
        return StartOutcome(code=EXIT_STOPPED, why=why)
    return StartOutcome(code=EXIT_CRASH, why=f"crash: {_describe_codes(end)}")


def awaits_ledger(end: StartEnd) -> bool:
    """Return whether all ranks of this node ended well, but the ledger lacks the event that says how the run ended.

    The ledger should then be read again: rank 0, perhaps on another node, has written this event before it ended, and
    a shared file system may show it late.
    """
    all_have_ended = len(end.codes) == end.num_ranks
    all_ended_well = all_have_ended and set(end.codes.values()) <= {EXIT_DONE, EXIT_STOPPED}
    has_event = any(event.event in ("done", "stop", "storage") for event in end.events)
    return all_ended_well and not has_event


def describe_code(code: int) -> str:
    """Return an exit code as text: "exit 1", or "SIGKILL" for a process that this signal has ended."""
    try:
        return f"exit {code}" if code >= 0 else signal.Signals(-code).name
    except ValueError:  # one of the real-time signals, which have no names
        return f"signal {-code}"


def _describe_codes(end: StartEnd) -> str:
    """Return one line such as "rank 0 exit 1, rank 2 SIGKILL, 2 did not end"."""
    parts = [f"rank {rank} {describe_code(code)}" for rank, code in sorted(end.codes.items())]
    num_running = end.num_ranks - len(end.codes)
    if num_running > 0:
        parts.append(f"{num_running} did not end")
    return ", ".join(parts)


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

    def findings(self) -> dict[int, Finding]:
        """Return for each rank of this node that failed the reason, found from its exit code and its output."""
        return {
            rank: classify(code, self.outputs.get(rank, ""), self.num_killed_for_memory)
            for rank, code in sorted(self.codes.items())
            if code != EXIT_DONE
        }

    def positions_of(self, rank: int, step: int) -> list[int]:
        """Return the positions, in the run's order of rows, of the first and the last row of `rank` in `step`."""
        num_rows = self.global_batch // self.placement.num_ranks
        first = step * self.global_batch + rank * num_rows
        return [first, first + num_rows - 1]


def explain(start: FailedStart, beats: Sequence[Beat], earlier: Sequence[Failure]) -> Failure | None:
    """Return why a start has failed on this node; None if it failed only because ranks of other nodes did.

    `beats` are the heartbeats of all ranks. `earlier` are the earlier failures with which this one is compared: those
    of the same submission.
    """
    # The heartbeats of this node's ranks in this start; the others are of other nodes or of an earlier start.
    newest = {beat.rank: beat for beat in beats if start.pids.get(beat.rank) == beat.pid}
    findings = start.findings()
    if start.is_hung and newest:
        behind = min(newest, key=lambda rank: (newest[rank].step, newest[rank].time))
        findings = {behind: Finding(error=HANG)}
    found = decisive(findings.items())
    if found is None:
        return None
    rank, finding = found
    step = positions = None
    beat = newest.get(rank)
    if beat is not None and beat.phase != "setup":
        step = beat.step
        if beat.phase == "step":
            positions = start.positions_of(rank, step)
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
