"""Load the batches of one rank in the order of steps, ahead of training.

Guarantee: the rows of a step do not depend on restarts or on earlier steps. With G rows in a global batch, step t has
the positions [t * G, (t + 1) * G) of the row order (`row_order.py`), and rank r of W gets the r-th of W equal slices.
A batch is complete and verified, or an error is raised. Only the steps that the caller names are skipped; all other
steps keep their rows.

How: one thread reads `_DEPTH` steps ahead. While it reads rows of one window (the shards whose rows are shuffled
together), the shards of the next window are downloaded. `RowLoader.next` raises an error that occurred in the thread.

Cost: about 3 us of CPU per row of 512 tokens outside the training thread, digests of the shards not counted
(`benchmarks/loader.py`).

Limits: W must divide G. The thread is a daemon; `close` ends it.
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

from electra_dist.data.row_order import RowOrder
from electra_dist.data.row_receipt import Receipt
from electra_dist.data.shard import rows_of
from electra_dist.data.verified_shards import ShardCache
from electra_dist.errors import ManifestMismatch, UserError

_DEPTH = 2  # Number of steps read ahead.
_LOCATED = 16  # Number of steps whose rows are located together.
_CLOSE_S = 2.0  # How long `close` waits for a read that is waiting for a download.


@dataclass(frozen=True)
class RowBatch:
    """Rows that one rank trains on in one step: G / W rows, where G is the global batch and W the number of ranks."""

    step: int
    row0: int  # number of this rank's first row within the global batch
    ids: NDArray[Any]  # [G / W, seq_len] token ids, uint16 or uint32 as in the corpus
    row_ids: NDArray[np.int64]  # [G / W] number of each row in the corpus
    receipt: Receipt  # of these rows


class RowLoader:
    """Loader of one rank's batches, from a given step on.

    A background thread reads ahead. Only one thread may call `next`; call `close` at the end.
    """

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
        """Start the thread that reads ahead.

        Args:
            cache: Shards of the corpus. The loader must be its only user and does not close it.
            order: Order of the corpus's rows.
            global_batch: Rows per step, summed over all ranks.
            rank: This rank, in [0, world_size).
            world_size: Number of ranks.
            start_step: First step to load, counted from 0.
            skip_steps: Steps that `next` skips; their rows are not used.

        Raises:
            UserError: The number of ranks does not divide the global batch.
        """
        if global_batch % world_size:
            raise UserError(
                f"train.global_batch {global_batch} is not a multiple of the {world_size} ranks; change one of them"
            )
        assert 0 <= rank < world_size
        assert start_step >= 0
        self.wait_s = 0.0  # seconds that `next` has waited for batches in total
        self._cache = cache
        self._order = order
        self._global_batch = global_batch
        self._skip_steps = frozenset(skip_steps)
        self._num_rows = global_batch // world_size
        self._row0 = rank * self._num_rows
        self._horizon = 0  # the windows before this position are being fetched, and the one that begins there
        self._next_window: NDArray[np.int64] = np.empty(0, np.int64)  # shards of the window after the current ones
        self._located: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None  # shards and rows of a block of steps
        self._located_block = -1
        self._failure: BaseException | None = None
        self._stop = threading.Event()
        self._queue: queue.Queue[RowBatch | BaseException] = queue.Queue(_DEPTH)
        self._thread = threading.Thread(target=self._work, args=(start_step,), daemon=True)
        self._thread.start()

    def next(self) -> RowBatch:
        """Return the batch of the next step that is not skipped; waits until it is read.

        Raises:
            StoreError: A shard could not be fetched or read.
            ManifestMismatch: A shard is not the one that the manifest lists, or a token id is outside the vocabulary.
                After an error, every further call raises it again.
        """
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
        """Return how many shards this rank has fetched again because their bytes were wrong."""
        return self._cache.refetches

    def close(self) -> None:
        """Stop reading ahead; waits at most two seconds for the thread, which ends with the process otherwise."""
        self._stop.set()
        deadline = time.monotonic() + _CLOSE_S
        while self._thread.is_alive() and time.monotonic() < deadline:
            try:
                self._queue.get_nowait()  # Makes room in the queue, so that a waiting thread notices `_stop`.
            except queue.Empty:
                self._thread.join(0.01)

    def _work(self, step: int) -> None:
        """Read the batches from `step` on into the queue until `close` or an error. Runs in the background thread."""
        try:
            while not self._stop.is_set():
                if step not in self._skip_steps:
                    self._queue.put(self._read(step))
                step += 1
        except BaseException as error:  # noqa: BLE001 - `next` raises it in the training thread.
            self._queue.put(error)

    def _read(self, step: int) -> RowBatch:
        """Read and check this rank's batch of a step, waiting for shards that are still being fetched."""
        first = step * self._global_batch + self._row0
        self._look_ahead(first, first + self._num_rows)
        shards, rows = self._locate(step)
        distinct, which = np.unique(shards, return_inverse=True)
        ids = rows_of([self._cache.open(int(shard)) for shard in distinct], which, rows)
        self._cache.prefetch(self._next_window)  # Not earlier: the first batch of a run waits for its own window only.
        row_ids = self._order.row_ids(shards, rows)
        self._check(ids, row_ids)
        return RowBatch(step, self._row0, ids, row_ids, Receipt.of(row_ids))

    def _check(self, ids: NDArray[Any], row_ids: NDArray[np.int64]) -> None:
        """Refuse a row with a token id outside the vocabulary.

        Without this check the id would cause an index error in the embedding, which on a GPU names neither row nor id.
        """
        vocab_size = self._cache.manifest.tokenizer.vocab_size
        if ids.max() >= vocab_size:
            row = int(np.flatnonzero((ids >= vocab_size).any(1))[0])
            raise ManifestMismatch(
                f"{self._cache.store.url}/{self._cache.manifest.row_name(int(row_ids[row]))}: token id "
                f"{int(ids[row].max())} is outside the vocabulary of {vocab_size}; build the corpus again"
            )

    def _locate(self, step: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the shard and the row of each position of this rank in a step, as two int64 arrays [G / W].

        G is the global batch and W the number of ranks. The positions of `_LOCATED` steps are located at once, which
        costs little more than locating those of one step.
        """
        block, number = divmod(step, _LOCATED)
        if self._located is None or self._located_block != block:  # The block's first step may have been skipped.
            steps = np.arange(_LOCATED) + block * _LOCATED
            positions = steps[:, None] * self._global_batch + np.arange(self._row0, self._row0 + self._num_rows)
            _, shards, rows = self._order.locate(positions.ravel())
            self._located = shards.reshape(positions.shape), rows.reshape(positions.shape)
            self._located_block = block
        return self._located[0][number], self._located[1][number]

    def _look_ahead(self, first: int, end: int) -> None:
        """Begin to fetch the shards of the positions [first, end), and close shards that are no longer needed.

        Shards are fetched in windows, the groups of shards whose rows are shuffled together. The window after `end` is
        stored in `_next_window`, so that the caller can fetch it later. The call does nothing if an earlier call has
        covered the positions already.
        """
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
