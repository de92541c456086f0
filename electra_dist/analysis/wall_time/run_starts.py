"""Read the starts of a run (first and restarts) from its ledger: begin, end, steps, and what took the time.

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

START_EVENTS = ("start", "resume")  # names of the events that record a start of the run
_PROGRESS_EVENTS = ("checkpoint", "stop", "storage", "done", "crash", "unhealthy")  # `step`: steps done


@dataclass(frozen=True)
class RunStart:
    """One start of a run (first or restart), from the launch of its processes to their end. Times are Unix seconds."""

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
        """Return how many optimizer steps this start made until its times (`spent`) were last recorded."""
        return max(0, self.last_step - self.first_step)

    @property
    def compile_s(self) -> float:
        """Return how much longer the first step was than the mean of the others; 0 with fewer than two steps."""
        num_other_steps = self.num_steps - 1
        if num_other_steps <= 0:
            return 0.0
        first_step_s = self.spent.get("first", 0.0)
        mean_other_step_s = self.spent.get("step", 0.0) / num_other_steps
        return max(0.0, first_step_s - mean_other_step_s)

    @property
    def steps_s(self) -> float:
        """Return the seconds of all steps, without compilation and without waiting for rows."""
        all_steps_s = self.spent.get("first", 0.0) + self.spent.get("step", 0.0)
        data_s = self.spent.get("data", 0.0)
        return max(0.0, all_steps_s - data_s - self.compile_s)


def starts_of(ledger: Sequence[Record]) -> list[RunStart]:
    """Return every start of the run, the first and the restarts, that the ledger records, oldest first."""
    bounds = [*start_indexes(ledger), len(ledger)]  # of the events of each start
    return [
        _run_start(ledger[index], _events_of_start(ledger, index, next_index))
        for index, next_index in itertools.pairwise(bounds)
    ]


def _run_start(start_event: Record, later_events: Sequence[Record]) -> RunStart:
    """Summarise the events of one start of the run. Its processes began `setup_s` seconds before `start_event`."""
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
    """Return the indexes in `ledger` of the events "start" and "resume", with which each start of the run begins."""
    return [index for index, event in enumerate(ledger) if event["event"] in START_EVENTS]


def _events_of_start(ledger: Sequence[Record], index: int, next_index: int) -> list[Record]:
    """Return the later events of the start at `index`; late events that carry another start's number are left out."""
    attempt = ledger[index].get("attempt")
    return [event for event in ledger[index + 1 : next_index] if event.get("attempt", attempt) == attempt]


def _newest_progress(start_event: Record, progress: Sequence[Record]) -> Record:
    with_seconds = [event for event in progress if "spent_s" in event]
    return [start_event, *(with_seconds or progress)][-1]


def _spent_s(start_event: Record, progress: Sequence[Record]) -> Mapping[str, float]:
    """Return activity -> seconds of a start: its newest `spent_s`, or an estimate if an older ledger has none."""
    newest = _newest_progress(start_event, progress)
    if "spent_s" in newest:
        return newest["spent_s"]
    if not progress:
        return {}
    stall_s = sum(event.get("stall_s", 0.0) + event.get("wait_s", 0.0) for event in progress)
    steps_s = max(0.0, time_of(newest) - time_of(start_event) - stall_s)
    return {"step": steps_s, "stall": stall_s}


def seconds_per_step(starts: Sequence[RunStart]) -> float:
    """Return the mean seconds of a step over all starts, without compiling and data waits; 0 before the first step."""
    num_steps = sum(start.num_steps for start in starts)
    if num_steps == 0:
        return 0.0
    return sum(start.steps_s for start in starts) / num_steps


def time_of(event: Record) -> float:
    """Return the time at which a ledger event or a job record was written, in Unix seconds."""
    return datetime.fromisoformat(event["time"]).timestamp()
