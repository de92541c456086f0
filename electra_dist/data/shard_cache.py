"""Keep the shards that a process reads open, fetch those that it needs next, and copy rows from them.

Guarantee: an opened shard had the SHA-256 and the number of rows that the manifest lists, read through the descriptor
by which it is mapped. Every copy of a row that `ShardCache.read_rows` returns has the checksum that the row had then,
so a bit that flips on the disk afterwards does not reach a batch. A cached shard with other bytes is fetched again,
and the reading goes on; a local one ends the run with an error that names the shard and the block. No shard is skipped
silently.

How: a shard of a local corpus is opened in place, one on S3 in the node's cache. Threads open the shards that are
needed next. The checksums of rows (`receipt.py`) stay in memory, so they need no file of their own that could be
damaged, and corpora of others have them, too. A shard stays open, and a cached one locked against deletion, until it
is no longer needed. The threads are daemons: a process that ends does not wait for a download. The next process that
needs the shard deletes the unfinished file.

Limits: all methods must be called by the same thread; in a run, it is the thread of the loader. A file that becomes
shorter while it is mapped ends the process with SIGBUS; the next start refuses it by its size.
"""

from __future__ import annotations

import contextlib
import os
import queue
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from electra_dist.config import DataConfig
from electra_dist.data.corpora import Corpora, StoredShard
from electra_dist.data.manifest import ShardEntry
from electra_dist.data.node_cache import SHARDS_DIR, NodeCache
from electra_dist.data.peer_group import PeerGroup
from electra_dist.data.shard import ChangedRow, Shard, rows_of
from electra_dist.errors import ManifestMismatch, StoreAway, StoreExhausted, StoreMissing, UserError
from electra_dist.escapes import printable
from electra_dist.store.atomic_files import file_sha256, readable
from electra_dist.store.interface import fulfil
from electra_dist.store.patience import waits

_TRIES = 5  # Times that a cached shard may have wrong bytes, or be deleted before it is open.
_READINGS = 5  # Times that rows are read before their bytes count as wrong for good.
_OTHER_FILES = 512  # Files and connections of a process besides its open shards.
_CLOSE_S = 2.0  # Seconds for which `close` waits for threads that are in the middle of a download.


