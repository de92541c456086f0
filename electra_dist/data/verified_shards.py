"""Open verified shards: mapped in place from a local corpus, or from the node's cache if the corpus is on S3.

Guarantee: a shard that `ShardCache.open` returns has the SHA-256 and the number of rows that the manifest lists; each
process verifies the SHA-256 of each shard once. No shard is skipped silently: one that is missing or damaged ends the
run with an error that names it.

How: `prefetch` queues shards for `fetch_threads` threads, which fetch (`node_disk_cache.py`) and verify them. `open`
waits for its shard and maps it into memory. The threads are daemons: a process that ends does not wait for a download.
The file of an interrupted download is deleted by the next process that needs the shard.

Cost: one SHA-256 of each shard per process, outside the training thread (10 to 40 ms for 16 MB); one memory map and
one file descriptor for each open shard.

Limits: `open`, `prefetch`, `keep_only` and `close` must all be called by the same thread, in a run the loader's.
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
from electra_dist.errors import ManifestMismatch, StoreMissing, UserError
from electra_dist.store.atomic_files import file_sha256, readable
from electra_dist.store.interface import Store

_CLOSE_S = 2.0  # Seconds for which `close` waits for threads that are in the middle of a download.


class ShardCache:
    """Set of the shards of one corpus that a process has open, with threads that fetch and verify further ones.

    It holds threads, memory maps and file locks; the caller must call `close` at the end.
    """

    def __init__(
        self,
        store: Store,
        manifest: CorpusManifest,
        directory: Path,
        fetch_threads: int = 8,
        limit_bytes: int | None = None,
    ) -> None:
        """Start the background threads; no file is read until the first `open` or `prefetch`.

        Args:
            store: Store that holds the corpus.
            manifest: Manifest of the corpus, with the size and SHA-256 of each shard.
            directory: Cache folder on a disk of this node; unused if the corpus is in a local folder.
            fetch_threads: Number of shards that are fetched or verified at the same time.
            limit_bytes: Size of `directory` above which the least recently used shards in it are deleted. With None
                they are deleted only when the disk is nearly full.
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

        The count begins when this object is created. It stays 0 for a corpus in a local folder, which is not fetched.
        """
        return self._node_cache.refetches

    def open(self, shard_index: int) -> Shard:
        """Return a shard, verified and mapped into memory; wait for its download if necessary.

        The shard stays open until `keep_only` or `close` closes it; until then, a second call returns it at once.

        Args:
            shard_index: Index of the shard in the manifest.

        Raises:
            StoreError: The shard is missing (StoreMissing), could not be fetched correctly (StoreExhausted), or the
                disk is full.
            ManifestMismatch: The shard is not the one that the manifest lists.
        """
        while shard_index not in self._shards:
            self.prefetch([shard_index])  # Does nothing if the shard is queued already.
            try:
                self._prepared[shard_index].result()  # Waits, and raises the error of the background thread.
            except UserError:
                del self._prepared[shard_index]  # A later call tries again.
                raise
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
        """Close all shards that are not in `shard_indices` and cancel their queued downloads.

        The node's cache may delete a shard once no process has it open. A download that has begun is completed.

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
        """Close all shards, stop the threads, and wait up to two seconds for them to end.

        If a thread is still in the middle of a download after that, the call returns anyway; the threads are daemons,
        so they do not keep the process alive.
        """
        self.keep_only([])
        for _ in self._threads:
            self._queue.put(None)  # Each thread ends at the first None that it takes.
        deadline = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        """Fetch and verify queued shards, one after another, until the queue yields None.

        This is the body of each background thread. The future that is queued with a shard is completed when the shard
        is on this node and verified; if that fails, the future receives the error, which `open` then raises.
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
        """Fetch a shard to this node unless it is there, and verify its SHA-256 unless this process has done so.

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
        """Open a shard that has been fetched and verified, and check its number of rows.

        Returns None if another process has deleted the shard from the node's cache meanwhile; fetch it again then.

        Args:
            index: Index of the shard in the manifest.

        Raises:
            ManifestMismatch: The shard has another number of rows than the manifest lists, or is no tar of row blocks.
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
                f"{shard.path}: has {shard.num_rows} rows, but corpus.json lists {entry.rows}; build the corpus "
                f"again, or delete corpus.json and run `electra-dist corpus index`"
            )
        return shard

    def _map_cached(self, path: Path) -> Shard | None:
        """Open a shard in the node's cache, with a lock that keeps the cache from deleting it while it is open.

        Returns None if the cache has deleted the file already. The file's modification time is set to the current
        time, because the cache deletes the files with the oldest modification time first.
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
