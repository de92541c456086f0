"""Compute which row is at each position of a run's infinite sequence of rows, and at which positions a row is used.

Guarantee: a run consists of phases, each on one corpus, and a phase of epochs, one after another. Each epoch is a
permutation of all rows of its corpus: each row occurs exactly once. A phase begins with a new epoch, also where the
phase before it ends in the middle of one. The row at a position depends only on the position, the rows per shard, the
positions at which the phases begin, the seed and the window length, not on ranks, workers or what was read before. A
rank of any world size therefore finds its rows by their positions alone, and a resumed run needs no state but the
step.

How: an epoch permutes the shards, cuts their sequence into windows of `window_shards` shards, and permutes all rows of
a window together, so that the node needs only the shards of one window at a time. Both permutations, of shards and of
rows, are pseudo-random and computed per element: a Feistel network over Z_a x Z_b, where a * b is the number of
elements or slightly more (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002). Its round function
is Philox4x32-10 keyed by (seed, purpose, epoch, window, round). A result that is not below the number of elements goes
through the network again (cycle walking). No array as long as a window or an epoch ever exists: O(shards) time once
per epoch, then O(log shards) per position. To invert the order, the rounds are undone in reverse order, and cycle
walking is undone by walking back until the result is below the number of elements.

Limits: rows are shuffled within a window only; a window of 64 shards of 16,384 rows has over a million rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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
_EPOCHS_KEPT = 32  # Layouts kept in memory; each takes 16 to 24 bytes per shard.


def permute(
    index: NDArray[Any],
    size: NDArray[Any],
    *,
    seed: int,
    purpose: Purpose,
    epoch: NDArray[Any],
    block: NDArray[Any],
    backwards: bool = False,
) -> Words:
    """Return the place to which a pseudo-random permutation of [0, size) moves each `index`, uint64 [k].

    Element i uses the permutation of [0, size[i]) that seed, purpose, epoch[i] and block[i] select. `block` is the
    number of the window when rows are permuted, and 0 when shards are. Sizes are below 2**52, epochs and blocks below
    2**32. With `backwards`, the permutation is inverted: `index` has places, and the result what is moved there. The C
    and the NumPy implementation give equal results.
    """
    if cpu_library.permute and not backwards:
        return cpu_library.permute(index, size, epoch, block, seed, int(purpose), NUM_ROUNDS)
    # Move each element by the Feistel network, or undo that, until it is below its size.
    moved = index.astype(np.uint64)
    sizes = size.astype(np.uint64)
    epochs = epoch.astype(np.uint64)
    blocks = block.astype(np.uint64)
    unfinished = np.arange(moved.size)  # Elements of `moved` that are still to go through the network.
    while unfinished.size:
        moved[unfinished] = _feistel(
            moved[unfinished],
            sizes[unfinished],
            seed=seed,
            purpose=int(purpose),
            epoch=epochs[unfinished],
            block=blocks[unfinished],
            backwards=backwards,
        )
        is_outside = moved[unfinished] >= sizes[unfinished]
        unfinished = unfinished[is_outside]
    return moved


def _feistel(
    place: Words, size: Words, *, seed: int, purpose: int, epoch: Words, block: Words, backwards: bool
) -> Words:
    """Move each place by one pass of a Feistel network that permutes [0, num_left * num_right), or undo a pass."""
    # num_left is the square root of `size`, rounded up, and num_right is size / num_left, rounded up. So the range is
    # never shorter than `size`, and longer by less than num_left. A place is split into two halves by the equation
    # place = left * num_right + right. Each round adds to one half a random number that depends only on the other
    # half. Subtracting that number undoes the round, so different places stay different.
    num_left, num_right = halves(size)
    left = place // num_right
    right = place % num_right
    rounds = range(NUM_ROUNDS)
    for round_number in reversed(rounds) if backwards else rounds:
        # Each round has random numbers of its own: the purpose is in the low 8 bits of this word, the round above.
        purpose_and_round = np.uint64(purpose | (round_number << 8))
        if round_number % 2 == 0:
            random_words = philox4x32((right, block, epoch, purpose_and_round), seed)[0]
            shift = scaled(random_words, num_left)
            left = (left + (num_left - shift if backwards else shift)) % num_left
        else:
            random_words = philox4x32((left, block, epoch, purpose_and_round), seed)[0]
            shift = scaled(random_words, num_right)
            right = (right + (num_right - shift if backwards else shift)) % num_right
    return left * num_right + right


def halves(size: Words) -> tuple[Words, Words]:
    """Return num_left = sqrt(size) and num_right = size / num_left, both rounded up, for a Feistel network."""
    num_left = np.ceil(np.sqrt(size.astype(np.float64))).astype(np.uint64)
    num_right = (size + num_left - np.uint64(1)) // num_left
    return num_left, num_right


def scaled(word: Words, limit: Words) -> Words:
    """Scale uniform random integers from [0, 2**32) to [0, limit): return floor(word / 2**32 * limit)."""
    # This is cheaper than the remainder word % limit. Both favour some results slightly, which is negligible while
    # `limit` is far below 2**32.
    return (word * limit) >> np.uint64(32)


@dataclass(frozen=True)
class ShardWindow:
    """Range of positions within which the rows of a run are shuffled, and the shards that these rows come from."""

    first_position: int
    end_position: int  # exclusive
    shards: Integers  # index of each shard in the corpus manifest


@dataclass(frozen=True)
class Epoch:
    """Layout of an epoch: the order of its shards, and after how many rows each shard and each window begins."""

    shards: Integers  # [num_shards] index in the manifest of the shard at each place
    shard_start: Integers  # [num_shards + 1] rows before the shard at each place, and rows of the epoch
    window_start: Integers  # [num_windows + 1] rows before each window, and rows of the epoch


class CorpusOrder:
    """Infinite sequence of the rows of one corpus, epoch after epoch, from position 0 on. Thread-safe."""

    def __init__(self, rows_per_shard: Sequence[int], seed: int, window_shards: int) -> None:
        """Take the rows of each shard (> 0, in manifest order) and the number of shards that are shuffled together."""
        self.rows_per_shard = np.asarray(rows_per_shard, dtype=np.int64)  # in the order of the manifest
        assert self.rows_per_shard.size > 0
        assert self.rows_per_shard.min() > 0
        assert window_shards > 0
        self._seed = seed
        self._window_shards = window_shards
        self._epochs: dict[int, Epoch] = {}  # newest layouts; replaced and never changed, so that threads may read it
        self.num_shards = self.rows_per_shard.size
        self.rows_per_epoch = int(self.rows_per_shard.sum())

    def locate(self, positions: Integers) -> tuple[Integers, Integers, Integers]:
        """Return the epoch, the shard and the row in the shard at each position of this sequence, three int64 [P].

        Positions may have any order.
        """
        epochs, offsets = np.divmod(np.asarray(positions, dtype=np.int64), self.rows_per_epoch)
        # One element for each epoch that occurs: a mask [P] of its positions, and its layout.
        layouts = [(epochs == epoch, self.layout(int(epoch))) for epoch in np.unique(epochs)]

        # Find the window of each offset: its number, its first offset and its number of rows.
        windows = np.empty_like(offsets)
        window_starts = np.empty_like(offsets)
        window_sizes = np.empty_like(offsets)
        for in_epoch, layout in layouts:
            number = np.searchsorted(layout.window_start, offsets[in_epoch], side="right") - 1
            windows[in_epoch] = number
            window_starts[in_epoch] = layout.window_start[number]
            window_sizes[in_epoch] = layout.window_start[number + 1] - layout.window_start[number]

        # Shuffle: replace each offset by another one in the same window.
        places_in_window = permute(
            offsets - window_starts,
            window_sizes,
            seed=self._seed,
            purpose=Purpose.ROW_ORDER,
            epoch=epochs,
            block=windows,
        )
        shuffled = window_starts + places_in_window.astype(np.int64)

        # Look up the shard in which each shuffled offset lies, and its row in that shard.
        shards = np.empty_like(offsets)
        rows = np.empty_like(offsets)
        for in_epoch, layout in layouts:
            place = np.searchsorted(layout.shard_start, shuffled[in_epoch], side="right") - 1
            shards[in_epoch] = layout.shards[place]
            rows[in_epoch] = shuffled[in_epoch] - layout.shard_start[place]
        return epochs, shards, rows

    def window_at(self, position: int) -> ShardWindow:
        """Return the shuffle window that contains a position. The last window of an epoch may have fewer shards."""
        epoch, offset = divmod(position, self.rows_per_epoch)
        layout = self.layout(epoch)
        window = int(np.searchsorted(layout.window_start, offset, side="right")) - 1
        epoch_position = epoch * self.rows_per_epoch
        first_shard = window * self._window_shards
        return ShardWindow(
            first_position=epoch_position + int(layout.window_start[window]),
            end_position=epoch_position + int(layout.window_start[window + 1]),
            shards=layout.shards[first_shard : first_shard + self._window_shards],
        )

    def positions_of(self, epoch: int, shards: Integers, rows: Integers) -> Integers:
        """Return the position, int64 [k], at which an epoch uses row rows[i] of shard shards[i]; inverts `locate`."""
        layout = self.layout(epoch)
        place_of_shard = np.argsort(layout.shards)
        # The number of each row in the epoch, before the rows of its window are shuffled.
        unshuffled = layout.shard_start[place_of_shard[shards]] + rows
        windows = np.searchsorted(layout.window_start, unshuffled, side="right") - 1
        window_starts = layout.window_start[windows]
        offsets_in_window = permute(
            unshuffled - window_starts,
            layout.window_start[windows + 1] - window_starts,
            seed=self._seed,
            purpose=Purpose.ROW_ORDER,
            epoch=np.full(unshuffled.size, epoch),
            block=windows,
            backwards=True,
        )
        return epoch * self.rows_per_epoch + window_starts + offsets_in_window.astype(np.int64)

    def layout(self, epoch: int) -> Epoch:
        """Return the order of an epoch's shards, and where shards and windows begin; cache the newest epochs."""
        layout = self._epochs.get(epoch)
        if layout is not None:
            return layout
        layout = self._lay_out(epoch)
        # Another thread may be reading the dict, so a changed copy replaces it. Its first key is the oldest.
        layouts = {**self._epochs, epoch: layout}
        if len(layouts) > _EPOCHS_KEPT:
            oldest = next(iter(layouts))
            del layouts[oldest]
        self._epochs = layouts
        return layout

    def _lay_out(self, epoch: int) -> Epoch:
        num_shards = self.num_shards
        order = permute(
            index=np.arange(num_shards),
            size=np.full(num_shards, num_shards, np.int64),
            seed=self._seed,
            purpose=Purpose.SHARD_ORDER,
            epoch=np.full(num_shards, epoch, np.int64),
            block=np.zeros(num_shards, np.int64),
        )
        shards = order.astype(np.int64)
        shard_start = np.concatenate([[0], np.cumsum(self.rows_per_shard[shards])])
        # Every `_window_shards`-th shard begins a window; the last edge is the end of the epoch.
        window_edges = np.append(np.arange(0, num_shards, self._window_shards), num_shards)
        return Epoch(shards=shards, shard_start=shard_start, window_start=shard_start[window_edges])


