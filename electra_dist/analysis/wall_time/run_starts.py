"""Reads the starts of a run's ranks from its ledger: when each began and ended, its steps, and what took its time.

Guarantee: pure functions of the events in ledger.jsonl.

Limits: if no event of a start has `spent_s`, the seconds by activity, as in an older ledger, they are estimated from
the times of its checkpoints and of its end. A start that was killed before its first checkpoint has no estimate: its
steps and their seconds count as 0. Steps after the event from which the numbers of a start are taken are not counted.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from electra_dist.run.jsonl import Record

START_EVENTS = ("start", "resume")  # names of the events that begin a start of the ranks
_PROGRESS_EVENTS = ("checkpoint", "stop", "storage", "done", "crash", "unhealthy")  # `step`: steps done


@dataclass(frozen=True)
class RunStart:
    """One start of a run's ranks, from the launch of their processes to their end, as ledger.jsonl records it.

    It holds when the start began and ended, and how many seconds it spent on each activity. Points in time are Unix
    seconds.
    """

    began: float  # start of the process
    setup: Mapping[str, float]  # seconds by activity: import, build, restore
    first_step: int  # steps that were done when it began
    repeated: int  # steps of earlier starts that this one repeats
    last: float  # time of its last event
    last_step: int  # steps that were done when `spent` was recorded
    spent: Mapping[str, float]  # seconds by activity: first (the first step), step (the others), data, stall, eval
    spent_until: float  # time of the event that `last_step` and `spent` are from

    @property
    def num_steps(self) -> int:
        """Return how many optimizer steps this start made until its times (`spent`) were last recorded.

        Steps after that time are therefore not included.
        """
        return max(0, self.last_step - self.first_step)

    @property
    def compile_s(self) -> float:
        """Return the estimated seconds of compilation: how much longer the first step was than the mean of the others.

        0 if the ledger covers fewer than two steps of this start.
        """
        num_other_steps = self.num_steps - 1
        if num_other_steps <= 0:
            return 0.0
        first_step_s = self.spent.get("first", 0.0)
        mean_other_step_s = self.spent.get("step", 0.0) / num_other_steps
        return max(0.0, first_step_s - mean_other_step_s)

    @property
    def steps_s(self) -> float:
        """Return the seconds of all steps of this start, without compilation and without waiting for rows.

        If the first step took longer than the mean of the others, the difference is `compile_s` and not in the result.
        """
        all_steps_s = self.spent.get("first", 0.0) + self.spent.get("step", 0.0)
        data_s = self.spent.get("data", 0.0)
        return max(0.0, all_steps_s - data_s - self.compile_s)


def starts_of(ledger: Sequence[Record]) -> list[RunStart]:
    """Return every start of the ranks that the ledger records, oldest first.

    Each start has a number, the attempt, which its events contain. A start consists of an event "start" or "resume"
    and of the events with the same attempt up to the next event "start" or "resume".

    Args:
        ledger: events of ledger.jsonl, oldest first.
    """
    bounds = [*start_indexes(ledger), len(ledger)]  # of the events of each start
    return [
        _run_start(ledger[index], _events_of_start(ledger, index, next_index))
        for index, next_index in itertools.pairwise(bounds)
    ]


def _run_start(start_event: Record, later_events: Sequence[Record]) -> RunStart:
    """Summarise the ledger's events of one start of the ranks (one launch of their processes) in a `RunStart`.

    The first event is written after the setup (import, build, restore), so the processes began earlier than its time
    by the seconds of the setup that it records.

    Args:
        start_event: its event "start" or "resume", which is written after the setup.
        later_events: its other events, oldest first; may be empty.
    """
    progress = [event for event in later_events if event["event"] in _PROGRESS_EVENTS]
    newest = _newest_progress(start_event, progress)
    setup = start_event.get("setup_s", {})
    return RunStart(
        began=time_of(start_event) - sum(setup.values()),
        setup=setup,
        first_step=start_event["step"],
        repeated=start_event.get("repeated", 0),
        last=max(time_of(event) for event in [start_event, *later_events]),
        last_step=newest["step"],
        spent=_spent_s(start_event, progress),
        spent_until=time_of(newest),
    )


def start_indexes(ledger: Sequence[Record]) -> list[int]:
    """Return the indexes in `ledger` of the events "start" and "resume"; each of them begins a start of the ranks."""
    return [index for index, event in enumerate(ledger) if event["event"] in START_EVENTS]


def _events_of_start(ledger: Sequence[Record], index: int, next_index: int) -> list[Record]:
    """Return the ledger events of one start of the ranks, without the event "start" or "resume" that begins it.

    Each start has a number, its attempt. Events with the number of another attempt are left out: an earlier start that
    was cut off from the network may write them late.

    Args:
        ledger: all events, oldest first.
        index: index in `ledger` of the event that begins this start.
        next_index: index of the event that begins the next start, or the length of `ledger`.
    """
    attempt = ledger[index].get("attempt")
    return [event for event in ledger[index + 1 : next_index] if event.get("attempt", attempt) == attempt]


def _newest_progress(start_event: Record, progress: Sequence[Record]) -> Record:
    """Return the newest event that tells how far one start of the ranks came and how it spent its time.

    It is the newest progress event with the field `spent_s`. If none has the field, it is the newest progress event,
    and if there is none, the start event.

    Args:
        start_event: the event "start" or "resume" of the start.
        progress: the progress events of the start, oldest first; may be empty. An event "storage" may lack `spent_s`.
    """
    with_seconds = [event for event in progress if "spent_s" in event]
    return [start_event, *(with_seconds or progress)][-1]


def _spent_s(start_event: Record, progress: Sequence[Record]) -> Mapping[str, float]:
    """Return the seconds that one start of the ranks (one launch of their processes) spent on each activity.

    The activities are steps, pauses for checkpoints ("stall"), evaluations and so on.

    If a progress event has the field `spent_s`, which counts the seconds by activity since the first step of that
    start, the newest such field is returned. Older ledgers lack the field, and the seconds are then estimated from all
    progress events. "stall" is the sum of the copies of checkpoints (`stall_s`) and of the waits for the previous one
    (`wait_s`) that they record, and "step" is all other time between the start event and the newest progress event. If
    there is no progress event, the result is empty.

    Args:
        start_event: the ledger's event "start" or "resume", written after the setup of the ranks.
        progress: the later events of the same start that record how many steps are done, such as "checkpoint", oldest
            first; may be empty.
    """
    newest = _newest_progress(start_event, progress)
    if "spent_s" in newest:
        return newest["spent_s"]
    if not progress:
        return {}
    stall_s = sum(event.get("stall_s", 0.0) + event.get("wait_s", 0.0) for event in progress)
    steps_s = max(0.0, time_of(newest) - time_of(start_event) - stall_s)
    return {"step": steps_s, "stall": stall_s}


def seconds_per_step(starts: Sequence[RunStart]) -> float:
    """Return the mean seconds of a step over all steps of all starts; 0 before the first step.

    Compilation in the first step of a start, waiting for rows, checkpoints and evaluations are not included.

    Args:
        starts: the starts of a run's ranks, see `starts_of`.
    """
    num_steps = sum(start.num_steps for start in starts)
    if num_steps == 0:
        return 0.0
    return sum(start.steps_s for start in starts) / num_steps


def time_of(event: Record) -> float:
    """Return the time at which a ledger event or a job record was written, in Unix seconds."""
    return datetime.fromisoformat(event["time"]).timestamp()
