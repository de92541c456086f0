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

from electra_dist.data.corpus_manifest import CorpusManifest, ShardEntry
from electra_dist.data.node_disk_cache import NodeCache
from electra_dist.data.shard import Shard
from electra_dist.errors import ManifestMismatch, StoreMissing
from electra_dist.store.atomic_files import file_sha256, readable
from electra_dist.store.interface import Store

_CLOSE_S = 2.0  # Seconds for which `close` waits for threads that are in the middle of a download.


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
            store: Store that holds the corpus.
            manifest: Manifest of the corpus, with the size and SHA-256 of each shard.
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
        """Return how many times a shard was fetched again because its bytes did not have the right SHA-256.

        Counted since this object was created; always 0 for a corpus in a local folder, which is not fetched.
        """
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
            self.prefetch([shard_index])  # Does nothing if the shard is queued already.
            self._prepared[shard_index].result()  # Waits, and raises the error of the background thread.
            shard = self._map(shard_index)
            if shard is not None:
                self._shards[shard_index] = shard
            else:
                # Another process evicted the shard before it was mapped; the next round fetches it again.
                del self._prepared[shard_index]
        return self._shards[shard_index]

    def prefetch(self, shard_indices: Iterable[int]) -> None:
        """Begin to fetch and verify shards in the background, in the order given; returns at once.

        Shards that are open or already queued are skipped. If a fetch fails, `open` of that shard raises the error.

        Args:
            shard_indices: Indices of the shards in the manifest.
        """
        for index in map(int, shard_indices):
            if index not in self._prepared:
                future: Future[None] = Future()
                self._prepared[index] = future
                self._queue.put((index, future))

    def keep_only(self, shard_indices: Iterable[int]) -> None:
        """Close all other shards and cancel their queued downloads; the node's cache may then evict them.

        A download that has begun is not interrupted.

        Args:
            shard_indices: Indices in the manifest of the shards that stay open or queued.
        """
        indices_to_keep = set(map(int, shard_indices))
        for index in self._prepared.keys() - indices_to_keep:
            download = self._prepared.pop(index)
            download.cancel()
            if index in self._shards:
                shard = self._shards.pop(index)
                shard.close()

    def close(self) -> None:
        """Close all shards and stop the threads, waiting two seconds at most.

        A thread that is in the middle of a download for longer is a daemon, which ends with the process.
        """
        self.keep_only([])
        for _ in self._threads:
            self._queue.put(None)  # Each thread ends at the first None that it takes.
        deadline = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        """Prepare queued shards, one after another, until the queue yields None. Runs in each background thread.

        The future of a shard is done when the shard is on this node and verified, or holds the error.
        """
        while True:
            item = self._queue.get()
            if item is None:
                return
            index, future = item
            was_cancelled = not future.set_running_or_notify_cancel()
            if was_cancelled:
                continue
            try:
                self._prepare(index)
            except BaseException as error:  # noqa: BLE001 - `open` raises it in the loader's thread.
                future.set_exception(error)
            else:
                future.set_result(None)

    def _prepare(self, index: int) -> None:
        """Fetch a shard to this node unless it is there, and verify its digest once per process.

        Args:
            index: Index of the shard in the manifest.

        Raises:
            StoreError: The shard cannot be read or fetched.
            ManifestMismatch: A shard of a local corpus has another size or digest than the manifest lists.
        """
        entry = self.manifest.shards[index]
        must_verify = index not in self._verified
        local_path = self.store.local_path(entry.name)
        if local_path is None:
            self._node_cache.ensure(self.store, entry, verify=must_verify)
        elif must_verify:
            _verify_local_shard(local_path, entry)
        self._verified.add(index)

    def _map(self, index: int) -> Shard | None:
        """Open a prepared shard; return None if another process has evicted it from the node's cache meanwhile.

        Args:
            index: Index of the shard in the manifest.

        Raises:
            ManifestMismatch: The shard has another number of rows than the manifest lists, or is not a shard.
        """
        entry = self.manifest.shards[index]
        local_path = self.store.local_path(entry.name)
        if local_path is not None:
            shard = Shard(local_path, self.manifest.seq_len, self.manifest.numpy_dtype)
        else:
            cached_shard = self._map_cached(self._node_cache.path(entry))
            if cached_shard is None:
                return None
            shard = cached_shard
        if shard.num_rows != entry.rows:
            raise ManifestMismatch(
                f"{shard.path}: has {shard.num_rows} rows, but corpus.json says {entry.rows}; build the corpus again, "
                f"or delete corpus.json and run `electra-dist corpus index`"
            )
        return shard

    def _map_cached(self, path: Path) -> Shard | None:
        """Open a shard in the node's cache with a lock that prevents its eviction; return None if it was evicted.

        Opening sets the file's modification time to now, because the eviction deletes the oldest files first.
        """
        try:
            shard = Shard(path, self.manifest.seq_len, self.manifest.numpy_dtype, lock=True)
            os.utime(path)
        except (StoreMissing, FileNotFoundError):
            return None
        if not shard.is_linked:  # The file was deleted between its opening and the lock.
            return None
        return shard


def _verify_local_shard(path: Path, entry: ShardEntry) -> None:
    """Verify that a shard of a corpus in a local folder has the size and the SHA-256 of its manifest entry.

    Raises:
        StoreMissing: The file does not exist.
        ManifestMismatch: The size or the SHA-256 differs.
    """
    with readable(path):
        is_good = path.stat().st_size == entry.bytes and file_sha256(path) == entry.sha256
    if not is_good:
        raise ManifestMismatch(
            f"{path}: not the shard that corpus.json lists, which has {entry.bytes} bytes and sha256 "
            f"{entry.sha256[:12]}...; restore the file or build the corpus again"
        )
