"""Choose the interval between checkpoints by the formula of Young (1974) and Daly (2006), from the run's own ledger.

A save pauses training (the stall), and an interruption loses half an interval of work on average. The two together
lose the least time at the interval sqrt(2 x stall x time between interruptions). The stall is the median over the
newest checkpoints; it includes the wait for the previous save. If a slow store needs longer for a save than the
interval, the stall therefore grows, and with it the interval.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from electra_dist.analysis.wall_time.run_starts import START_EVENTS, seconds_per_step, starts_of
from electra_dist.run.jsonl import Record

_PRIOR_S = 24 * 3600.0  # first guess of the time between interruptions; it counts as one interruption
_FIRST_STEPS = 100  # interval before the first save of a run has been measured
_LEAST_STEPS = 10
_MOST_S = 3600.0  # at most an hour of work is at risk, however rare interruptions are
_NEWEST_STALLS = 20  # checkpoints whose median stall counts
_UNKNOWN_END = "none"  # a start whose end the ledger does not record (yet)


def automatic_steps(ledger: Sequence[Record]) -> int:
    """Return the steps between checkpoints for `every_steps: auto`: first 100, then 10 or more, at most an hour."""
    stall_s = measured_stall_s(ledger)
    step_s = seconds_per_step(starts_of(ledger))
    if stall_s is None or step_s <= 0:
        return _FIRST_STEPS
    return young_daly_steps(
        stall_s=stall_s,
        interruption_s=mean_time_between_interruptions_s(ledger),
        step_s=step_s,
        least=_LEAST_STEPS,
        most=max(_LEAST_STEPS, round(_MOST_S / step_s)),
    )


def interruptions(ledger: Sequence[Record]) -> int:
    """Return how often a run started again after a crash, an unhealthy node, or a kill (no end is recorded then)."""
    num_interruptions = 0
    previous_end: str | None = None  # how the previous start ended; None before the first start
    for event in ledger:
        if event["event"] in START_EVENTS:
            if previous_end in ("crash", "unhealthy", _UNKNOWN_END):
                num_interruptions += 1
            previous_end = _UNKNOWN_END  # until an event records the end of this start
        elif event["event"] in ("stop", "storage", "done", "crash", "unhealthy", "rollback"):
            previous_end = event["event"]
    return num_interruptions


def mean_time_between_interruptions_s(ledger: Sequence[Record]) -> float:
    """Estimate the time between interruptions as (running seconds + 1 day) / (interruptions + 1): one day at first."""
    # A wall clock that was set back lets a start end before it began.
    running_s = sum(max(0.0, start.last - start.began) for start in starts_of(ledger))
    num_interruptions = interruptions(ledger) + 1
    return (running_s + _PRIOR_S) / num_interruptions


def measured_stall_s(ledger: Sequence[Record]) -> float | None:
    """Return the median seconds for which the newest 20 checkpoints stopped training; None before the first one."""
    checkpoints = [event for event in ledger if event["event"] == "checkpoint"]
    if not checkpoints:
        return None
    newest = checkpoints[-_NEWEST_STALLS:]
    return statistics.median(event.get("stall_s", 0.0) + event.get("wait_s", 0.0) for event in newest)


def young_daly_steps(stall_s: float, interruption_s: float, step_s: float, least: int, most: int) -> int:
    """Return the steps between checkpoints by Young's formula, in [least, most]; `most` if `step_s` is not above 0."""
    if step_s <= 0:
        return most
    interval_s = math.sqrt(2.0 * stall_s * interruption_s)
    return max(least, min(most, round(interval_s / step_s)))
