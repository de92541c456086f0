"""Batches in step order: the slice of each global step that belongs to one rank.

Guarantee: step t is the positions [t * G, (t + 1) * G) of the order, and rank r of W gets the r-th of W equal slices,
whatever happened before. A batch is whole and verified or an error is raised; none is skipped but the steps that the
caller names, which are passed over as if they had no rows: all others keep theirs.

How: one thread reads `_DEPTH` steps ahead and has the next window's shards fetched while this one trains. A fault in
it surfaces in `next`.

Cost: about 3 us of CPU a row of 512, digests of the shards not counted, beside the training thread
(`benchmarks/loader.py`).

Where it stops: W must divide G. The thread is a daemon; `close` ends it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from electra_dist.data.cache import ShardCache
from electra_dist.data.order import RowOrder
from electra_dist.data.receipt import Receipt
from electra_dist.data.shard import rows_of
from electra_dist.errors import ManifestMismatch, UserError

_DEPTH = 2  # steps read ahead
_LOCATED = 16  # steps located together
_CLOSE_S = 2.0  # patience with a read that is waiting for a download


@dataclass(frozen=True)
class RowBatch:
    """One rank's rows of one step."""

    step: int
    row0: int  # number of the first row within the global batch
    ids: NDArray[Any]  # [G / W, seq_len], the corpus's type
    row_ids: NDArray[np.int64]  # [G / W], each row's place in the corpus
    receipt: Receipt  # of these rows


class RowLoader:
    """The batches of one rank from a step on. `next` belongs to one thread."""

    def __init__(
        self,
        cache: ShardCache,
        order: RowOrder,
        global_batch: int,
        rank: int,
        world_size: int,
        start_step: int,
        skip_steps: Collection[int] = (),
    ) -> None:
        """Start reading.

        Args:
            cache: not closed by this loader.
            global_batch: rows per step over all ranks.
            skip_steps: steps that `next` passes over.

        Raises:
            UserError: the ranks do not divide the global batch.
        """
        if global_batch % world_size:
            raise UserError(
                f"train.global_batch {global_batch} is not a multiple of the {world_size} ranks; change one of them"
            )
        assert 0 <= rank < world_size
        assert start_step >= 0
        self.wait_s = 0.0  # how long `next` has waited in all
        self._cache = cache
        self._order = order
        self._global_batch = global_batch
        self._skip_steps = frozenset(skip_steps)
        self._num_rows = global_batch // world_size
        self._row0 = rank * self._num_rows
        self._horizon = 0  # every window that begins before this position is being fetched, and one more
        self._next_window: NDArray[np.int64] = np.empty(0, np.int64)  # shards of the last window that was asked for
        self._located: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None  # of the steps of one block
        self._located_block = -1
        self._failure: BaseException | None = None
        self._stop = threading.Event()
        self._queue: queue.Queue[RowBatch | BaseException] = queue.Queue(_DEPTH)
        self._thread = threading.Thread(target=self._work, args=(start_step,), daemon=True)
        self._thread.start()

    def next(self) -> RowBatch:
        """The batch of the next step that is not skipped."""
        if self._failure is None:
            start = time.monotonic()
            item = self._queue.get()
            self.wait_s += time.monotonic() - start
            if isinstance(item, RowBatch):
                return item
            self._failure = item
        raise self._failure

    @property
    def refetches(self) -> int:
        """Shards fetched again because their bytes were wrong."""
        return self._cache.refetches

    def close(self) -> None:
        """Stop reading ahead."""
        self._stop.set()
        deadline = time.monotonic() + _CLOSE_S
        while self._thread.is_alive() and time.monotonic() < deadline:
            try:
                self._queue.get_nowait()  # a reader that waits for room sees the stop sign
            except queue.Empty:
                self._thread.join(0.01)

    def _work(self, step: int) -> None:
        try:
            while not self._stop.is_set():
                if step not in self._skip_steps:
                    self._queue.put(self._read(step))
                step += 1
        except BaseException as error:  # noqa: BLE001 - raised by next()
            self._queue.put(error)

    def _read(self, step: int) -> RowBatch:
        first = step * self._global_batch + self._row0
        self._look_ahead(first, first + self._num_rows)
        shards, rows = self._locate(step)
        distinct, which = np.unique(shards, return_inverse=True)
        ids = rows_of([self._cache.open(int(shard)) for shard in distinct], which, rows)
        self._cache.prefetch(self._next_window)  # only now: the first batch of a run waits for its own window alone
        row_ids = self._order.row_ids(shards, rows)
        self._check(ids, row_ids)
        return RowBatch(step, self._row0, ids, row_ids, Receipt.of(row_ids))

    def _check(self, ids: NDArray[Any], row_ids: NDArray[np.int64]) -> None:
        """A row with ids that are no tokens would end in an index error far from here, on a GPU without a name."""
        vocab_size = self._cache.manifest.tokenizer.vocab_size
        if ids.max() >= vocab_size:
            row = int(np.flatnonzero((ids >= vocab_size).any(1))[0])
            raise ManifestMismatch(
                f"{self._cache.store.url}/{self._cache.manifest.row_name(int(row_ids[row]))}: token id "
                f"{int(ids[row].max())} is outside the vocabulary of {vocab_size}; build the corpus again"
            )

    def _locate(self, step: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Shard and row of each position of the step; found for several steps at once, which costs little more."""
        block, number = divmod(step, _LOCATED)
        if self._located is None or self._located_block != block:  # the block's first step may have been skipped
            steps = np.arange(_LOCATED) + block * _LOCATED
            positions = steps[:, None] * self._global_batch + np.arange(self._row0, self._row0 + self._num_rows)
            _, shards, rows = self._order.locate(positions.ravel())
            self._located = shards.reshape(positions.shape), rows.reshape(positions.shape)
            self._located_block = block
        return self._located[0][number], self._located[1][number]

    def _look_ahead(self, first: int, end: int) -> None:
        """Fetch the windows of these positions and the one after; let go of all others. Mostly nothing to do."""
        if end <= self._horizon:
            return
        windows = [self._order.window_at(first)]
        while windows[-1].first_position < end:
            windows.append(self._order.window_at(windows[-1].end_position))
        self._horizon = windows[-1].first_position
        shards = np.concatenate([window.shards for window in windows])
        self._cache.keep_only(shards)
        self._next_window = windows[-1].shards
        self._cache.prefetch(shards[: -len(self._next_window)])
