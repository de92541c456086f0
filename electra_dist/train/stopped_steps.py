"""Find the row at fault in a step that the guard has stopped, and skip steps for a rollback (`loss_guard.py`)."""

from __future__ import annotations

import numpy as np

from electra_dist.collectives import gather
from electra_dist.config import Config
from electra_dist.data.corpora import Corpora
from electra_dist.data.loader import RowBatch
from electra_dist.errors import UserError
from electra_dist.train.loss_guard import first_to_skip
from electra_dist.train.skip_list_file import SkipList
from electra_dist.train.step import outlier


def find_suspect(corpora: Corpora, batch: RowBatch, losses: list[float]) -> str:
    """Find the row of a stopped step whose loss stands out among the rows of all ranks. Collective.

    `losses` are of this rank's rows. Returns a text for the log with the row's name (shard and index), its loss and
    the median loss; "" if no row stands out.
    """
    all_losses: list[float] = []
    all_row_ids: list[int] = []
    for rank_losses, rank_row_ids in gather([losses, batch.row_ids.tolist()]):
        all_losses += rank_losses
        all_row_ids += rank_row_ids
    index = outlier(all_losses)
    if index is None:
        return ""
    name = corpora.row_name(all_row_ids[index])
    median = np.nanmedian(all_losses)
    return f"{name} (loss {all_losses[index]:.4g}, median of the step's rows {median:.4g})"


def skip_for_rollback(config: Config, skips: SkipList) -> tuple[int, list[int]]:
    """Skip the steps that were stopped in a row and some steps before them, because the run goes back to a checkpoint.

    Returns the first step to skip and the stopped steps. Every rank calls this; rank 0 then reports the rollback, and
    after that writes `skips`. Raises UserError if the run has already gone back `guard.max_rollbacks` times.
    """
    guard = config.guard
    stopped = skips.streak
    if skips.rollbacks >= guard.max_rollbacks:
        raise UserError(
            f"run {config.run_dir} diverges: step {stopped[-1]:,} after {skips.rollbacks} rollbacks was "
            f"stopped by the guard again, and guard.max_rollbacks is {guard.max_rollbacks}; lower optimizer.lr in "
            f"a new run, check the rows that ledger.jsonl names, or raise guard.max_rollbacks"
        )
    # A repeated step computes exactly the same. Without skipping earlier steps, too, the run would diverge again.
    first = first_to_skip(stopped[0], guard.skip_before)
    skips.roll_back(first)
    return first, stopped
