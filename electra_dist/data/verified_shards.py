"""Open verified shards: mapped in place from a local corpus, or from the node's cache if the corpus is on S3.

Guarantee: a shard that `ShardCache.open` returns has the digest and the number of rows that the manifest lists; both
are checked once per process. No shard is skipped silently: one that is missing or damaged ends the run with an error
that names it.

How: `prefetch` queues shards for `fetch_threads` threads, which fetch (`node_disk_cache.py`) and verify them. `open`
waits for its shard and maps it. The threads are daemons: a process that ends does not wait for a download. An
unfinished file is deleted by the next process that needs the shard.

Cost: one SHA-256 of each shard per process, outside the training thread (10 to 40 ms for 16 MB); one memory map and
one file descriptor for each open shard.

Limits: `open`, `prefetch`, `keep_only` and `close` must be called by one thread, which is the loader's.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path

from electra_dist.data.corpus_manifest import CorpusManifest
from electra_dist.data.node_disk_cache import NodeCache
from electra_dist.data.shard import Shard
from electra_dist.errors import ManifestMismatch, StoreMissing
from electra_dist.store.atomic_files import file_sha256, readable
from electra_dist.store.interface import Store

_CLOSE_S = 2.0  # How long `close` waits for threads that are in the middle of a download.


class ShardCache:
    """Shards of one corpus that one process has open, with threads that fetch and verify the next ones.

    It holds threads, memory maps and file locks: call `close`.
    """

    def __init__(
        self,
        store: Store,
        manifest: CorpusManifest,
        directory: Path,
        fetch_threads: int = 8,
        limit_bytes: int | None = None,
    ) -> None:
        """Start the threads; no file is touched until the first shard is asked for.

        Args:
            store: The corpus.
            manifest: Its manifest.
            directory: Cache folder of this node; unused if the corpus is in a local folder.
            fetch_threads: Number of shards fetched or verified at a time.
            limit_bytes: Limit on the size of the shards in `directory`; None for the free space of the disk.
        """
        self.store = store
        self.manifest = manifest
        self._node_cache = NodeCache(directory, limit_bytes)
        self._shards: dict[int, Shard] = {}  # the open shards, by index in the manifest
        self._prepared: dict[int, Future[None]] = {}  # done when the shard is on this node and verified
        self._verified: set[int] = set()
        self._queue: queue.SimpleQueue[tuple[int, Future[None]] | None] = queue.SimpleQueue()  # None ends a thread
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(fetch_threads)]
        for thread in self._threads:
            thread.start()

    @property
    def refetches(self) -> int:
        """Return how many shards were fetched again because their bytes were wrong, since this object was made."""
        return self._node_cache.refetches

    def open(self, shard_index: int) -> Shard:
        """Return a shard, verified and mapped; waits for its download if necessary.

        The shard stays open until `keep_only` or `close`, so that a second call returns at once.

        Args:
            shard_index: Index of the shard in the manifest.

        Raises:
            StoreError: The shard is missing (StoreMissing), could not be fetched correctly (StoreExhausted), or the
                disk is full.
            ManifestMismatch: The shard is not the one that the manifest lists.
        """
        while shard_index not in self._shards:
            self.prefetch([shard_index])
            self._prepared[shard_index].result()
            shard = self._map(shard_index)
            if shard is None:
                del self._prepared[shard_index]  # Evicted before it was mapped; the next round fetches it again.
            else:
                self._shards[shard_index] = shard
        return self._shards[shard_index]

    def prefetch(self, shard_indices: Iterable[int]) -> None:
        """Begin to fetch and verify shards in the background, in the order given; returns at once.

        Shards that are open or already queued are skipped. An error is raised by the `open` of its shard.
        """
        for index in map(int, shard_indices):
            if index not in self._prepared:
                future: Future[None] = Future()
                self._prepared[index] = future
                self._queue.put((index, future))

    def keep_only(self, shard_indices: Iterable[int]) -> None:
        """Close all shards but these, and cancel queued downloads of others; the node's cache may then evict those."""
        keep = set(map(int, shard_indices))
        for index in self._prepared.keys() - keep:
            self._prepared.pop(index).cancel()
            if index in self._shards:
                self._shards.pop(index).close()

    def close(self) -> None:
        """Close all shards and stop the threads.

        A thread in the middle of a download is not waited for longer than two seconds; it ends with the process.
        """
        self.keep_only([])
        for _ in self._threads:
            self._queue.put(None)
        deadline = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        """Prepare queued shards, one after another, until the queue yields None. Runs in each background thread."""
        while True:
            item = self._queue.get()
            if item is None:
                return
            index, future = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                self._prepare(index)
            except BaseException as error:  # noqa: BLE001 - `open` raises it in the loader's thread.
                future.set_exception(error)
            else:
                future.set_result(None)

    def _prepare(self, index: int) -> None:
        """Fetch the shard to this node unless it is there, and verify its digest once per process."""
        entry = self.manifest.shards[index]
        path = self.store.local_path(entry.name)
        if path is None:
            self._node_cache.ensure(self.store, entry, verify=index not in self._verified)
        elif index not in self._verified:
            with readable(path):
                is_good = path.stat().st_size == entry.bytes and file_sha256(path) == entry.sha256
            if not is_good:
                raise ManifestMismatch(
                    f"{path}: not the shard that corpus.json lists (other size or sha256); restore the file or build "
                    f"the corpus again"
                )
        self._verified.add(index)

    def _map(self, index: int) -> Shard | None:
        """Open a prepared shard; return None if another process has evicted it from the node's cache meanwhile."""
        entry = self.manifest.shards[index]
        path = self.store.local_path(entry.name)
        if path is not None:
            shard = Shard(path, self.manifest.seq_len, self.manifest.numpy_dtype)
        else:
            path = self._node_cache.path(entry)
            try:
                shard = Shard(path, self.manifest.seq_len, self.manifest.numpy_dtype, lock=True)
                os.utime(path)  # The eviction deletes the files with the oldest times first.
            except (StoreMissing, FileNotFoundError):
                return None
            if not shard.is_linked:
                return None
        if shard.num_rows != entry.rows:
            raise ManifestMismatch(
                f"{path}: has {shard.num_rows} rows, but corpus.json says {entry.rows}; build the corpus again, or "
                f"delete corpus.json and run `electra-dist corpus index`"
            )
        return shard
