"""Keep the list of the steps that a run skips in the run folder, so that a restart skips the same ones.

A skipped step uses none of its rows and updates nothing. Steps are skipped because the config lists them
(`train.skip_steps`), because the guard (loss_guard.py) has prevented their update for a bad loss ("stopped" steps), or
because a rollback (the return to an earlier checkpoint after several stopped steps in a row) discards them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from electra_dist.errors import UserError
from electra_dist.run.folder import SKIPPED_STEPS_FILE
from electra_dist.run.records import Count
from electra_dist.store.atomic_files import replacing
from electra_dist.store.json_file import read_document
from electra_dist.store.patience import Patience, waiting


@dataclass(frozen=True)
class _Stored:
    """Content of skipped_steps.json in the run folder."""

    steps: list[Count]  # skipped because of a bad loss
    rollbacks: Count  # returns to an earlier checkpoint so far
    streak: list[Count]  # the newest stopped steps that follow one another without a gap


class SkipList:
    """The steps that a run skips. All ranks make the same changes to their copies; rank 0 writes the file."""

    def __init__(self, run_dir: Path, configured: Iterable[int], patience: Patience | None = None) -> None:
        """Read the file, if there is one; `write` waits for the disk with `patience` (None: not at all)."""
        self._patience = patience
        self._file = run_dir / SKIPPED_STEPS_FILE
        self.steps = set(configured)
        self.rollbacks = 0  # of the run so far
        self.streak: list[int] = []  # the newest stopped steps that follow one another without a gap
        self.stopped: set[int] = set()  # the part of `steps` that the guard has stopped or a rollback has discarded
        if self._file.exists():
            self._read()
            self.steps |= self.stopped

    def _read(self) -> None:
        next_step = "restore it from the events stopped_step and rollback in ledger.jsonl"
        stored = read_document(self._file, _Stored, next_step)
        first = stored.streak[0] if stored.streak else 0
        is_in_a_row = stored.streak == list(range(first, first + len(stored.streak)))
        if not is_in_a_row or not set(stored.streak) <= set(stored.steps):
            raise UserError(f"{self._file}: damaged, because `streak` is no sequence of skipped steps; {next_step}")
        self.stopped = set(stored.steps)
        self.rollbacks = stored.rollbacks
        self.streak = stored.streak

    def stop(self, step: int) -> None:
        """Add a step that the guard has stopped to the list; begin a new `streak` if the step before was not stopped.

        Every rank calls this at the same step; rank 0 calls `write` afterwards.
        """
        is_in_a_row = bool(self.streak) and self.streak[-1] == step - 1
        if is_in_a_row:
            self.streak = [*self.streak, step]
        else:
            self.streak = [step]
        self._skip([step])

    def reaches(self, max_in_a_row: int) -> bool:
        """Return whether `max_in_a_row` or more steps in a row were stopped, so that the run must go back.

        The file keeps these steps, so the answer is the same after a restart, until `roll_back` is called.
        """
        return len(self.streak) >= max_in_a_row

    def roll_back(self, first: int) -> None:
        """Count a return to a checkpoint, skip the steps from `first` to the last of `streak`, and empty `streak`.

        Every rank calls this; rank 0 calls `write` afterwards.
        """
        last = self.streak[-1]
        self._skip(range(first, last + 1))
        self.streak = []
        self.rollbacks += 1

    def _skip(self, steps: Iterable[int]) -> None:
        """Add steps that are skipped for a bad loss. Only such steps are written to the run folder."""
        self.stopped |= set(steps)
        self.steps |= self.stopped

    def write(self) -> None:
        """Write this list, without the steps of `train.skip_steps`, to skipped_steps.json. Call it on rank 0 only."""
        tree = {"steps": sorted(self.stopped), "rollbacks": self.rollbacks, "streak": self.streak}

        def write() -> None:
            with replacing(self._file) as file:
                file.write(json.dumps(tree).encode() + b"\n")

        waiting(self._patience, write)

    def below(self, step: int) -> tuple[int, ...]:
        """Return the skipped steps before `step`, ascending, for the checkpoint of `step` to record.

        A later start loads that checkpoint only if it skips the same steps before `step`.
        """
        return tuple(sorted(skipped for skipped in self.steps if skipped < step))
