"""Decide after which steps a checkpoint is saved. All ranks decide alike; the schedule changes no result of a run."""

from __future__ import annotations

from pathlib import Path

from electra_dist.analysis.optimal_save_interval import automatic_steps
from electra_dist.collectives import from_rank_0
from electra_dist.config import CheckpointConfig
from electra_dist.run.ledger import read_ledger


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