class ShardCache:
    """Shards of a run's corpora that a process has open or needs next, and the threads that fetch and verify them."""

    def __init__(
        self,
        corpora: Corpora,
        directory: Path,
        fetch_threads: int = 8,
        limit_bytes: int | None = None,
        peers: PeerGroup | None = None,
    ) -> None:
        """Start the threads. For shards on S3, `directory`, `limit_bytes` and `peers` go to the `NodeCache`."""
        self.corpora = corpora
        self.patience = corpora.patience
        self.node_cache = NodeCache(directory, limit_bytes, {shard.entry.sha256 for shard in corpora.shards}, peers)
        self._peers = peers
        # The shards that are open, being verified or queued, by index.
        self._shards: dict[int, Shard | Future[Shard]] = {}
        # Shards to fetch and verify, with their futures. The thread that takes None ends.
        self._queue: queue.SimpleQueue[tuple[int, Future[Shard]] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._open_queued_shards, daemon=True) for _ in range(fetch_threads)]
        for thread in self._threads:
            thread.start()

    def prefetch(self, shard_indices: Iterable[int]) -> None:
        """Begin to fetch and verify shards in the background, in this order; skip shards that are open or queued.

        With `peers`, shards that other nodes wait for come first. If a fetch fails, `open` tries it again. The cache
        keeps the shards until `keep_only` drops them, unless the disk becomes full.
        """
        new_indices = [index for index in dict.fromkeys(map(int, shard_indices)) if index not in self._shards]
        if not new_indices:
            return
        peers = self._peers
        if peers is not None:
            # Other nodes wait for the shards that this node fetches for them, so these come first.
            new_indices.sort(key=lambda index: peers.distance(self.corpora.shards[index].entry.sha256))
        futures: list[Future[Shard]] = [Future() for _ in new_indices]
        self._shards.update(zip(new_indices, futures, strict=True))
        # This must come before the downloads begin, because they may delete shards to make room.
        self._protect_wanted()
        for item in zip(new_indices, futures, strict=True):
            self._queue.put(item)

    def open(self, shard_index: int) -> Shard:
        """Return a shard, verified and mapped into memory, by its index in `corpora.shards`; wait for it if necessary.

        If the disk is full or does not respond, wait for that, too. The shard stays open until `keep_only` or `close`
        closes it; until then, further calls return at once.
        """
        shard = self._shards.get(shard_index)
        # Every batch asks for all shards of its window, so one that is open must cost nothing.
        return shard if isinstance(shard, Shard) else self._wait_until_open(shard_index)

    def keep_only(self, shard_indices: Iterable[int]) -> None:
        """Close all shards except these and cancel their downloads, but complete a download that has begun.

        The node's cache may delete a shard once no process has it open.
        """
        for index in self._shards.keys() - set(map(int, shard_indices)):
            self._drop(index)
        self._protect_wanted()

    def close(self) -> None:
        """Close all shards and wait up to two seconds for the threads to end; the owner must call it."""
        self.keep_only([])
        for _ in self._threads:
            self._queue.put(None)  # Each thread ends at the first None that it takes.
        deadline = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def read_rows(self, shard_of_row: NDArray[np.int64], row_in_shard: NDArray[np.int64]) -> NDArray[Any]:
        """Return verified copies of rows from any shards, [k, seq_len]; open the shards that are not open yet.

        `shard_of_row` [k] are indices in `corpora.shards`. If a copy has a wrong checksum, its shard is verified
        again, and a damaged shard from S3 is fetched again. Raises ManifestMismatch if a local shard is damaged, and
        StoreExhausted if copies are wrong again and again although their shards are good.
        """
        # `rows_of` needs each shard once, and for each row the index of its shard in that list.
        distinct_shards, index_of_row = np.unique(shard_of_row, return_inverse=True)
        for _ in range(_READINGS):
            shards = [self.open(int(index)) for index in distinct_shards]
            try:
                return rows_of(shards, index_of_row, row_in_shard)
            except ChangedRow as error:
                changed = shards[error.shard_index]
                self._verify_again(int(distinct_shards[error.shard_index]), changed, error.row)
        raise StoreExhausted(
            f"{changed.path}: rows were changed {_READINGS} times in a row after they were verified; test the memory "
            "and the disk of this node"
        )

    def whole_shards(self, shard_indices: Iterable[int]) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yield for each shard its index and copies of all of its rows, [rows, seq_len].

        Each shard is closed before the next one is opened, so that the node's cache may delete its file.
        `shard_indices` is consumed one by one, so that a progress bar may wrap it.
        """
        for index in shard_indices:
            num_rows = self.corpora.shards[index].entry.rows
            yield index, self.read_rows(np.full(num_rows, index), np.arange(num_rows))
            self.keep_only([])

    def count_tokens(self, shard_indices: Iterable[int]) -> NDArray[np.int64]:
        """Return how often each token id, [PAD] included, occurs in these shards, int64 [V]."""
        vocab_size = self.corpora.tokenizer.vocab_size
        count_V = np.zeros(vocab_size, np.int64)
        for _, ids_RS in self.whole_shards(shard_indices):
            count_V += np.bincount(ids_RS.reshape(-1), minlength=vocab_size)
        return count_V

    @waits
    def _wait_until_open(self, index: int) -> Shard:
        """Wait for the thread that opens a shard, which is queued if it is not; one that has failed is tried again."""
        queued = self._shards.get(index)
        if isinstance(queued, Future) and queued.done() and isinstance(queued.exception(), (UserError, OSError)):
            # What made it fail while it was fetched ahead may be gone: a disk has room after other shards are closed.
            del self._shards[index]
        self.prefetch([index])
        queued = self._shards[index]
        assert isinstance(queued, Future)
        try:
            shard = self.patience.reporter.wait_for(queued)  # raises the background thread's error
        except BaseException:
            del self._shards[index]  # A later call tries again.
            raise
        self._shards[index] = shard
        return shard

    def _verify_again(self, index: int, shard: Shard, row: int) -> None:
        """Close a shard whose row number `row` has changed on the disk, and open it again, which verifies it.

        A damaged shard from S3 is fetched again; a damaged local shard raises ManifestMismatch. A line on stderr
        tells the outcome.
        """
        block = shard.block_of_row(row)
        place = f"row {row}, in block {block} of this shard, has changed on the disk after the shard was verified"
        refetches_before = self.node_cache.refetches
        self._drop(index)
        try:
            self.open(index)
        except ManifestMismatch:
            raise ManifestMismatch(
                f"{shard.path}: {place}; check the disk, restore the file or build the corpus again"
            ) from None
        outcome = "fetched again" if self.node_cache.refetches > refetches_before else "verified again and good"
        print(printable(f"{shard.path}: {place}; {outcome}, and the reading goes on"), file=sys.stderr, flush=True)

    def _drop(self, index: int) -> None:
        shard = self._shards.pop(index)
        if isinstance(shard, Shard):
            shard.close()
        elif not shard.cancel():
            shard.add_done_callback(_close_result)

    def _protect_wanted(self) -> None:
        """Keep the node's cache from deleting shards that are open or queued."""
        self.node_cache.wanted = frozenset(self.corpora.shards[index].entry.sha256 for index in self._shards)

    def _open_queued_shards(self) -> None:
        """Open queued shards, which fetches and verifies them, until the queue yields None: the work of a thread."""
        while (item := self._queue.get()) is not None:
            index, future = item
            was_cancelled = not future.set_running_or_notify_cancel()
            if was_cancelled:
                continue
            # `open` raises the error of this thread in the loader's thread.
            fulfil(future, partial(open_verified, self.corpora.shards[index], self.corpora, self.node_cache))


