"""The cache folder of a node: every shard fetched at most once, whatever ranks and jobs share it.

Guarantee: a file `<sha256>.tar` in the folder is whole and had that digest when it got its name; everything else there
is unfinished and is thrown away by the next process that needs the shard, so a cache killed at any byte heals. Named
by digest, shards of different corpora can share a folder and a changed corpus can not be served stale.

How: a flock per shard; under it `store.fetch` (resumed, retried) to another name, digest, rename. Wrong bytes are
fetched again a few times, then the object is named and the run ends. The folder is kept below `limit_bytes`, and
inside the free space of its disk, by deleting the shards that were longest not used; one that any process has open
(it holds a shared flock on the file) stays.

Cost: one sha256 per fetch, and a directory listing where the limit or the disk is near.

Where it stops: needs flock, as every local disk has it. The limit bends rather than evict a shard in use, and does not
count bytes that other downloads are about to write.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from electra_dist.data.manifest import ShardEntry
from electra_dist.errors import StoreError, StoreExhausted, StoreMissing
from electra_dist.store.files import file_sha256, readable, writable
from electra_dist.store.interface import Store

_FETCHES = 5  # of a shard whose bytes come out wrong
_SPARE_BYTES = 64 << 20  # left free on the disk
_SHARD, _UNVERIFIED = ".tar", ".unverified"


class NodeCache:
    """Shards of any corpora in a folder of this node. Safe between threads, processes and jobs."""

    def __init__(self, directory: Path, limit_bytes: int | None = None) -> None:
        """Nothing is touched until the first fetch.

        Args:
            limit_bytes: size to keep the folder below; None: the disk is the limit.
        """
        self.refetches = 0  # shards fetched again because their bytes were wrong
        self._directory = directory
        self._limit_bytes = limit_bytes

    def path(self, entry: ShardEntry) -> Path:
        """Where the shard is, once `ensure` has returned."""
        return self._directory / f"{entry.sha256}{_SHARD}"

    def ensure(self, store: Store, entry: ShardEntry, *, verify: bool) -> None:
        """Have the shard in the folder.

        Args:
            verify: check the digest of a shard that is already there (and fetch it again if it is wrong).

        Raises:
            StoreError: refused, or the disk is full. StoreExhausted: the right bytes could not be had.
        """
        path = self.path(entry)
        if _is_good(path, entry, verify):  # without the lock, so that the ranks of a node check at the same time
            return
        with self._locked(entry.sha256):
            if _is_good(path, entry, verify):
                return
            for leftover in self._directory.glob(f"*{entry.sha256}.*"):
                leftover.unlink(missing_ok=True)
            self._fetch(store, entry)

    def _fetch(self, store: Store, entry: ShardEntry) -> None:
        unverified = self._directory / f"{entry.sha256}{_UNVERIFIED}"
        for _ in range(_FETCHES):
            self._make_room(entry.bytes)
            store.fetch(entry.name, unverified, must_exist=True)
            if file_sha256(unverified) == entry.sha256:
                unverified.replace(self.path(entry))
                return
            unverified.unlink()
            self.refetches += 1
        raise StoreExhausted(
            f"{store.url}/{entry.name}: wrong bytes {_FETCHES} times (sha256 is not {entry.sha256[:12]}..., which "
            "corpus.json lists); restore this shard or build the corpus again"
        )

    def _make_room(self, needed_bytes: int) -> None:
        """Delete the shards that were longest not used until `needed_bytes` more fit."""
        if self._lacking(needed_bytes) <= 0:
            return
        with self._locked("eviction"):
            shards = sorted(self._directory.glob(f"*{_SHARD}"), key=_last_used)
            for path in shards:
                if self._lacking(needed_bytes) <= 0:
                    return
                _delete_unless_in_use(path)
        free_bytes = shutil.disk_usage(self._directory).free
        if free_bytes < needed_bytes:
            raise StoreError(
                f"{self._directory}: disk full: {free_bytes} bytes free, {needed_bytes} needed for the next shard, "
                "nothing left to evict; free space there, or set data.cache_dir to a larger disk"
            )

    def _lacking(self, needed_bytes: int) -> int:
        """Bytes to delete before `needed_bytes` fit within the limit and the disk."""
        lacking = needed_bytes + _SPARE_BYTES - shutil.disk_usage(self._directory).free
        if self._limit_bytes is not None:
            used = sum(stat.st_size for path in self._directory.iterdir() if (stat := _stat(path)))
            lacking = max(lacking, used + needed_bytes - self._limit_bytes)
        return lacking

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        """Hold the folder's lock of that name; it falls with the process."""
        path = self._directory / "locks" / name
        with writable(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            except OSError as error:
                raise StoreError(
                    f"{self._directory}: no file locks here ({error.strerror}); set data.cache_dir to a local disk"
                ) from None
            yield
        finally:
            os.close(descriptor)


def _stat(path: Path) -> os.stat_result | None:
    """None when the file has just been deleted or renamed by another process."""
    with contextlib.suppress(FileNotFoundError):
        return path.stat()
    return None


def _is_good(path: Path, entry: ShardEntry, verify: bool) -> bool:
    """Whether the shard is there, in its size and, if `verify`, its digest."""
    try:
        with readable(path):
            return path.stat().st_size == entry.bytes and (not verify or file_sha256(path) == entry.sha256)
    except StoreMissing:
        return False


def _last_used(path: Path) -> float:
    stat = _stat(path)
    return stat.st_mtime if stat else 0.0


def _delete_unless_in_use(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError, BlockingIOError), path.open("rb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
