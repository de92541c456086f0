"""Open verified shards: mapped in place from a local corpus, or from the node's cache if the corpus is on S3.

Guarantee: when a process first opens a shard, its bytes have the SHA-256 and the number of rows that the manifest
lists. Every copy of a row that `ShardCache.read_rows` returns has the checksum that the row had then, so a bit that
flips on the disk afterwards does not reach a batch. A cached shard is then fetched again, and the reading goes on; a
local one ends the run with an error that names the shard and the block. No shard is skipped silently.

How: `prefetch` queues shards for `fetch_threads` threads, which fetch them (`node_disk_cache.py`) and read them once:
the SHA-256 and the checksums of the rows (`receipt.py`) are made of the same bytes. `open` waits for its shard
and maps it into memory. The checksums stay in memory, for local and for cached shards alike, so they need no file of
their own that could be damaged, and older corpora have them, too. Checksums of closed shards are kept up to
`_KEPT_BYTES` (8 bytes a row); a shard whose checksums are not kept is verified again when it is opened again. The
threads are daemons: a process that ends does not wait for a download. The next process that needs the shard deletes
the unfinished file.

Limits: all methods must be called by the same thread; in a run, it is the thread of the loader. A file that becomes
shorter while it is mapped ends the process with SIGBUS; the next start refuses it by its size.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from electra_dist.config import DataConfig
from electra_dist.data.corpora import Corpora
from electra_dist.data.manifest import ShardEntry
from electra_dist.data.node_disk_cache import NodeCache
from electra_dist.data.receipt import Checksums
from electra_dist.data.shard import ChangedRow, Shard, rows_of
from electra_dist.data.shard_cache.cache_folder import SHARDS_DIR
from electra_dist.data.shard_cache.peer_group import PeerGroup
from electra_dist.errors import ManifestMismatch, StoreExhausted, StoreMissing, UserError
from electra_dist.escapes import printable
from electra_dist.store.atomic_files import file_sha256, readable

_KEPT_BYTES = 64 << 20  # Limit on the checksums that are kept in memory for the next opening of their shards.
_READINGS = 5  # Times that a shard or a row is read before its bytes count as wrong for good.
_CLOSE_S = 2.0  # Seconds for which `close` waits for threads that are in the middle of a download.


class ShardCache:
    """Shards of a corpus that a process has open or needs next, and the threads that fetch and verify them."""

    def __init__(
        self,
        corpora: Corpora,
        directory: Path,
        fetch_threads: int = 8,
        limit_bytes: int | None = None,
        peers: PeerGroup | None = None,
    ) -> None:
        """Start the threads. For a corpus on S3, `directory`, `limit_bytes` and `peers` go to its `NodeCache`."""
        self.corpora = corpora
        self._peers = peers
        digests = {shard.entry.sha256 for shard in corpora.shards}
        self._node_cache = NodeCache(directory, limit_bytes, digests, peers)
        self._shards: dict[int, Shard] = {}  # the open shards, by index in the manifest
        # For each shard that is queued, being fetched or open: the checksums of its rows, once it is verified.
        self._prepared: dict[int, Future[Checksums]] = {}
        self._checksums: dict[int, Checksums] = {}  # of shards that this process has verified, up to `_KEPT_BYTES`
        # Shards to fetch and verify, with the futures of `_prepared`. The thread that takes None ends.
        self._queue: queue.SimpleQueue[tuple[int, Future[Checksums]] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(fetch_threads)]
        for thread in self._threads:
            thread.start()

    @property
    def node_cache(self) -> NodeCache:
        """Return the cache on this node's disk for shards from S3, so that a server can send them to other nodes."""
        return self._node_cache

    @property
    def refetches(self) -> int:
        """Return how often a shard was fetched again because its bytes were wrong, on arrival or on the disk."""
        return self._node_cache.refetches

    def open(self, shard_index: int) -> Shard:
        """Return a verified, memory-mapped shard by its index in the manifest; wait for its download if necessary.

        The shard stays open until `keep_only` or `close` closes it. Until then, further calls return at once.
        """
        is_second_try = False
        while shard_index not in self._shards:
            self.prefetch([shard_index])  # Does nothing if the shard is queued already.
            try:
                checksums = self._prepared[shard_index].result()  # Waits, and raises the background thread's error.
            except UserError:
                del self._prepared[shard_index]  # A later call tries again.
                raise
            self._keep_checksums(shard_index, checksums)
            try:
                shard = self._map(shard_index, checksums)
            except ManifestMismatch:
                if is_second_try:
                    raise
                is_second_try = True
                self._forget(shard_index)  # Its headers may have changed since it was verified.
                continue
            if shard is not None:
                self._shards[shard_index] = shard
            else:
                # Another process evicted the shard before it was mapped; the next round fetches it again.
                del self._prepared[shard_index]
        return self._shards[shard_index]

    def read_rows(self, shard_of_row: NDArray[np.int64], row_in_shard: NDArray[np.int64]) -> NDArray[Any]:
        """Return verified copies of rows from any shards, [k, seq_len]; open the shards that are not open yet.

        `shard_of_row` [k] are shard indices in the manifest. If a copy has a wrong checksum, its shard is verified
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
                self._verify_again(int(distinct_shards[error.shard_index]), error.row, changed.block_of_row(error.row))
        raise StoreExhausted(
            f"{changed.path}: rows were changed {_READINGS} times in a row after they were verified; test the memory "
            "and the disk of this node"
        )

    def _verify_again(self, index: int, row: int, block: int) -> None:
        """Verify a shard again because one of its rows has changed; fetch a damaged shard again. Report on stderr."""
        path = self._shards[index].path
        place = f"row {row}, in block {block} of this shard, has changed on the disk after the shard was verified"
        refetches_before = self.refetches
        self._forget(index)
        try:
            self.open(index)
        except ManifestMismatch:
            raise ManifestMismatch(
                f"{path}: {place}; check the disk, restore the file or build the corpus again"
            ) from None
        outcome = "fetched again" if self.refetches > refetches_before else "verified again and good"
        print(printable(f"{path}: {place}; {outcome}, and the reading goes on"), file=sys.stderr, flush=True)

    def _keep_checksums(self, index: int, checksums: Checksums) -> None:
        kept_bytes = sum(kept.nbytes for kept in self._checksums.values())
        if kept_bytes + checksums.nbytes <= _KEPT_BYTES:
            self._checksums[index] = checksums

    def _forget(self, index: int) -> None:
        """Close a shard and forget that it was verified, so that its next opening verifies it again."""
        self._checksums.pop(index, None)
        self._prepared.pop(index, None)
        if index in self._shards:
            self._shards.pop(index).close()

    def prefetch(self, shard_indices: Iterable[int]) -> None:
        """Begin to fetch and verify shards in the background, in this order; skip shards that are open or queued.

        With `peers`, shards that other nodes wait for come first. If a fetch fails, `open` raises its error. The cache
        keeps the shards until `keep_only` drops them, unless the disk becomes full.
        """
        new_indices = [index for index in map(int, shard_indices) if index not in self._prepared]
        if self._peers is not None:
            # Other nodes wait for the shards that this node fetches for them, so these come first.
            peers = self._peers
            new_indices.sort(key=lambda index: peers.distance(self.corpora.shards[index].entry.sha256))
        futures: list[Future[Checksums]] = [Future() for _ in new_indices]
        self._prepared.update(zip(new_indices, futures, strict=True))
        if new_indices:
            # This must come before the downloads begin, because they may delete shards to make room.
            self._protect_wanted()
        for item in zip(new_indices, futures, strict=True):
            self._queue.put(item)

    def keep_only(self, shard_indices: Iterable[int]) -> None:
        """Close all shards except these and cancel their downloads, but complete a download that has begun.

        The node's cache may delete a shard once no process has it open.
        """
        indices_to_keep = set(map(int, shard_indices))
        for index in self._prepared.keys() - indices_to_keep:
            download = self._prepared.pop(index)
            download.cancel()
            if index in self._shards:
                shard = self._shards.pop(index)
                shard.close()
        self._protect_wanted()

    def _protect_wanted(self) -> None:
        """Keep the node's cache from deleting shards that are open or queued."""
        shards = self.corpora.shards
        self._node_cache.wanted = frozenset(shards[index].entry.sha256 for index in self._prepared)

    def close(self) -> None:
        """Close all shards and wait up to two seconds for the threads to end; the owner must call it."""
        self.keep_only([])
        for _ in self._threads:
            self._queue.put(None)  # Each thread ends at the first None that it takes.
        deadline = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        """Fetch and verify queued shards until the queue yields None; the body of each background thread."""
        while True:
            item = self._queue.get()
            if item is None:
                return
            index, future = item
            was_cancelled = not future.set_running_or_notify_cancel()
            if was_cancelled:
                continue
            try:
                checksums = self._prepare(index)
            except BaseException as error:  # noqa: BLE001 - `open` raises it in the loader's thread.
                future.set_exception(error)
            else:
                future.set_result(checksums)

    def _prepare(self, index: int) -> Checksums:
        """Fetch a shard if this node lacks it, verify it unless that was done before, and return its checksums."""
        store, entry = self.corpora.shards[index]
        local_path = store.local_path(entry.name)
        kept = self._checksums.get(index)
        # A shard whose checksums are kept is not verified again, because each copy of a row will be.
        if kept is not None:
            if local_path is None:
                self._node_cache.ensure(store, entry, verify=False)
            return kept
        if local_path is not None:
            checksums = self._verified_checksums(local_path, entry)
            if checksums is None:
                raise ManifestMismatch(
                    f"{local_path}: not the shard that corpus.json lists, which has {entry.bytes} bytes and sha256 "
                    f"{entry.sha256[:12]}...; restore the file or build the corpus again"
                )
            return checksums
        path = self._node_cache.path(entry)
        num_wrong = 0
        while num_wrong < _READINGS:
            self._node_cache.ensure(store, entry, verify=num_wrong > 0)
            try:
                checksums = self._verified_checksums(path, entry)
            except StoreMissing:
                continue  # Another process evicted the shard meanwhile.
            if checksums is not None:
                return checksums
            num_wrong += 1
        raise StoreExhausted(
            f"{path}: wrong bytes {_READINGS} times in a row, although those that were fetched were right; test the "
            "memory and the disk of this node, or set data.cache_dir to another disk"
        )

    def _verified_checksums(self, path: Path, entry: ShardEntry) -> Checksums | None:
        """Return the checksums of a file's rows; None if its size or SHA-256 differs from the manifest entry."""
        with readable(path):
            if path.stat().st_size != entry.bytes:
                return None
            try:
                shard = Shard(path, self.corpora.seq_len, self.corpora.numpy_dtype)
            except ManifestMismatch:
                if file_sha256(path) == entry.sha256:
                    raise
                return None
        try:
            digest, checksums = shard.digest_and_checksums()
        finally:
            shard.close()
        return checksums if digest == entry.sha256 else None

    def _map(self, index: int, checksums: Checksums) -> Shard | None:
        """Open and return a verified shard; None if another process has deleted it from the node's cache meanwhile."""
        store, entry = self.corpora.shards[index]
        local_path = store.local_path(entry.name)
        if local_path is not None:
            shard = Shard(local_path, self.corpora.seq_len, self.corpora.numpy_dtype, checksums=checksums)
        else:
            cached_shard = self._map_cached(self._node_cache.path(entry), checksums)
            if cached_shard is None:
                return None
            shard = cached_shard
        if shard.num_rows != entry.rows:
            raise ManifestMismatch(
                f"{shard.path}: has {shard.num_rows} rows, but corpus.json lists {entry.rows}; build the corpus "
                f"again, or delete corpus.json and run `electra-dist corpus index`"
            )
        return shard

    def _map_cached(self, path: Path, checksums: Checksums) -> Shard | None:
        """Open a cached shard, locked against deletion, and mark it as just used; None if it has been deleted."""
        try:
            shard = Shard(path, self.corpora.seq_len, self.corpora.numpy_dtype, lock=True, checksums=checksums)
            os.utime(path)
        except (StoreMissing, FileNotFoundError):
            return None
        if not shard.is_linked:  # The file was deleted between its opening and the lock.
            return None
        return shard


def open_cache(corpora: Corpora, data: DataConfig, folder: Path, peers: PeerGroup | None = None) -> ShardCache:
    """Return a new cache of the shards of `corpora` for this process, which the caller must close.

    All ranks of the node share `folder`; corpora in local folders do not use it. `peers` are other nodes: a shard is
    requested from them first, and from the store only if they lack it.
    """
    limit_bytes = None
    if data.cache_limit_gb is not None:
        limit_bytes = round(data.cache_limit_gb * 1e9)
    return ShardCache(corpora, folder / SHARDS_DIR, data.fetch_threads, limit_bytes, peers)
