"""Shards at hand: mapped in place from a local corpus, or from the node's cache when the corpus is on S3.

Guarantee: a shard that `open` returns has the digest and the number of rows that the manifest promises, checked once
per process. Bytes are never skipped silently: what cannot be had or is wrong is named and ends the run.

How: `prefetch` queues shards to `fetch_threads` threads that fetch (`node_cache.py`) and verify; `open` waits for its
shard and maps it. Threads are daemons: a process that ends does not wait for a download, and what one leaves behind
heals.

Cost: one sha256 of each shard per process, off the training thread (10 to 40 ms for 16 MB), one map and one file
descriptor per open shard.

Where it stops: open, prefetch, keep_only and close belong to one thread, the loader's.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path

from electra_dist.data.manifest import CorpusManifest
from electra_dist.data.node_cache import NodeCache
from electra_dist.data.shard import Shard
from electra_dist.errors import ManifestMismatch, StoreMissing
from electra_dist.store.files import file_sha256, readable
from electra_dist.store.interface import Store

_CLOSE_S = 2.0  # patience with threads that are in the middle of a download


class ShardCache:
    """The shards of one corpus, for one process."""

    def __init__(
        self,
        store: Store,
        manifest: CorpusManifest,
        directory: Path,
        fetch_threads: int = 8,
        limit_bytes: int | None = None,
    ) -> None:
        """Nothing is touched until the first shard is asked for.

        Args:
            directory: cache folder of this node; unused when the corpus is local.
            limit_bytes: size to keep that folder below; None: the disk is the limit.
        """
        self.store = store
        self.manifest = manifest
        self._node = NodeCache(directory, limit_bytes)
        self._shards: dict[int, Shard] = {}
        self._prepared: dict[int, Future[None]] = {}
        self._verified: set[int] = set()
        self._queue: queue.SimpleQueue[tuple[int, Future[None]] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(fetch_threads)]
        for thread in self._threads:
            thread.start()

    @property
    def refetches(self) -> int:
        """Shards that were fetched again because their bytes were wrong."""
        return self._node.refetches

    def open(self, shard_index: int) -> Shard:
        """The shard, verified and mapped. It stays open until `keep_only` or `close`.

        Raises:
            StoreError: it cannot be had (StoreExhausted, StoreMissing), or the disk is full.
            ManifestMismatch: it is not what the manifest says.
        """
        while shard_index not in self._shards:
            self.prefetch([shard_index])
            self._prepared[shard_index].result()
            shard = self._map(shard_index)
            if shard is None:
                del self._prepared[shard_index]  # evicted before it was opened: have it fetched again
            else:
                self._shards[shard_index] = shard
        return self._shards[shard_index]

    def prefetch(self, shard_indices: Iterable[int]) -> None:
        """Begin to fetch and verify shards in the background, in this order. An error waits for `open`."""
        for index in map(int, shard_indices):
            if index not in self._prepared:
                future: Future[None] = Future()
                self._prepared[index] = future
                self._queue.put((index, future))

    def keep_only(self, shard_indices: Iterable[int]) -> None:
        """Close all other shards; the node's cache may evict them then."""
        keep = set(map(int, shard_indices))
        for index in self._prepared.keys() - keep:
            self._prepared.pop(index).cancel()
            if index in self._shards:
                self._shards.pop(index).close()

    def close(self) -> None:
        """Close all shards and stop the threads; one in the middle of a download ends with the process."""
        self.keep_only([])
        for _ in self._threads:
            self._queue.put(None)
        deadline = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            index, future = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                self._prepare(index)
            except BaseException as error:  # noqa: BLE001 - raised in the thread that opens the shard
                future.set_exception(error)
            else:
                future.set_result(None)

    def _prepare(self, index: int) -> None:
        """Have the shard on this node, and right."""
        entry = self.manifest.shards[index]
        path = self.store.local_path(entry.name)
        if path is None:
            self._node.ensure(self.store, entry, verify=index not in self._verified)
        elif index not in self._verified:
            with readable(path):
                good = path.stat().st_size == entry.bytes and file_sha256(path) == entry.sha256
            if not good:
                raise ManifestMismatch(
                    f"{path}: not the shard that corpus.json lists; restore it or build the corpus again"
                )
        self._verified.add(index)

    def _map(self, index: int) -> Shard | None:
        """None when the shard was evicted meanwhile."""
        entry, manifest = self.manifest.shards[index], self.manifest
        path = self.store.local_path(entry.name)
        if path is not None:
            shard = Shard(path, manifest.seq_len, manifest.numpy_dtype)
        else:
            path = self._node.path(entry)
            try:
                shard = Shard(path, manifest.seq_len, manifest.numpy_dtype, lock=True)
                os.utime(path)  # for the eviction of what was longest not used
            except (StoreMissing, FileNotFoundError):
                return None
            if not shard.is_linked:
                return None
        if shard.num_rows != entry.rows:
            raise ManifestMismatch(f"{path}: {shard.num_rows} rows, but corpus.json says {entry.rows}; index it again")
        return shard
