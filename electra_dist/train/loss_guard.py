"""Decide which steps do not update the weights ("the guard"), and which steps a rollback to a checkpoint skips.

Guarantee: a step whose loss or gradient norm is not finite, or whose loss is a spike, is stopped before the optimizer,
on all ranks alike (they judge the same all-reduced numbers, so they need not exchange the decision). A stopped step is
recorded in the run folder before the run goes on, and is from then on a skipped step: its rows are not used and
nothing is updated. So a run that the guard stopped equals, bit for bit, a run whose config skips these steps from the
start (`train.skip_steps`).

After `max_in_a_row` stopped steps in a row the run goes back to an earlier checkpoint (a rollback). It then skips not
only the stopped steps, but also `skip_before` steps before the first of them. This discards weights that have gone
bad, and the rows that led to them. (Steps are computed exactly alike each time, so going back without skipping more
would only repeat what happened.) Which steps are skipped follows from the config and the stopped steps alone, never
from the checkpoints that happen to exist: the run goes back to the newest one that is not after the first skipped
step, and repeats the steps from there. Retention keeps such a checkpoint.

A spike is a loss of more than `spike_sigma` standard deviations above the mean loss of the last `window` accepted
steps; no spike is detected before the window is full. The window is part of a checkpoint. Where the weight of a loss
is scheduled, unweighted losses are judged (`TrainStep.judged_loss`). At a step where a scheduled value jumps, the step
loop begins with a new guard, whose window is empty, because the loss is another function from there on.

In fp16 a step whose gradients overflow, although its loss is finite, is not stopped by the guard: it lowers the loss
scale (`engine/loss_scale.py`), and counts neither as a stopped step nor as an accepted one. Only at the least loss
scale the guard stops it.

Limits: an update that damages the weights, although the loss of its step was normal, is noticed only by a later loss.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

import numpy as np

from electra_dist.config import GuardConfig

_LEAST_SIGMA = 1e-3  # as a fraction of the mean, so that on a flat curve ordinary noise is no spike


class Guard:
    """Check of each step's loss against recent losses, to find steps that must not update the weights.

    The decisions depend only on the config and on the losses accepted before. So every rank has a guard of its own,
    and all guards decide alike. Call `fault` before an update and `accept` after it.
    """

    def __init__(self, config: GuardConfig, recent_losses: Iterable[float] = ()) -> None:
        """Begin with the losses that a checkpoint records, oldest first, if any."""
        self._config = config
        self._losses = deque(recent_losses, maxlen=config.window)

    @property
    def recent_losses(self) -> tuple[float, ...]:
        """The accepted losses that a new loss is compared with, at most `guard.window`, the oldest first."""
        return tuple(self._losses)

    def fault(self, loss: float) -> str:
        """Return why a step with this loss over the global batch must not update the weights; "" if it may."""
        if not math.isfinite(loss):
            return f"loss is {loss}"
        is_window_full = len(self._losses) == self._config.window
        if not is_window_full or self._config.spike_sigma == 0:
            return ""
        mean = float(np.mean(self._losses))
        sigma = max(float(np.std(self._losses)), _LEAST_SIGMA * abs(mean))
        height = (loss - mean) / sigma
        if height > self._config.spike_sigma:
            return (
                f"loss {loss:.4f} is {height:.1f} sigma above {mean:.4f}, the mean of the last {len(self._losses)} "
                f"accepted steps"
            )
        return ""

    def accept(self, loss: float) -> None:
        """Add the loss of a step that has updated the weights to the recent losses."""
        self._losses.append(loss)


def first_to_skip(first_stopped: int, skip_before: int) -> int:
    """Return the first step to skip after a rollback, `skip_before` steps before the first stopped one."""
    return max(0, first_stopped - skip_before)
