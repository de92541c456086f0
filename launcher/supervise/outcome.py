"""What the end of a start means, and whether there is another one: pure, from the ledger and the ranks' own codes.

The exit code of a wrapper (`deepspeed`, srun) is not asked: it can be 0 after a kill. `done` is believed only of the
ledger, because rank 0 writes it after the last checkpoint is committed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from electra_dist.errors import EXIT_CRASH, EXIT_DONE, EXIT_STOPPED, EXIT_UNHEALTHY, EXIT_USER_ERROR
from electra_dist.run.jsonl import Record


@dataclass(frozen=True, kw_only=True)
class StartEnd:
    """How a start of the ranks ended on this node."""

    events: Sequence[Record]  # what the ledger has gained since
    codes: Mapping[int, int]  # of each local rank that told one; a killed one has none
    num_ranks: int  # on this node
    at_fault: bool = True  # of EXIT_UNHEALTHY: it is this node; all ranks of all nodes end with that code


@dataclass(frozen=True, kw_only=True)
class StartOutcome:
    """An exit code of errors.py, and why."""

    code: int
    why: str


def outcome(end: StartEnd) -> StartOutcome:
    """What the ranks' end means. EXIT_CRASH is what may be tried again here."""
    events = {event["event"]: event for event in end.events}
    if "done" in events:
        return StartOutcome(code=EXIT_DONE, why=f"the target step {events['done']['step']:,} is reached")
    if "stop" in events:
        stop = events["stop"]
        return StartOutcome(
            code=EXIT_STOPPED, why=f"stopped and saved at step {stop['step']:,}: {stop.get('why', '')}"
        )
    codes = set(end.codes.values())
    if EXIT_USER_ERROR in codes:
        return StartOutcome(
            code=EXIT_USER_ERROR, why="a mistake or a full disk that only a person can mend; see above"
        )
    if EXIT_UNHEALTHY in codes and end.at_fault:
        return StartOutcome(code=EXIT_UNHEALTHY, why="this node is unhealthy; see strikes.jsonl")
    if EXIT_UNHEALTHY in codes:
        return StartOutcome(code=EXIT_STOPPED, why="another node is unhealthy")
    return StartOutcome(code=EXIT_CRASH, why=f"crash: {_ends(end)}")


def awaits_ledger(end: StartEnd) -> bool:
    """Whether the ranks ended well and only the ledger does not say so yet, as seen through a shared file system."""
    told = set(end.codes.values())
    return len(end.codes) == end.num_ranks and told <= {EXIT_DONE, EXIT_STOPPED} and outcome(end).code == EXIT_CRASH


def _ends(end: StartEnd) -> str:
    told = [f"rank {rank} exit {code}" for rank, code in sorted(end.codes.items())]
    silent = end.num_ranks - len(end.codes)
    return ", ".join(told + ([f"{silent} killed or never begun"] if silent else []))
