"""Compute which row is at which position of a run: a pure function of (rows per shard, seed, window, position).

Guarantee: the rows of all epochs, one epoch after another, form one infinite sequence. Each epoch is a permutation of
all rows of the corpus: each row occurs exactly once. Nothing depends on ranks, workers or what was read before. A rank
of any world size therefore finds its rows by their positions alone, and a resumed run needs no state but the step.

How: an epoch permutes the shards, cuts their sequence into windows of `window_shards` shards, and permutes all rows of
a window together, so that the node needs only the shards of one window at a time. Both permutations are keyed. Each is
a Feistel network over Z_a x Z_b with a * b just above the size (Black and Rogaway, "Ciphers with arbitrary finite
domains", CT-RSA 2002); its round functions are Philox4x32-10 keyed by (seed, purpose, epoch, window, round), and the
few results that fall outside the size go through the network again (cycle walking).

Cost: O(shards) once per epoch (about 1 ms for 4,000 shards), then O(log shards) per position, 0.2 to 0.4 us each in
batches of 2,048 (2 to 4 us where `electra_kernels.native.cpu_library` was not built). No array as long as a window or
an epoch ever exists. `benchmarks/loader.py` measures the cost.

Limits: rows are shuffled within a window only; a window of 64 shards of 16,384 rows has over a million rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from electra_kernels.keyed_random import Purpose, philox4x32
from electra_kernels.native import cpu_library
from numpy.typing import NDArray

Words = NDArray[np.uint64]
Integers = NDArray[np.int64]

# Four rounds look random if the two halves are large (Luby and Rackoff, 1988). Small windows and short lists of shards
# need more rounds to reach all permutations equally often: for 6 shards, 10 and 16 rounds fail a chi-squared test over
# 60,000 permutations (p = 1e-197 and 3e-4), and 20 rounds pass it (p = 0.85).
NUM_ROUNDS = 20
_EPOCHS_KEPT = 32  # Layouts kept in memory; each takes 65 bytes per shard.


def permute(
    index: NDArray[Any],
    size: NDArray[Any],
    *,
    seed: int,
    purpose: Purpose,
    epoch: NDArray[Any],
    block: NDArray[Any],
) -> Words:
    """Return the place of each `index` in a keyed pseudo-random permutation of [0, size), as uint64.

    The permutation is never stored: each place is computed from its index alone, in C where
    `electra_kernels.native.cpu_library` was built, with equal results. (seed, purpose, epoch, block) select the
    permutation.

    Args:
        index: [k] numbers, each in [0, size).
        size: [k] length of the permutation of each index, in [1, 2**52).
        seed: 64-bit key.
        purpose: Whether shards or rows are permuted.
        epoch: [k] epoch of each index, in [0, 2**32).
        block: [k] number of the permutation within its epoch (the window), in [0, 2**32).
    """
    if cpu_library.permute:
        return cpu_library.permute(index, size, epoch, block, seed, int(purpose), NUM_ROUNDS)
    place = index.astype(np.uint64)
    sizes, epochs, blocks = size.astype(np.uint64), epoch.astype(np.uint64), block.astype(np.uint64)
    walking = np.arange(place.size)  # Positions in `place` whose value is not yet inside [0, size).
    while walking.size:
        moved = _feistel(place[walking], sizes[walking], seed, int(purpose), epochs[walking], blocks[walking])
        place[walking] = moved
        walking = walking[moved >= sizes[walking]]
    return place


def _feistel(place: Words, size: Words, seed: int, purpose: int, epoch: Words, block: Words) -> Words:
    """Return each place after one pass through a keyed Feistel network, a permutation of [0, a * b).

    a is the square root of the size, rounded up, and b the least integer with size <= a * b < size + a. Each place is
    split into left and right with place = left * b + right, and the rounds change left and right in turn.
    """
    a = np.ceil(np.sqrt(size.astype(np.float64))).astype(np.uint64)
    b = (size + a - np.uint64(1)) // a
    left, right = place // b, place % b
    for number in range(NUM_ROUNDS):
        key = (block, epoch, np.uint64(purpose | number << 8))
        if number % 2 == 0:
            left = (left + _scaled(philox4x32((right, *key), seed)[0], a)) % a
        else:
            right = (right + _scaled(philox4x32((left, *key), seed)[0], b)) % b
    return left * b + right


def _scaled(word: Words, limit: Words) -> Words:
    """Return 32-bit random words scaled to [0, limit); cheaper than a remainder and as even if limit << 2**32."""
    return (word * limit) >> np.uint64(32)


@dataclass(frozen=True)
class ShardWindow:
    """Window of the row sequence: a range of positions whose rows are shuffled together, and their shards."""

    first_position: int
    end_position: int  # exclusive
    shards: Integers  # indices of the shards


@dataclass(frozen=True)
class _Epoch:
    """Layout of an epoch: the order of its shards, and where each shard and each window begins.

    Starts are in rows from the start of the epoch; the last element is the end of the epoch.
    """

    shards: Integers  # [num_shards] index of the shard at each place
    shard_start: Integers  # [num_shards + 1]
    window_start: Integers  # [num_windows + 1]


class RowOrder:
    """Infinite sequence of the rows of a run, which maps a position to a shard and a row. Thread-safe."""

    def __init__(self, rows_per_shard: Sequence[int], seed: int, window_shards: int) -> None:
        """Prepare the sequence; nothing is permuted yet.

        Args:
            rows_per_shard: Number of rows of each shard, all positive, in the order of the manifest.
            seed: The run's seed.
            window_shards: Number of shards whose rows are shuffled together.
        """
        self._rows = np.asarray(rows_per_shard, dtype=np.int64)
        assert self._rows.size > 0
        assert self._rows.min() > 0
        assert window_shards > 0
        self._seed = seed
        self._window_shards = window_shards
        self._corpus_start = np.concatenate([[0], np.cumsum(self._rows)])
        self._epochs: dict[int, _Epoch] = {}  # the last few; replaced and never changed, so that threads may share it
        self.rows_per_epoch = int(self._corpus_start[-1])

    def locate(self, positions: Integers) -> tuple[Integers, Integers, Integers]:
        """Return the epoch, the shard and the row within the shard of each position, as three int64 arrays [P].

        Args:
            positions: [P] int64 positions in the sequence, each >= 0, in any order. Step t of a run with global batch
                G has the positions [t * G, (t + 1) * G).
        """
        epochs, offsets = np.divmod(np.asarray(positions, dtype=np.int64), self.rows_per_epoch)
        window, start, size = np.empty_like(offsets), np.empty_like(offsets), np.empty_like(offsets)
        layouts = [(epochs == epoch, self._layout(int(epoch))) for epoch in np.unique(epochs)]
        for chosen, layout in layouts:
            window[chosen] = np.searchsorted(layout.window_start, offsets[chosen], side="right") - 1
            start[chosen] = layout.window_start[window[chosen]]
            size[chosen] = layout.window_start[window[chosen] + 1] - start[chosen]
        inside = permute(offsets - start, size, seed=self._seed, purpose=Purpose.ROW_ORDER, epoch=epochs, block=window)
        shuffled = start + inside.astype(np.int64)
        shards, rows = np.empty_like(offsets), np.empty_like(offsets)
        for chosen, layout in layouts:
            place = np.searchsorted(layout.shard_start, shuffled[chosen], side="right") - 1
            shards[chosen] = layout.shards[place]
            rows[chosen] = shuffled[chosen] - layout.shard_start[place]
        return epochs, shards, rows

    def row_ids(self, shards: Integers, rows: Integers) -> Integers:
        """Return the id of each row, a number in [0, rows_per_epoch) by its place in the corpus.

        Ids do not depend on seed or epoch; receipts are computed from them.

        Args:
            shards: [P] index of each row's shard.
            rows: [P] number of each row within its shard.
        """
        return self._corpus_start[shards] + rows

    def window_at(self, position: int) -> ShardWindow:
        """Return the window that contains a position, with the shards that must be on the node to read it."""
        epoch, offset = divmod(position, self.rows_per_epoch)
        layout = self._layout(epoch)
        window = int(np.searchsorted(layout.window_start, offset, side="right")) - 1
        base = epoch * self.rows_per_epoch
        return ShardWindow(
            first_position=base + int(layout.window_start[window]),
            end_position=base + int(layout.window_start[window + 1]),
            shards=layout.shards[window * self._window_shards : (window + 1) * self._window_shards],
        )

    def _layout(self, epoch: int) -> _Epoch:
        """Return the order of an epoch's shards and windows; the `_EPOCHS_KEPT` newest results are cached."""
        layout = self._epochs.get(epoch)
        if layout is None:
            layout = self._lay_out(epoch)
            newest = list(self._epochs.items())[1 - _EPOCHS_KEPT :]
            self._epochs = {**dict(newest), epoch: layout}
        return layout

    def _lay_out(self, epoch: int) -> _Epoch:
        """Compute the order of an epoch's shards and windows: permute the shards and cut their sequence."""
        count = self._rows.size
        zero = np.zeros(count, np.int64)
        order = permute(
            np.arange(count),
            zero + count,
            seed=self._seed,
            purpose=Purpose.SHARD_ORDER,
            epoch=zero + epoch,
            block=zero,
        )
        shards = order.astype(np.int64)
        shard_start = np.concatenate([[0], np.cumsum(self._rows[shards])])
        edges = np.append(np.arange(0, count, self._window_shards), count)
        return _Epoch(shards, shard_start, shard_start[edges])
