"""The guard: which steps are not worth an update, and when the run must go back.

Guarantee: a step whose loss or gradient norm is not finite, or whose loss is a spike, is stopped before the optimizer,
on all ranks alike (they judge the same all-reduced numbers). A stopped step is written down in the run folder before
the run goes on, and is from then on a skipped step: its rows are not used and nothing is updated. So a run that the
guard stopped equals, bit for bit, a run that was told to skip these steps from the start (`train.skip_steps`).

After `max_in_a_row` stopped steps in a row the run goes back to a checkpoint and skips `skip_before` steps before the
first of them as well: a state that has gone bad is left behind, and so are the rows that drove it there. (Going back
without skipping more would only repeat what happened: steps are exact.)

A spike: more than `spike_sigma` standard deviations above the mean loss of the last `window` accepted steps; nothing
is judged before the window is full. The window is part of a checkpoint.

Where it stops: one bad update that does not show in its own loss is seen when it shows.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from electra_dist.config import GuardConfig

_FLAT = 1e-3  # of the mean: least standard deviation, so that a flat curve makes no spike of its noise


class Guard:
    """Judges the loss of each step. Pure but for its window."""

    def __init__(self, config: GuardConfig, recent_losses: Iterable[float] = ()) -> None:
        self._config = config
        self._losses = deque(recent_losses, maxlen=config.window)

    @property
    def recent_losses(self) -> tuple[float, ...]:
        """The window, oldest first."""
        return tuple(self._losses)

    def fault(self, loss: float) -> str:
        """What is wrong with a step of this loss; empty if nothing is."""
        if not math.isfinite(loss):
            return f"loss is {loss}"
        if self._config.spike_sigma and len(self._losses) == self._config.window:
            mean = float(np.mean(self._losses))
            sigma = max(float(np.std(self._losses)), _FLAT * abs(mean))
            height = (loss - mean) / sigma
            if height > self._config.spike_sigma:
                return (
                    f"loss {loss:.4f} is {height:.1f} sigma above {mean:.4f}, the mean of the last {len(self._losses)}"
                )
        return ""

    def accept(self, loss: float) -> None:
        """Take the loss of an updated step into the window."""
        self._losses.append(loss)


def first_to_skip(first_stopped: int, skip_before: int, checkpoints: Sequence[int]) -> int:
    """Where the steps that a rollback skips begin, given the steps of the checkpoints there are.

    It is `skip_before` steps before the first stopped one, if a checkpoint is old enough to go back to; else the
    oldest checkpoint that is not younger than the trouble, so that a short memory does not cost the whole run.
    """
    wanted = max(0, first_stopped - skip_before)
    usable = [step for step in checkpoints if step <= first_stopped]
    if not usable or min(usable) <= wanted:
        return wanted
    return min(usable)
