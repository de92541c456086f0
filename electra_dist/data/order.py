"""Which row stands at which position of a run: a pure function of (rows per shard, seed, window, position).

Guarantee: the epochs' rows, one epoch after another, form one infinite sequence. Each epoch is a permutation of all
rows: none repeated, none left out. Nothing depends on ranks, workers or what was read before, so any rank of any world
size finds its rows by their positions alone, and a resumed run needs no state but the step.

How: an epoch permutes the shards, cuts them into windows of `window_shards` and permutes all rows of a window
together, so that one window of shards on the node is enough to go on. Both permutations are keyed: a Feistel network
over Z_a x Z_b with a * b just above the size (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA
2002), round functions from Philox4x32-10 keyed by (seed, purpose, epoch, window, round), and cycle walking for the
few that fall outside.

Cost: O(shards) once an epoch (about 1 ms for 4,000 shards), then O(log shards) per position, 0.2 to 0.4 us each in
batches of 2,048 (2 to 4 us where `electra_kernels.native.host` was not built); no array as long as a window or an
epoch ever exists. `benchmarks/loader.py` measures it.

Where it stops: shuffling is as wide as a window: with 64 shards of 16,384 rows, over a million rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from electra_kernels.keyed_random import Purpose, philox4x32
from electra_kernels.native import host
from numpy.typing import NDArray

Words = NDArray[np.uint64]
Integers = NDArray[np.int64]

# Four rounds are enough to look random for large halves (Luby and Rackoff, 1988). Tiny windows and shard lists need
# more to reach all permutations equally often: of 6 shards, 10 and 16 rounds fail a chi-squared test over 60,000
# permutations (p = 1e-197, 3e-4), 20 pass it (p = 0.85).
NUM_ROUNDS = 20
_EPOCHS_KEPT = 32  # 65 bytes a shard each


def permute(
    index: NDArray[Any],
    size: NDArray[Any],
    *,
    seed: int,
    purpose: Purpose,
    epoch: NDArray[Any],
    block: NDArray[Any],
) -> Words:
    """The place that each `index` takes in the keyed permutation of [0, size).

    Args:
        index: numbers, each in [0, size).
        size: lengths of the permutations, of the shape of `index`, each in [1, 2**52).
        seed: 64-bit key.
        purpose: what is permuted.
        epoch: of the shape of `index`, each in [0, 2**32).
        block: which permutation of the epoch, of the shape of `index`, each in [0, 2**32).
    """
    if host.permute:
        return host.permute(index, size, epoch, block, seed, int(purpose), NUM_ROUNDS)
    place = index.astype(np.uint64)
    sizes, epochs, blocks = size.astype(np.uint64), epoch.astype(np.uint64), block.astype(np.uint64)
    walking = np.arange(place.size)  # those not yet inside [0, size)
    while walking.size:
        moved = _feistel(place[walking], sizes[walking], seed, int(purpose), epochs[walking], blocks[walking])
        place[walking] = moved
        walking = walking[moved >= sizes[walking]]
    return place


def _feistel(place: Words, size: Words, seed: int, purpose: int, epoch: Words, block: Words) -> Words:
    """One pass of the network: a permutation of [0, a * b), where size <= a * b < size + a."""
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
    """A 32-bit word scaled to [0, limit): cheaper than a remainder and as even, limits being far below 2**32."""
    return (word * limit) >> np.uint64(32)


@dataclass(frozen=True)
class ShardWindow:
    """A stretch of the sequence whose rows come from a few shards."""

    first_position: int
    end_position: int
    shards: Integers


@dataclass(frozen=True)
class _Epoch:
    """Where each window and each shard of an epoch begins, in rows from the epoch's start, with the end as last."""

    shards: Integers  # shard at each place
    shard_start: Integers  # [num_shards + 1]
    window_start: Integers  # [num_windows + 1]


class RowOrder:
    """The sequence of all rows of a run."""

    def __init__(self, rows_per_shard: Sequence[int], seed: int, window_shards: int) -> None:
        self._rows = np.asarray(rows_per_shard, dtype=np.int64)
        assert self._rows.size > 0
        assert self._rows.min() > 0
        assert window_shards > 0
        self._seed = seed
        self._window_shards = window_shards
        self._corpus_start = np.concatenate([[0], np.cumsum(self._rows)])
        self._epochs: dict[int, _Epoch] = {}  # the last few in use; replaced, never changed, so threads may share it
        self.rows_per_epoch = int(self._corpus_start[-1])

    def locate(self, positions: Integers) -> tuple[Integers, Integers, Integers]:
        """Epoch, shard index and row within the shard for each position, as arrays of the same length.

        Args:
            positions: [P] int64, each >= 0.
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
        """A number in [0, rows_per_epoch) for each row, by its place in the corpus: what a receipt counts."""
        return self._corpus_start[shards] + rows

    def window_at(self, position: int) -> ShardWindow:
        """The window that holds a position."""
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
        layout = self._epochs.get(epoch)
        if layout is None:
            layout = self._lay_out(epoch)
            newest = list(self._epochs.items())[1 - _EPOCHS_KEPT :]
            self._epochs = {**dict(newest), epoch: layout}
        return layout

    def _lay_out(self, epoch: int) -> _Epoch:
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