def open_cache(corpora: Corpora, data: DataConfig, folder: Path, peers: PeerGroup | None = None) -> ShardCache:
    """Return a new cache of the shards of `corpora` for this process, which the caller must close.

    All ranks of the node share `folder`; corpora in local folders do not use it. `peers` are other nodes: a shard is
    requested from them first, and from the store only if they lack it. This process may open more files afterwards if
    its limit is too low for two shuffle windows.
    """
    num_files = 2 * data.shuffle_window_shards + _OTHER_FILES
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft_limit != resource.RLIM_INFINITY and soft_limit < num_files:
        new_limit = num_files if hard_limit == resource.RLIM_INFINITY else min(num_files, hard_limit)
        resource.setrlimit(resource.RLIMIT_NOFILE, (new_limit, hard_limit))
    limit_bytes = None
    if data.cache_limit_gb is not None:
        limit_bytes = round(data.cache_limit_gb * 1e9)
    return ShardCache(corpora, folder / SHARDS_DIR, data.fetch_threads, limit_bytes, peers)


def rows_of_shards(corpora: Corpora, shard_indices: Iterable[int]) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yield for each shard its index and its verified rows, [rows, seq_len], without a cache that outlasts the call.

    A shard on S3 is in a temporary folder until the next one is read. A progress bar may wrap `shard_indices`.
    """
    with (
        tempfile.TemporaryDirectory(prefix="electra-rows-") as folder,
        contextlib.closing(ShardCache(corpora, Path(folder), fetch_threads=1, limit_bytes=0)) as cache,
    ):
        yield from cache.whole_shards(shard_indices)


def open_verified(shard: StoredShard, corpora: Corpora, node_cache: NodeCache) -> Shard:
    """Open and verify a shard of `corpora`, which the caller must close; raise ManifestMismatch if it is another."""
    path = shard.local_path
    if path is None:
        return _open_in_node_cache(shard, corpora, node_cache)
    opened = _open_if_listed(path, shard.entry, corpora, is_cached=False)
    if opened is None:
        raise ManifestMismatch(
            f"{path}: not the shard that corpus.json lists, which has {shard.entry.bytes} bytes and sha256 "
            f"{shard.entry.sha256[:12]}...; restore the file or build the corpus again"
        )
    return opened


def _open_in_node_cache(shard: StoredShard, corpora: Corpora, node_cache: NodeCache) -> Shard:
    path = node_cache.path(shard.entry)
    num_wrong = 0
    num_deleted = 0  # times that another process has evicted the shard between its fetch and its opening
    while num_wrong < _TRIES and num_deleted < _TRIES:
        node_cache.ensure(shard, verify=num_wrong > 0)
        try:
            opened = _open_if_listed(path, shard.entry, corpora, is_cached=True)
        except StoreMissing:
            num_deleted += 1
            continue
        if opened is not None:
            return opened
        num_wrong += 1
    if num_deleted == _TRIES:
        raise StoreAway(
            f"{path}: deleted {_TRIES} times in a row before it could be opened, because other processes need "
            "its place; free space there, raise data.cache_limit_gb, or set data.cache_dir to a larger disk"
        )
    raise StoreExhausted(
        f"{path}: wrong bytes {_TRIES} times in a row, although those that were fetched were right; test the "
        "memory and the disk of this node, or set data.cache_dir to another disk"
    )


def _open_if_listed(path: Path, entry: ShardEntry, corpora: Corpora, *, is_cached: bool) -> Shard | None:
    """Open the shard in a file; return None if its size or SHA-256 differs from the manifest entry.

    Raises ManifestMismatch if the file is the listed one, but is no shard or has another number of rows. A file that
    `is_cached` is locked against deletion, and its time of last use is set.
    """
    with readable(path):
        if path.stat().st_size != entry.bytes:
            return None
    try:
        shard = Shard(path, corpora.seq_len, corpora.numpy_dtype, lock=is_cached, verify=True)
    except ManifestMismatch:
        if file_sha256(path) == entry.sha256:
            raise
        return None
    if shard.sha256 != entry.sha256:
        shard.close()
        return None
    if shard.num_rows != entry.rows:
        shard.close()
        raise ManifestMismatch(
            f"{path}: has {shard.num_rows} rows, but corpus.json lists {entry.rows}; build the corpus "
            f"again, or delete corpus.json and run `electra-dist corpus index`"
        )
    if is_cached:
        with contextlib.suppress(OSError):  # evicted meanwhile, or on a disk that is now read-only
            os.utime(path)  # the time of its last use
    return shard


def _close_result(future: Future[Shard]) -> None:
    if future.exception() is None:
        future.result().close()
