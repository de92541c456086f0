"""Decide which steps do not update the weights ("the guard") and which a run skips, and keep the list in a file.

Guarantee: a step whose loss is a spike or not finite is stopped before the optimizer, on all ranks alike, because they
judge the same all-reduced numbers. (`train/step.py` does the same for a gradient norm that is not finite.) A run in
which the guard has stopped steps gives the same bits as a run whose `train.skip_steps` lists these steps and those
that a rollback skips. A restart skips the same steps.

A spike is a loss of more than `spike_sigma` standard deviations above the mean loss of the last `window` accepted
steps; no spike is detected before the window is full. A checkpoint contains the losses in the window.

A skipped step uses none of its rows and updates nothing. Steps are skipped because the config lists them, because the
guard has stopped them, or because of a rollback: after `max_in_a_row` stopped steps in a row the run goes back to a
checkpoint, and skips these steps and `skip_before` steps before them. Repeated steps compute exactly the same, so
going back without skipping earlier steps would repeat the fault. What is skipped follows from the config and the
stopped steps alone, never from the checkpoints that there happen to be.

Limits: an update that damages the weights, although the loss of its step was normal, is noticed only by a later loss.
This module must not import torch, because `electra-dist verify` reads the list without it.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from electra_dist.config import Config, GuardConfig
from electra_dist.errors import UserError
from electra_dist.run.folder import SKIPPED_STEPS_FILE
from electra_dist.run.records import Count
from electra_dist.store.atomic_files import replacing
from electra_dist.store.json_file import read_document
from electra_dist.store.patience import Patience, waits

_LEAST_SIGMA = 1e-3  # as a fraction of the mean, so that on a flat curve ordinary noise is no spike
_NEXT_STEP = "restore it from the events stopped_step and rollback in ledger.jsonl"


class Guard:
    """Compares each step's loss with recent accepted losses, and names the steps that must not update the weights.

    Decisions depend on the config and the accepted losses only, so the guards of all ranks decide alike. Call `fault`
    before an update and `accept` after it.
    """

    def __init__(self, config: GuardConfig, recent_losses: Iterable[float] = ()) -> None:
        """Begin with the recent losses that a checkpoint holds, the oldest first; with none in a new run."""
        self._config = config
        self._losses = deque(recent_losses, maxlen=config.window)

    @property
    def recent_losses(self) -> tuple[float, ...]:
        """Return the accepted losses that a new loss is compared with, at most `guard.window`, the oldest first."""
        return tuple(self._losses)

    def fault(self, loss: float) -> str:
        """Return why a step with this loss must not update the weights, or "" if the update is allowed.

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


@dataclass(frozen=True)
class _Stored:
    """Content of skipped_steps.json in the run folder."""

    steps: list[Count]  # skipped because of a bad loss
    rollbacks: Count  # returns to an earlier checkpoint so far
    streak: list[Count]  # the newest stopped steps that follow one another without a gap


class SkipList:
    """The steps that a run skips, on every rank; rank 0 keeps them in skipped_steps.json.

    All ranks call the same methods in the same order, except `write`.
    """

    def __init__(self, run_dir: Path, configured: Iterable[int], patience: Patience | None = None) -> None:
        """Read the skipped steps that an earlier start has recorded, and add those of the config, `configured`.

        If the disk is full or does not respond, `write` waits for it as long as `patience` says; None: not at all.
        """
        self.patience = patience
        self._file = run_dir / SKIPPED_STEPS_FILE
        self.steps = set(configured)
        self.rollbacks = 0  # of the run so far
        self.streak: list[int] = []  # the newest stopped steps that follow one another without a gap
        self.stopped: set[int] = set()  # the part of `steps` that the guard has stopped or a rollback has discarded
        if self._file.exists():
            self._read()
            self.steps |= self.stopped

    def _read(self) -> None:
        stored = read_document(self._file, _Stored, _NEXT_STEP)
        first = stored.streak[0] if stored.streak else 0
        is_in_a_row = stored.streak == list(range(first, first + len(stored.streak)))
        if not is_in_a_row or not set(stored.streak) <= set(stored.steps):
            raise UserError(f"{self._file}: damaged, because `streak` is no sequence of skipped steps; {_NEXT_STEP}")
        self.stopped = set(stored.steps)
        self.rollbacks = stored.rollbacks
        self.streak = stored.streak

    def stop(self, step: int) -> None:
        """Add a step that the guard has stopped; `streak` begins anew with it if the step before was not stopped.

        Every rank calls this at the same step; rank 0 calls `write` afterwards.
        """
        is_in_a_row = bool(self.streak) and self.streak[-1] == step - 1
        if is_in_a_row:
            self.streak = [*self.streak, step]
        else:
            self.streak = [step]
        self._skip([step])

    def reaches(self, max_in_a_row: int) -> bool:
        """Return whether the newest `max_in_a_row` or more steps were all stopped, so that the run must go back.

        The file keeps these steps, so the answer is the same after a restart, until `roll_back` is called.
        """
        return len(self.streak) >= max_in_a_row

    def roll_back(self, config: Config) -> tuple[int, list[int]]:
        """Decide a return to a checkpoint: skip the stopped steps in a row, and `guard.skip_before` steps before them.

        Returns (first step to skip, the stopped steps); there must be some. Every rank calls this; rank 0 then reports
        the rollback, and after that calls `write`. Raises UserError if the run has gone back `guard.max_rollbacks`
        times already.
        """
        guard = config.guard
        stopped = self.streak
        last = stopped[-1]
        if self.rollbacks >= guard.max_rollbacks:
            raise UserError(
                f"run {config.run_dir} diverges: step {last:,} after {self.rollbacks} rollbacks was stopped by the "
                f"guard again, and guard.max_rollbacks is {guard.max_rollbacks}; lower optimizer.lr in a new run, "
                f"check the rows that ledger.jsonl names, or raise guard.max_rollbacks"
            )
        first = max(0, stopped[0] - guard.skip_before)
        self._skip(range(first, last + 1))
        self.streak = []
        self.rollbacks += 1
        return first, stopped

    def _skip(self, steps: Iterable[int]) -> None:
        """Add steps to those that the run skips because of a bad loss, which `write` records."""
        self.stopped |= set(steps)
        self.steps |= self.stopped

    @waits
    def write(self) -> None:
        """Write this list, without the steps of `train.skip_steps`, to skipped_steps.json. Call it on rank 0 only."""
        tree = {"steps": sorted(self.stopped), "rollbacks": self.rollbacks, "streak": self.streak}
        with replacing(self._file) as file:
            file.write(json.dumps(tree).encode() + b"\n")

    def below(self, step: int) -> tuple[int, ...]:
        """Return the skipped steps before `step`, ascending, for the checkpoint of `step` to record.

        A later start loads that checkpoint only if it skips the same steps before `step`.
        """
        return tuple(sorted(skipped for skipped in self.steps if skipped < step))
