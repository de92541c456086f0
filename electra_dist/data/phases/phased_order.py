"""Compute which row is at each position of a run whose corpus changes at given steps.

Guarantee: as in `order.py`, the row at a position depends only on the position, the seed, the window length, the
rows per shard of each corpus and the positions at which the phases (parts with one corpus) begin. Within a phase, the
rows come in the order of a `RowOrder` of the phase's corpus, from that order's position 0 on. So a phase begins with a
new epoch, and every completed epoch has each row of the corpus once.

How: a binary search finds the phase of a position, and the `RowOrder` of that phase finds the row. Shards and rows of
all corpora are numbered one after another in the order of the phases. A row id therefore names one row of one corpus,
and receipts (checksums of row ids) cover all corpora.

Limits: a phase may end in the middle of an epoch of its corpus; the remaining rows of that epoch are not used.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from electra_dist.data.order import Integers, OrderPhase, RowOrder, ShardWindow


class PhasedOrder:
    """Row order of a run that trains on several corpora in turn; implements `RowSequence`. Thread-safe."""

    def __init__(self, orders: Sequence[RowOrder], first_positions: Sequence[int]) -> None:
        """Take the order of each phase's rows, and each phase's first position in the run, ascending from 0."""
        assert first_positions[0] == 0
        assert list(first_positions) == sorted(set(first_positions))
        end_positions = [*first_positions[1:], None]
        self._phases: tuple[OrderPhase, ...] = ()
        first_shard = 0
        first_row_id = 0
        for order, first_position, end_position in zip(orders, first_positions, end_positions, strict=True):
            self._phases += (OrderPhase(order, first_position, end_position, first_shard, first_row_id),)
            first_shard += order.num_shards
            first_row_id += order.rows_per_epoch
        self._first_positions = np.array(first_positions)
        rows_per_shard = np.concatenate([order.rows_per_shard for order in orders])
        self._shard_start = np.concatenate([[0], np.cumsum(rows_per_shard)])  # id of the first row of each shard

    @property
    def phases(self) -> tuple[OrderPhase, ...]:
        """Return the part of the sequence that belongs to each phase, in ascending order of positions."""
        return self._phases

    def locate(self, positions: Integers) -> tuple[Integers, Integers, Integers]:
        """Return each position's epoch, shard and row in the shard, three int64 [P]; see `RowSequence.locate`."""
        positions = np.asarray(positions, dtype=np.int64)
        phase_of_position = np.searchsorted(self._first_positions, positions, side="right") - 1
        epochs = np.empty_like(positions)
        shards = np.empty_like(positions)
        rows = np.empty_like(positions)
        for number in np.unique(phase_of_position):
            phase = self._phases[number]
            in_phase = phase_of_position == number
            located = phase.order.locate(positions[in_phase] - phase.first_position)
            epochs[in_phase], shards_of_corpus, rows[in_phase] = located
            shards[in_phase] = phase.first_shard + shards_of_corpus
        return epochs, shards, rows

    def row_ids(self, shards: Integers, rows: Integers) -> Integers:
        """Return the id of each row, int64 [P], unique among all corpora. `shards` are numbered over all corpora."""
        return self._shard_start[shards] + rows

    def window_at(self, position: int) -> ShardWindow:
        """Return the shuffle window around a position. A window that a phase's end cuts ends with the phase."""
        number = int(np.searchsorted(self._first_positions, position, side="right")) - 1
        phase = self._phases[number]
        window = phase.order.window_at(position - phase.first_position)
        end_position = phase.first_position + window.end_position
        if phase.end_position is not None:
            end_position = min(end_position, phase.end_position)
        # All shards of the whole window are listed: the rows before the cut may come from any of them.
        return ShardWindow(
            first_position=phase.first_position + window.first_position,
            end_position=end_position,
            shards=phase.first_shard + window.shards,
        )


def phase_lengths(phases: Sequence[OrderPhase], num_positions: int) -> list[int]:
    """Return how many of the first `num_positions` positions of a run belong to each of its phases."""
    ends = [num_positions if phase.end_position is None else phase.end_position for phase in phases]
    firsts = [phase.first_position for phase in phases]
    return [max(0, min(end, num_positions) - first) for first, end in zip(firsts, ends, strict=True)]
