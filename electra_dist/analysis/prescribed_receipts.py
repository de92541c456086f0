"""Compute the receipt that a run must have for the rows of one phase of its data, up to any position.

A receipt is the number of used rows and the sum of the hashes of their ids (`data/receipt.py`). A phase is a range
of steps that read one corpus (`data.phases`).

How: a receipt does not depend on the order of the rows. Receipts of a whole epoch, and of a whole shuffle window (a
group of shards whose rows are shuffled together), are therefore sums of the receipts of their shards. Only in a window
that is used in part are the rows looked up one by one, which takes 3 us each.
"""

from __future__ import annotations

import itertools

import numpy as np

from electra_dist.data.order import OrderPhase
from electra_dist.data.receipt import Receipt

_CHUNK = 1 << 16  # positions whose rows are looked up together


class PhaseReceipts:
    """Calculator of the receipts that a run must have for one phase; it hashes every row id of the corpus once."""

    def __init__(self, phase: OrderPhase) -> None:
        self._phase = phase
        self._order = phase.order
        # Id of the first row of each shard, and the id after the last row.
        self._shard_starts = phase.first_row_id + np.concatenate([[0], np.cumsum(phase.order.rows_per_shard)])
        self._shard_receipts = [
            Receipt.of(np.arange(start, end)) for start, end in itertools.pairwise(self._shard_starts)
        ]
        self._epoch_receipt = sum(self._shard_receipts, Receipt())
        self._newest_query = (0, Receipt())  # position in the phase, receipt of all rows of the phase before it

    def before(self, position: int) -> Receipt:
        """Return the receipt of this phase's rows among the run's first `position` rows, skipped steps included.
        Calls with ascending positions are fast: each continues from the last result. A lower position begins anew.
        """
        if self._phase.end_position is not None:
            position = min(position, self._phase.end_position)
        end_of_query = max(0, position - self._phase.first_position)
        reached, receipt = self._newest_query  # `receipt` is always that of the first `reached` rows
        if end_of_query < reached:
            reached = 0
            receipt = Receipt()

        # Every epoch uses each row of the corpus once, so all epochs have the same receipt.
        rows_per_epoch = self._order.rows_per_epoch
        num_whole_epochs = end_of_query // rows_per_epoch
        if num_whole_epochs > reached // rows_per_epoch:
            reached = num_whole_epochs * rows_per_epoch
            receipt = self._epoch_receipt.times(num_whole_epochs)

        while reached < end_of_query:
            window = self._order.window_at(reached)
            whole_window_is_due = reached == window.first_position and window.end_position <= end_of_query
            if whole_window_is_due:
                # Rows are shuffled within a window only, so a window has exactly the rows of its shards.
                receipt = sum((self._shard_receipts[shard] for shard in window.shards), receipt)
                reached = window.end_position
            else:
                end = min(end_of_query, window.end_position, reached + _CHUNK)
                _, shards, rows = self._order.locate(np.arange(reached, end))
                receipt += Receipt.of(self._shard_starts[shards] + rows)
                reached = end
        self._newest_query = (reached, receipt)
        return receipt
