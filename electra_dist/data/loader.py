"""Load the batches of one rank in the order of steps, ahead of training.

Guarantee: the rows of a step do not depend on restarts or on earlier steps. The row order (`order.py`) is an
infinite sequence of rows. With G rows in a global batch, step t uses its positions [t * G, (t + 1) * G). These are cut
into W equal slices for the W ranks: rank 0 gets the first slice. `RowLoader.next` returns a complete batch, in which
the checksum of every row was verified, or raises an error. A step in `skip_steps` uses no rows, and the rows of all
other steps do not shift.

How: one background thread reads batches ahead of training, into a queue of `_DEPTH` batches. While it reads rows of
one window (a group of shards whose rows are shuffled together), the threads of the `ShardCache` fetch and verify the
shards of the next window; a window that has been read is closed before. No more than two windows are open therefore,
unless one batch has rows of more. `RowLoader.next` raises the errors of the background thread.

Limits: W must divide G. The thread is a daemon; `close` ends it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from electra_dist.data.order import RowOrder
from electra_dist.data.receipt import Receipt
from electra_dist.data.shard_cache import ShardCache
from electra_dist.errors import ManifestMismatch, UserError

_DEPTH = 2  # Batches that the queue holds; the thread reads one more and then waits for room in the queue.
_LOCATED = 16  # Number of steps whose rows are located together.
_WAIT_SLICE_S = 1.0  # Seconds between two calls of `on_wait`.
_CLOSE_S = 2.0  # Seconds for which `close` waits for a thread that is in the middle of a read.


@dataclass(frozen=True)
class RowBatch:
    """Rows that one rank trains on in one step: G / W rows, where G is the global batch and W the number of ranks."""

    step: int
    row0: int  # number of this rank's first row within the global batch
    ids: NDArray[Any]  # [G / W, seq_len] token ids, uint16 or uint32 as in the corpus
    row_ids: NDArray[np.int64]  # [G / W] number of each row in the corpus
    receipt: Receipt  # of these rows


class RowLoader:
    """Loader of one rank's batches from a given step on. Only one thread may call `next`, and at the end `close`."""

    def __init__(
        self,
        cache: ShardCache,
        order: RowOrder,
        global_batch: int,
        rank: int,
        world_size: int,
        start_step: int,
        skip_steps: Collection[int] = (),
        on_wait: Callable[[float], None] = lambda waited_s: None,
    ) -> None:
        """Start the thread that reads ahead, from step `start_step` on. `skip_steps` are steps that use no rows.

        Only this loader may use `cache`; close `cache` after the loader. While `next` waits, `on_wait(seconds so far)`
        is called about every second. Raises UserError if the number of ranks does not divide `global_batch` (rows).
        """
        if global_batch % world_size:
            raise UserError(
                f"train.global_batch {global_batch} is not a multiple of the {world_size} ranks; change one of them"
            )
        assert 0 <= rank < world_size
        assert start_step >= 0
        self.wait_s = 0.0  # seconds that `next` has waited for batches in total
        self._on_wait = on_wait
        self._cache = cache
        self._order = order
        self._global_batch = global_batch
        self._skip_steps = frozenset(skip_steps)
        self._num_rows = global_batch // world_size
        self._row0 = rank * self._num_rows
        self._horizon = 0  # `_look_ahead` has handled the positions before this one
        # Shards of the window that ends at `_horizon`, and of the next one; None once the next one is being fetched.
        self._ahead: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
        # Result of `_locate` for a block of steps: shard and row within the shard, each [_LOCATED, G / W].
        self._located: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
        self._located_block = -1  # number of that block; block b has the steps from b * _LOCATED on
        self._failure: BaseException | None = None
        self._stop = threading.Event()
        self._queue: queue.Queue[RowBatch | BaseException] = queue.Queue(_DEPTH)
        self._thread = threading.Thread(target=self._work, args=(start_step,), daemon=True)
        self._thread.start()

    def next(self) -> RowBatch:
        """Return the batch of the next step that is not skipped; wait until the background thread has read it.

        The time waited is added to `wait_s`. After a call has raised an error, every further call raises this error.
        """
        if self._failure is None:
            start = time.monotonic()
            item: RowBatch | BaseException | None = None
            while item is None:
                try:
                    item = self._queue.get(timeout=_WAIT_SLICE_S)
                except queue.Empty:
                    self._on_wait(time.monotonic() - start)
            self.wait_s += time.monotonic() - start
            if isinstance(item, RowBatch):
                return item
            self._failure = item
        raise self._failure

    @property
    def refetches(self) -> int:
        """Return how often this rank has fetched a shard again because its bytes were wrong.

        A number above 0 points to a faulty network, disk or storage service. Training used only verified rows.
        """
        return self._cache.node_cache.refetches

    def close(self) -> None:
        """Stop reading ahead and wait up to two seconds for the background thread to end."""
        self._stop.set()
        deadline = time.monotonic() + _CLOSE_S
        while self._thread.is_alive() and time.monotonic() < deadline:
            # The thread may be waiting for room in the full queue. An item taken out lets it go on and notice `_stop`.
            try:
                self._queue.get_nowait()
            except queue.Empty:
                self._thread.join(timeout=0.01)

    def _work(self, step: int) -> None:
        """Read the batches from `step` on into the queue, until `close` is called or an error was put into it."""
        try:
            while not self._stop.is_set():
                if step not in self._skip_steps:
                    self._queue.put(self._read(step))
                step += 1
        except BaseException as error:  # noqa: BLE001 - `next` raises it in the training thread.
            self._queue.put(error)

    def _read(self, step: int) -> RowBatch:
        """Read this rank's batch of a step and check its token ids; wait for shards that are still being fetched."""
        first_position = step * self._global_batch + self._row0
        self._look_ahead(first_position, first_position + self._num_rows)
        shard_of_row, row_in_shard = self._locate(step)
        ids = self._cache.read_rows(shard_of_row, row_in_shard)
        self._fetch_ahead()
        row_ids = self._order.row_ids(shard_of_row, row_in_shard)
        self._check_token_ids(ids, row_ids)
        return RowBatch(step=step, row0=self._row0, ids=ids, row_ids=row_ids, receipt=Receipt.of(row_ids))

    def _check_token_ids(self, ids: NDArray[Any], row_ids: NDArray[np.int64]) -> None:
        """Refuse token ids outside the vocabulary: an index error on a GPU would name neither row nor id."""
        corpora = self._cache.corpora
        vocab_size = corpora.tokenizer.vocab_size
        if ids.max() < vocab_size:
            return
        is_wrong_row = (ids >= vocab_size).any(axis=1)
        wrong_row = int(np.flatnonzero(is_wrong_row)[0])
        location = corpora.row_location(int(row_ids[wrong_row]))
        wrong_id = int(ids[wrong_row].max())
        raise ManifestMismatch(
            f"{location}: token id {wrong_id} is outside the vocabulary of {vocab_size}; build the corpus again"
        )

    def _locate(self, step: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the shard of each of this rank's rows of a step, and the row's number in it, int64 [G / W] each."""
        # All steps of a block are located at its first step, which costs little more than one step.
        block, step_in_block = divmod(step, _LOCATED)
        if self._located is None or self._located_block != block:
            steps = block * _LOCATED + np.arange(_LOCATED)
            first_positions = steps * self._global_batch + self._row0  # of this rank in each step
            positions = first_positions[:, None] + np.arange(self._num_rows)  # [_LOCATED, G / W]
            _, shards, rows = self._order.locate(positions.ravel())
            self._located = (shards.reshape(positions.shape), rows.reshape(positions.shape))
            self._located_block = block
        shards_of_block, rows_of_block = self._located
        return shards_of_block[step_in_block], rows_of_block[step_in_block]

    def _look_ahead(self, first: int, end: int) -> None:
        """Begin to fetch the shards that hold the rows at positions [first, end) of the row order; close all others.

        These are the shards of every shuffle window that overlaps the range. Those of the window after them are only
        remembered in `_ahead`, for `_fetch_ahead`.
        """
        if end <= self._horizon:
            return
        # Walk through the windows that hold [first, end); the walk ends at the first window after them.
        window = self._order.window_at(first)
        windows_in_use = []
        while window.first_position < end:
            windows_in_use.append(window)
            window = self._order.window_at(window.end_position)
        shards_in_use = np.concatenate([used.shards for used in windows_in_use])
        self._horizon = window.first_position
        self._ahead = windows_in_use[-1].shards, window.shards
        self._cache.keep_only(shards_in_use)
        self._cache.prefetch(shards_in_use)

    def _fetch_ahead(self) -> None:
        """Begin to fetch the shards of the next shuffle window, after the first batch of a window has been read.

        Earlier, a run's first batch would wait for shards that it does not need.
        """
        if self._ahead is not None:
            window, next_window = self._ahead
            self._cache.keep_only(np.concatenate([window, next_window]))
            self._cache.prefetch(next_window)
            self._ahead = None
