"""Choose the interval between checkpoints by the formula of Young and Daly, from the run's own ledger.

A save stalls the loop, and an interruption loses half an interval on average. The interval
sqrt(2 x stall x time between interruptions) loses the least time. Both quantities are measured in the run itself: the
stall is the median over its newest checkpoints, and interruptions are counted over all its jobs. The stall includes
waits for a slow store, so that an interval shorter than the time of a save grows automatically.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from electra_dist.analysis.goodput import STARTS, seconds_per_step, starts_of
from electra_dist.run.jsonl import Record

_PRIOR_S = 24 * 3600.0  # first guess of the time between interruptions; it counts as one interruption
_FIRST_STEPS = 100  # interval before the first save of a run has been measured
_LEAST_STEPS = 10
_MOST_S = 3600.0  # at most an hour of work is at risk, however rare interruptions are
_NEWEST_STALLS = 20  # checkpoints whose median stall counts
_UNKNOWN_END = "none"  # a start whose end the ledger does not record (yet)


def automatic_steps(ledger: Sequence[Record]) -> int:
    """Return the number of steps between checkpoints that `checkpoint.every_steps: auto` stands for.

    It loses the least time to saves and interruptions, by the formula of Young and Daly with the times that this run
    has measured. The result lies between 10 steps and as many as take an hour. It is 100 until a save has been
    measured.

    Args:
        ledger: events of ledger.jsonl, oldest first.
    """
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
    """Return how often a run was interrupted and started again: after crashes, kills and unhealthy nodes.

    Stops on request and rollbacks are not counted. A start without any recorded end counts as killed.

    Args:
        ledger: events of ledger.jsonl, oldest first.
    """
    num_interruptions = 0
    previous_end: str | None = None  # how the previous start ended; None before the first start
    for event in ledger:
        if event["event"] in STARTS:
            if previous_end in ("crash", "unhealthy", _UNKNOWN_END):
                num_interruptions += 1
            previous_end = _UNKNOWN_END  # until an event records the end of this start
        elif event["event"] in ("stop", "done", "crash", "unhealthy", "rollback"):
            previous_end = event["event"]
    return num_interruptions


def mean_time_between_interruptions_s(ledger: Sequence[Record]) -> float:
    """Return the mean seconds for which the run ran between two interruptions (crashes, kills, unhealthy nodes).

    One day and one interruption are added as a first guess, so that the result is defined before the first real one.

    Args:
        ledger: events of ledger.jsonl, oldest first.
    """
    running_s = sum(start.last - start.began for start in starts_of(ledger))
    num_interruptions = interruptions(ledger) + 1
    return (running_s + _PRIOR_S) / num_interruptions


def measured_stall_s(ledger: Sequence[Record]) -> float | None:
    """Return the median seconds for which the newest 20 checkpoints stopped training; None before the first one.

    A checkpoint stops training while the state is copied (`stall_s`), and while the previous save is still being
    written (`wait_s`).

    Args:
        ledger: events of ledger.jsonl, oldest first.
    """
    checkpoints = [event for event in ledger if event["event"] == "checkpoint"]
    if not checkpoints:
        return None
    newest = checkpoints[-_NEWEST_STALLS:]
    return statistics.median(event.get("stall_s", 0.0) + event.get("wait_s", 0.0) for event in newest)


def young_daly_steps(stall_s: float, interruption_s: float, step_s: float, least: int, most: int) -> int:
    """Return the steps between checkpoints that lose the least time: sqrt(2 x stall x time between interruptions).

    Longer intervals lose more work at an interruption (half an interval on average), shorter ones stop training more
    often. Source: Young 1974, Daly 2006, first order.

    Args:
        stall_s: seconds for which one save stops training.
        interruption_s: mean seconds between interruptions.
        step_s: seconds of a step; if it is not positive, `most` is returned.
        least: lower limit in steps; also guards against a stall measured as 0.
        most: upper limit in steps.
    """
    if step_s <= 0:
        return most
    interval_s = math.sqrt(2.0 * stall_s * interruption_s)
    return max(least, min(most, round(interval_s / step_s)))
