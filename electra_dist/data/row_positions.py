"""Compute at which positions of a run's sequence a row of the corpus is used: the inverse of `RowOrder.locate`.

Guarantee: `RowOrder.locate` maps the computed position to the row again, and no other position of the epoch to it.

How: a round of the Feistel network adds to one half a number that depends on the other half only, so the rounds are
undone by subtracting the same numbers in reverse order. Cycle walking is undone by walking back until the result is
below the number of elements.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from electra_kernels.keyed_random import Purpose, philox4x32

from electra_dist.data.row_order import NUM_ROUNDS, Integers, RowOrder, RowSequence, Words, halves, scaled


class RowPosition(NamedTuple):
    """One use of a row in a run: the position in the run's sequence of rows, and the epoch of the row's corpus."""

    epoch: int  # from 0, counted within the phase of the run that trains on the row's corpus
    position: int  # from 0, over the whole run


def uses_of_rows(order: RowSequence, shards: Integers, rows: Integers, num_positions: int) -> list[list[RowPosition]]:
    """Return at which of its first `num_positions` positions a run uses each of k rows, in ascending order.

    The i-th row is number rows[i] in shard shards[i]. Shards are numbered over all corpora.
    """
    uses: list[list[RowPosition]] = [[] for _ in rows]
    for phase in order.phases:
        end_position = num_positions
        if phase.end_position is not None:
            end_position = min(end_position, phase.end_position)
        shards_of_corpus = shards - phase.first_shard
        is_of_corpus = (shards_of_corpus >= 0) & (shards_of_corpus < phase.order.num_shards)
        indices = np.flatnonzero(is_of_corpus)  # which of the k rows are of the phase's corpus
        if indices.size == 0:
            continue
        num_epochs = -(-(end_position - phase.first_position) // phase.order.rows_per_epoch)  # rounded up
        for epoch in range(num_epochs):
            positions = positions_of_rows(phase.order, epoch, shards_of_corpus[indices], rows[indices])
            for index, position in zip(indices, phase.first_position + positions, strict=True):
                if position < end_position:
                    uses[index].append(RowPosition(epoch, int(position)))
    return uses


def positions_of_rows(order: RowOrder, epoch: int, shards: Integers, rows: Integers) -> Integers:
    """Return the position, int64 [k], at which one epoch of a corpus uses each row.

    Positions count from the beginning of `order`. In a later phase of a run, add the phase's first position.
    """
    layout = order.layout(epoch)
    place_of_shard = np.argsort(layout.shards)
    shuffled = layout.shard_start[place_of_shard[shards]] + rows  # offset of the row, shards laid one after another
    windows = np.searchsorted(layout.window_start, shuffled, side="right") - 1
    starts = layout.window_start[windows]
    places = permute_back(
        shuffled - starts,
        layout.window_start[windows + 1] - starts,
        seed=order.seed,
        purpose=Purpose.ROW_ORDER,
        epoch=epoch,
        block=windows,
    )
    return epoch * order.rows_per_epoch + starts + places.astype(np.int64)


def permute_back(
    place: Integers, size: Integers, *, seed: int, purpose: Purpose, epoch: int, block: Integers
) -> Words:
    """Invert `row_order.permute`: return the index that it moves to each place, uint64 [k], within one epoch."""
    index = place.astype(np.uint64)
    sizes = size.astype(np.uint64)
    blocks = block.astype(np.uint64)
    unfinished = np.arange(index.size)
    while unfinished.size:
        moved = _undo_feistel(index[unfinished], sizes[unfinished], seed, int(purpose), epoch, blocks[unfinished])
        index[unfinished] = moved
        unfinished = unfinished[moved >= sizes[unfinished]]
    return index


def _undo_feistel(place: Words, size: Words, seed: int, purpose: int, epoch: int, block: Words) -> Words:
    """Invert `row_order._feistel`: return the number that one pass through the network turns into each `place`."""
    num_left, num_right = halves(size)
    left = place // num_right
    right = place % num_right
    epochs = np.full(place.size, epoch, np.uint64)
    for round_number in reversed(range(NUM_ROUNDS)):
        purpose_and_round = np.uint64(purpose | (round_number << 8))
        if round_number % 2 == 0:
            words = philox4x32((right, block, epochs, purpose_and_round), seed)[0]
            left = (left + num_left - scaled(words, num_left) % num_left) % num_left
        else:
            words = philox4x32((left, block, epochs, purpose_and_round), seed)[0]
            right = (right + num_right - scaled(words, num_right) % num_right) % num_right
    return left * num_right + right
