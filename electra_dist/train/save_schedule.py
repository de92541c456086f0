"""Decide after which steps a checkpoint is saved. All ranks decide alike; the schedule changes no result of a run."""

from __future__ import annotations

from pathlib import Path

from electra_dist.analysis.optimal_save_interval import automatic_steps
from electra_dist.collectives import from_rank_0
from electra_dist.config import CheckpointConfig
from electra_dist.run.ledger import read_ledger


class SaveSchedule:
    """The steps after which a run saves a checkpoint.

    With a number in `checkpoint.every_steps` they are its multiples. With `auto` the next save comes an interval after
    the last one; rank 0 computes the interval again after each save, from the costs and failures in the run's ledger.
    The steps of `checkpoint.keep_every_steps` and `checkpoint.keep_steps` are always saved.
    """

    def __init__(self, config: CheckpointConfig, run_dir: str | Path, step: int) -> None:
        """Begin the schedule at a start of the run. Collective for `every_steps: auto`.

        Args:
            config: gives the interval and the steps that are always saved.
            run_dir: folder of the run, which holds the ledger.
            step: optimizer steps done so far; the automatic interval counts from it.
        """
        self._config = config
        self._run_dir = Path(run_dir)
        self.every_steps = 0  # steps between checkpoints at present; set by `saved`
        self.saved(step)  # the checkpoint that the run starts from

    def saved(self, step: int) -> bool:
        """Record that a checkpoint is saved at `step`; with `every_steps: auto`, compute the interval again.

        Collective for `auto`; all ranks get the interval of rank 0.

        Returns:
            Whether the interval has changed.
        """
        previous = self.every_steps
        if self._config.every_steps == "auto":
            self.every_steps = from_rank_0(lambda: automatic_steps(read_ledger(self._run_dir)))
        else:
            self.every_steps = self._config.every_steps
        self._last_saved = step
        return self.every_steps != previous

    def due(self, step: int) -> bool:
        """Return whether to save a checkpoint now that `step` optimizer steps are done.

        A fixed interval is counted from step 0, an automatic one from the last save. Nothing changes until `saved`.
        """
        keep_every_steps = self._config.keep_every_steps
        if keep_every_steps and step % keep_every_steps == 0:
            return True
        if step in self._config.keep_steps:
            return True
        if self._config.every_steps == "auto":
            return step >= self._last_saved + self.every_steps
        return step % self.every_steps == 0
