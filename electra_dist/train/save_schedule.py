"""When the next checkpoint is due. All ranks agree; what is computed does not depend on it."""

from __future__ import annotations

from pathlib import Path

from electra_dist.analysis.save_interval import automatic_steps
from electra_dist.collectives import from_rank_0
from electra_dist.config import CheckpointConfig
from electra_dist.run.ledger import read_ledger


class SaveSchedule:
    """`checkpoint.every_steps` as it stands, or for `auto` the interval that the run's own ledger says is best, looked
    up again after each save. Steps that are to be kept for ever are always saved."""

    def __init__(self, config: CheckpointConfig, run_dir: str | Path, step: int) -> None:
        """Collective for `auto`.

        Args:
            step: steps done.
        """
        self._config, self._run_dir = config, Path(run_dir)
        self.every_steps = 0
        self.saved(step)

    def saved(self, step: int) -> bool:
        """There is a save at `step`: plan the next. Collective for `auto`. True if the interval has changed."""
        before = self.every_steps
        self.every_steps = self._automatic() if self._config.every_steps == "auto" else self._config.every_steps
        self._last = step
        return self.every_steps != before

    def due(self, step: int) -> bool:
        """Whether `step`, just done, is to be saved."""
        kept = self._config.keep_every_steps
        if (kept and step % kept == 0) or step in self._config.keep_steps:
            return True
        if self._config.every_steps == "auto":
            return step >= self._last + self.every_steps
        return step % self.every_steps == 0

    def _automatic(self) -> int:
        return from_rank_0(lambda: automatic_steps(read_ledger(self._run_dir)))
