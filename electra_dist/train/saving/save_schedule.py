"""Decide after which steps a checkpoint is saved. All ranks decide alike; the schedule changes no result of a run.

The interval of `checkpoint.every_steps: auto` follows the formula of Young (1974) and Daly (2006), from the run's own
ledger. A save pauses training (the stall), and an interruption loses half an interval of work on average. The two
together lose the least time at the interval sqrt(2 x stall x time between interruptions). The stall is the median over
the newest checkpoints; it includes the wait for the previous save. If a slow store needs longer for a save than the
interval, the stall therefore grows, and with it the interval.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from electra_dist.collectives import from_rank_0
from electra_dist.config import CheckpointConfig
from electra_dist.run.history import seconds_per_step, starts
from electra_dist.run.ledger import LedgerEvent, read_ledger

_PRIOR_S = 24 * 3600.0  # first guess of the time between interruptions; it counts as one interruption
_FIRST_STEPS = 100  # interval before the first save of a run has been measured
_LEAST_STEPS = 10
_MOST_S = 3600.0  # at most an hour of work is at risk, however rare interruptions are
_NEWEST_STALLS = 20  # checkpoints whose median stall counts


class SaveSchedule:
    """The steps after which a run saves a checkpoint.

    If `checkpoint.every_steps` is a number, a save comes at each multiple of it. If it is "auto", a save comes one
    interval after the last save, and rank 0 computes the interval again after each save, from the cost of a save and
    the interruptions in the run's ledger. The steps of `checkpoint.keep_every_steps` and `checkpoint.keep_steps` are
    always saved.
    """

    def __init__(self, config: CheckpointConfig, run_dir: str | Path, step: int) -> None:
        """Begin the schedule after step `step`, at which the run starts. Collective if `every_steps` is "auto"."""
        self._config = config
        self._run_dir = Path(run_dir)
        self.every_steps = 0  # steps between checkpoints at present; set by `saved`
        self.saved(step)  # the checkpoint that the run starts from

    def saved(self, step: int) -> bool:
        """Record a save after `step` steps; return whether the interval has changed. Collective for "auto"."""
        previous = self.every_steps
        if self._config.every_steps == "auto":
            self.every_steps = from_rank_0(lambda: automatic_steps(read_ledger(self._run_dir)))
        else:
            self.every_steps = self._config.every_steps
        self._last_saved = step
        return self.every_steps != previous

    def next_due(self, step: int) -> int:
        """Return the first step after `step` with a save; it may lie beyond the last step of the run."""
        keep_every_steps = self._config.keep_every_steps
        due_steps = [kept_step for kept_step in self._config.keep_steps if kept_step > step]
        if keep_every_steps:
            due_steps.append(_next_multiple(keep_every_steps, step))
        if self._config.every_steps == "auto":
            due_steps.append(max(step + 1, self._last_saved + self.every_steps))
        else:
            due_steps.append(_next_multiple(self.every_steps, step))
        return min(due_steps)

    def due(self, step: int) -> bool:
        """Return whether to save a checkpoint now that `step` optimizer steps are done.

        A fixed interval is counted from step 0, an automatic one from the last save.
        """
        keep_every_steps = self._config.keep_every_steps
        if keep_every_steps and step % keep_every_steps == 0:
            return True
        if step in self._config.keep_steps:
            return True
        if self._config.every_steps == "auto":
            return step >= self._last_saved + self.every_steps
        return step % self.every_steps == 0


def _next_multiple(interval: int, step: int) -> int:
    return (step // interval + 1) * interval


def automatic_steps(ledger: Sequence[LedgerEvent]) -> int:
    """Return the steps between checkpoints for `every_steps: auto`: first 100, then 10 or more, at most an hour."""
    stall_s = measured_stall_s(ledger)
    step_s = seconds_per_step(starts(ledger))
    if stall_s is None or step_s <= 0:
        return _FIRST_STEPS
    return young_daly_steps(
        stall_s=stall_s,
        interruption_s=mean_time_between_interruptions_s(ledger),
        step_s=step_s,
        least=_LEAST_STEPS,
        most=max(_LEAST_STEPS, round(_MOST_S / step_s)),
    )


def interruptions(ledger: Sequence[LedgerEvent]) -> int:
    """Return how often a run started again after a crash, an unhealthy node, or a kill (no end is recorded then)."""
    return sum(start.ended_by in ("crash", "unhealthy", None) for start in starts(ledger)[:-1])


def mean_time_between_interruptions_s(ledger: Sequence[LedgerEvent]) -> float:
    """Estimate the time between interruptions as (running seconds + 1 day) / (interruptions + 1): one day at first."""
    # A wall clock that was set back lets a start end before it began.
    running_s = sum(max(0.0, start.last - start.began) for start in starts(ledger))
    num_interruptions = interruptions(ledger) + 1
    return (running_s + _PRIOR_S) / num_interruptions


def measured_stall_s(ledger: Sequence[LedgerEvent]) -> float | None:
    """Return the median seconds for which the newest 20 checkpoints stopped training; None before the first one."""
    checkpoints = [event for event in ledger if event.event == "checkpoint"]
    if not checkpoints:
        return None
    newest = checkpoints[-_NEWEST_STALLS:]
    return statistics.median(event.stall_s + event.wait_s for event in newest)


def young_daly_steps(stall_s: float, interruption_s: float, step_s: float, least: int, most: int) -> int:
    """Return the steps between checkpoints by Young's formula, in [least, most]; `most` if `step_s` is not above 0."""
    if step_s <= 0:
        return most
    interval_s = math.sqrt(2.0 * stall_s * interruption_s)
    return max(least, min(most, round(interval_s / step_s)))
