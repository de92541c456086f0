"""Compute which steps of a run use given rows of its corpora.

How: the order in which a run uses rows is a function of its config. `data/order.py` also inverts this function.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from electra_dist.config import Config
from electra_dist.corpus.find.row_search import FoundRows
from electra_dist.data.corpora import Corpora
from electra_dist.run.folder import METRICS_FILE
from electra_dist.run.metrics import parse_metric
from electra_dist.run.records import read_records
from electra_dist.train.guard import SkipList

_BLOCK_ROWS = 1 << 18  # rows whose uses are computed together

UseState = Literal["read", "to come", "skipped"]


class RowUse(NamedTuple):
    """One use of a row by a run: the step whose batch contains the row."""

    epoch: int  # epoch of the corpus in which the step uses the row, from 0
    step: int  # number of the step, from 0
    is_skipped: bool  # whether the run skips the step, so that the row is not trained on
    is_done: bool  # whether the run has already passed the step

    @property
    def state(self) -> UseState:
        """Return whether the step has read the row, is to come or, done or not, is skipped."""
        if self.is_skipped:
            return "skipped"
        return "read" if self.is_done else "to come"


class StepCounter:
    """Counter of the steps of a run that use found rows; a step that uses several found rows counts once."""

    def __init__(self) -> None:
        self._steps: dict[UseState, set[int]] = {"read": set(), "to come": set(), "skipped": set()}

    def add(self, uses: Sequence[RowUse]) -> None:
        """Count the steps that use one found row; a step that was counted for an earlier row is not counted again."""
        for use in uses:
            self._steps[use.state].add(use.step)

    def counts(self) -> dict[str, int]:
        """Return how many steps have read one of the rows (`read`), will read one (`to_come`), or are `skipped`."""
        return {state.replace(" ", "_"): len(steps) for state, steps in self._steps.items()}


def uses_of_found_rows(
    found: FoundRows, num_listed: int, corpora: Corpora, config: Config, run: Path
) -> tuple[list[list[RowUse]], dict[str, int]]:
    """Return the uses of each of the first `num_listed` rows, and counts of the steps that use any found row.

    The uses of a row ascend by step; `StepCounter.counts` names the counts. Rows are processed in blocks to save
    memory.
    """
    listed: list[list[RowUse]] = []
    counter = StepCounter()
    for start in range(0, len(found.rows), _BLOCK_ROWS):
        block = slice(start, start + _BLOCK_ROWS)
        uses = uses_of_rows(found.shards[block], found.rows[block], corpora, config, run)
        for uses_of_row in uses:
            counter.add(uses_of_row)
        listed += uses[: max(0, num_listed - start)]
    return listed, counter.counts()


def uses_of_rows(
    shards: NDArray[np.int64], rows: NDArray[np.int64], corpora: Corpora, config: Config, run: Path
) -> list[list[RowUse]]:
    """Return the uses of each row by the whole run, in ascending order of steps.

    `shards` has the shard number of each row, over all corpora of the run. The run folder `run` tells which step was
    the last one done, and which steps are skipped.
    """
    global_batch = config.train.global_batch
    order = corpora.row_order(config.seed, config.data.shuffle_window_shards, global_batch)
    skipped = SkipList(run, config.train.skip_steps).steps
    newest = next(read_records(run / METRICS_FILE, parse_metric, reverse=True), None)
    steps_done = newest.step if newest else 0
    uses = []
    for positions in order.uses_of_rows(shards, rows, config.train.num_steps * global_batch):
        steps = [(use.epoch, use.position // global_batch) for use in positions]
        uses.append([RowUse(epoch, step, step in skipped, step < steps_done) for epoch, step in steps])
    return uses
