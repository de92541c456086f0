"""Decide which steps do not update the weights ("the guard"), and which steps a rollback to a checkpoint skips.

Guarantee: a step whose loss is a spike or not finite is stopped before the optimizer, on all ranks alike, because they
judge the same all-reduced numbers. (`train/step.py` does the same for a gradient norm that is not finite.) A run in
which the guard has stopped steps gives the same bits as a run whose `train.skip_steps` lists these steps and those
that a rollback skips.

A spike is a loss of more than `spike_sigma` standard deviations above the mean loss of the last `window` accepted
steps; no spike is detected before the window is full. A checkpoint contains the losses in the window.

After `max_in_a_row` stopped steps in a row the run goes back to a checkpoint (a rollback, `train/stopped_steps.py`).
It then skips these steps and `skip_before` steps before them. Repeated steps compute exactly the same, so going back
without skipping earlier steps would repeat the fault.

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
    """Compares each step's loss with recent accepted losses, and names the steps that must not update the weights.

    Decisions depend on the config and the accepted losses only, so the guards of all ranks decide alike. Call `fault`
    before an update and `accept` after it.
    """

    def __init__(self, config: GuardConfig, recent_losses: Iterable[float] = ()) -> None:
        """Take the recent losses from a checkpoint, the oldest first; none for a new run."""
        self._config = config
        self._losses = deque(recent_losses, maxlen=config.window)

    @property
    def recent_losses(self) -> tuple[float, ...]:
        """The accepted losses that a new loss is compared with, at most `guard.window`, the oldest first."""
        return tuple(self._losses)

    def fault(self, loss: float) -> str:
        """Return why a step with this loss must not update the weights; "" if the update is allowed.

        `loss` is that of the global batch. With `guard.spike_sigma: 0` only a loss that is not finite is a fault.
        """
        if not math.isfinite(loss):
            return f"loss is {loss}"
        is_window_full = len(self._losses) == self._config.window
        if not is_window_full or self._config.spike_sigma == 0:
            return ""
        mean = float(np.mean(self._losses))
        sigma = max(float(np.std(self._losses)), _LEAST_SIGMA * abs(mean))
        if sigma == 0:  # all losses were 0, so there is no scale to measure a spike by
            return ""
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
    """Return the step at which a rollback begins to skip: `skip_before` steps before the first stopped step."""
    return max(0, first_stopped - skip_before)