class OrderPhase(NamedTuple):
    """Part of a run's sequence of rows that comes from one corpus, and the place of that corpus among all corpora."""

    order: CorpusOrder
    first_position: int  # position of the run at which the part begins
    end_position: int | None  # exclusive; None if the part has no end
    first_shard: int  # number of the corpus's first shard, counted over all corpora
    first_row_id: int  # id of the corpus's first row, counted over all corpora


class RowPosition(NamedTuple):
    """One use of a row in a run: the position in the run's sequence of rows, and the epoch of the row's corpus."""

    epoch: int  # from 0, counted within the phase of the run that trains on the row's corpus
    position: int  # from 0, over the whole run


class RowOrder:
    """Infinite sequence of the rows of a run, phase after phase; the first row has position 0. Thread-safe.

    Shards and rows of all corpora are numbered one after another, in the order of the phases.
    """

    def __init__(self, orders: Sequence[CorpusOrder], first_positions: Sequence[int] = (0,)) -> None:
        """Take the order of each phase's rows, and each phase's first position in the run, ascending from 0."""
        assert first_positions[0] == 0
        assert list(first_positions) == sorted(set(first_positions))
        self.phases: tuple[OrderPhase, ...] = ()
        first_shard = 0
        first_row_id = 0
        for order, first, end in zip(orders, first_positions, [*first_positions[1:], None], strict=True):
            self.phases += (OrderPhase(order, first, end, first_shard, first_row_id),)
            first_shard += order.num_shards
            first_row_id += order.rows_per_epoch
        self.num_rows = first_row_id  # of all corpora
        self._first_positions = np.array(first_positions)
        rows_per_shard = np.concatenate([order.rows_per_shard for order in orders])
        self._shard_start = np.concatenate([[0], np.cumsum(rows_per_shard)])  # id of the first row of each shard

    def locate(self, positions: Integers) -> tuple[Integers, Integers, Integers]:
        """Return the epoch, the shard and the row in the shard at each position of the run, three int64 [P].

        Positions may have any order. Each phase has epochs of its own, counted from 0.
        """
        positions = np.asarray(positions, dtype=np.int64)
        phase_of_position = np.searchsorted(self._first_positions, positions, side="right") - 1
        epochs = np.empty_like(positions)
        shards = np.empty_like(positions)
        rows = np.empty_like(positions)
        for number in np.unique(phase_of_position):
            phase = self.phases[number]
            in_phase = phase_of_position == number
            located = phase.order.locate(positions[in_phase] - phase.first_position)
            epochs[in_phase], shards_of_corpus, rows[in_phase] = located
            shards[in_phase] = phase.first_shard + shards_of_corpus
        return epochs, shards, rows

    def row_ids(self, shards: Integers, rows: Integers) -> Integers:
        """Return the id of each row, int64 [P]: its number when all rows are counted in the order of the manifests.

        Ids do not depend on seed or epoch, so that the rows of different runs on a corpus can be compared.
        """
        return self._shard_start[shards] + rows

    def window_at(self, position: int) -> ShardWindow:
        """Return the shuffle window that contains a position, with all shards that are needed to read its rows.

        At the end of a phase the window is cut, but its rows may come from any shard of the whole window.
        """
        number = int(np.searchsorted(self._first_positions, position, side="right")) - 1
        phase = self.phases[number]
        window = phase.order.window_at(position - phase.first_position)
        end_position = phase.first_position + window.end_position
        if phase.end_position is not None:
            end_position = min(end_position, phase.end_position)
        return ShardWindow(
            first_position=phase.first_position + window.first_position,
            end_position=end_position,
            shards=phase.first_shard + window.shards,
        )

    def uses_of_rows(self, shards: Integers, rows: Integers, num_positions: int) -> list[list[RowPosition]]:
        """Return, for row rows[i] of shard shards[i], the positions below `num_positions` at which a run uses it.

        Positions of a row ascend.
        """
        uses: list[list[RowPosition]] = [[] for _ in rows]
        for phase in self.phases:
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
                positions = phase.order.positions_of(epoch, shards_of_corpus[indices], rows[indices])
                for index, position in zip(indices, phase.first_position + positions, strict=True):
                    if position < end_position:
                        uses[index].append(RowPosition(epoch, int(position)))
        return uses
