"""The steps that a run skips."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from electra_dist.errors import UserError
from electra_dist.run.folder import SKIPPED_STEPS_FILE
from electra_dist.store.files import replacing


class SkipList:
    """Steps to pass over: what the config says and what the guard stopped, kept in the run folder."""

    def __init__(self, run_dir: Path, configured: Iterable[int]) -> None:
        """Read the run folder's list.

        Raises:
            UserError: the file is damaged.
        """
        self._file = run_dir / SKIPPED_STEPS_FILE
        self.steps = set(configured)
        self.rollbacks = 0
        self.streak: list[int] = []  # the last steps that were stopped in a row
        self._stopped: set[int] = set()
        if self._file.exists():
            try:
                tree = json.loads(self._file.read_text())
                self._stopped, self.rollbacks = {int(s) for s in tree["steps"]}, int(tree["rollbacks"])
                self.streak = [int(s) for s in tree["streak"]]
            except (ValueError, KeyError, TypeError):
                raise UserError(
                    f"{self._file}: not readable; restore it from ledger.jsonl (events stopped_step and rollback)"
                ) from None
            self.steps |= self._stopped

    def stop(self, step: int) -> None:
        """The guard stopped `step`. Every rank calls it; rank 0 calls `write` next."""
        self.streak = [*self.streak, step] if self.streak and self.streak[-1] == step - 1 else [step]
        self._skip([step])

    def roll_back(self, first: int) -> None:
        """Skip everything from `first` to the end of the streak. Every rank calls it; rank 0 calls `write` next."""
        self._skip(range(first, self.streak[-1] + 1))
        self.streak, self.rollbacks = [], self.rollbacks + 1

    def _skip(self, steps: Iterable[int]) -> None:
        self._stopped |= set(steps)
        self.steps |= self._stopped

    def write(self) -> None:
        """Make the list outlive the process. Rank 0 only."""
        tree = {"steps": sorted(self._stopped), "rollbacks": self.rollbacks, "streak": self.streak}
        with replacing(self._file) as file:
            file.write(json.dumps(tree).encode() + b"\n")

    def below(self, step: int) -> tuple[int, ...]:
        """The skipped steps before `step`, ascending."""
        return tuple(sorted(s for s in self.steps if s < step))
