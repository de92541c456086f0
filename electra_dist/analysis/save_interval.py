"""How often to save: Young and Daly's interval from what the ledger has measured.

A save stalls the loop, an interruption loses half an interval: sqrt(2 x stall x time between interruptions) loses the
least. Both are the run's own: the stall is the median of its newest checkpoints (with waits for a slow store, so that
an interval shorter than a save takes lengthens by itself), interruptions are counted over all its jobs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from electra_dist.analysis.goodput import STARTS, seconds_per_step, starts_of
from electra_dist.run.jsonl import Record

_PRIOR_S = 24 * 3600.0  # a first guess of the time between interruptions, worth one interruption
_FIRST_STEPS = 100  # before the first save of a run has been measured
_LEAST_STEPS = 10
_MOST_S = 3600.0  # nobody wants to lose more than an hour, however seldom it happens


def automatic_steps(ledger: Sequence[Record]) -> int:
    """Steps between checkpoints for `checkpoint.every_steps: auto`, from 10 steps to an hour of them."""
    stall_s, step_s = measured_stall_s(ledger), seconds_per_step(starts_of(ledger))
    if stall_s is None or step_s <= 0:
        return _FIRST_STEPS
    most = max(_LEAST_STEPS, round(_MOST_S / step_s))
    return young_daly_steps(stall_s, mean_time_between_interruptions_s(ledger), step_s, _LEAST_STEPS, most)


def interruptions(ledger: Sequence[Record]) -> int:
    """Starts that came after an end without a save: crashes, kills, dead nodes; no stops, no rollbacks."""
    count, ending = 0, ""
    for event in ledger:
        if event["event"] in STARTS:
            count += ending in ("crash", "unhealthy", "none")
            ending = "none"
        elif event["event"] in ("stop", "done", "crash", "unhealthy", "rollback"):
            ending = event["event"]
    return count


def mean_time_between_interruptions_s(ledger: Sequence[Record]) -> float:
    """Seconds of running per interruption, begun with a guess of a day that counts as one."""
    running = sum(start.last - start.began for start in starts_of(ledger))
    return (running + _PRIOR_S) / (interruptions(ledger) + 1)


def measured_stall_s(ledger: Sequence[Record]) -> float | None:
    """Median seconds that the newest 20 checkpoints held the loop up; None before the first."""
    stalls = [e.get("stall_s", 0.0) + e.get("wait_s", 0.0) for e in ledger if e["event"] == "checkpoint"]
    return statistics.median(stalls[-20:]) if stalls else None


def young_daly_steps(stall_s: float, interruption_s: float, step_s: float, least: int, most: int) -> int:
    """Steps between checkpoints that lose the least: a save every sqrt(2 x stall x time between interruptions).

    Young 1974, Daly 2006, first order. Clamped to [least, most]; `least` also guards a stall measured as nothing.
    """
    if step_s <= 0:
        return most
    return max(least, min(most, round(math.sqrt(2.0 * stall_s * interruption_s) / step_s)))
