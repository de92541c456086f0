"""Cache shards in a folder on a node's disk, so that all ranks and jobs of the node fetch each shard at most once.

Guarantee: a run on several nodes never keeps its cache in the run folder, which all nodes share, unless
`data.cache_dir` names a folder there. A cache folder in a temporary directory belongs to this user, and no other user
can write to it, because compiled code is loaded from it, too. A file `<sha256>.tar` in the folder is complete, and its
bytes had that digest when the file received its name. A file `<sha256>.unverified` or
`.<sha256>.unverified.<random>.tmp` is an unfinished download, which the next process that needs the shard, or room,
deletes; so a process may be killed at any time. A file or folder of any other name is never deleted, and callers give
a folder that is the cache's own (`SHARDS_DIR`), apart from what the user keeps in `data.cache_dir`. Because names are
digests, the shards of several corpora can share a folder, and a run on a corpus that was built again never reads an
old shard.

How: the temporary directories of the job and of the node are tried in turn; those on a network file system or in
memory are passed over. The name of the cache folder is the same at every start, so a restart finds the shards of the
previous start if the temporary directory still exists.

There is one lock file per shard. The process that holds its flock downloads the shard under another name
(`store.fetch` resumes and retries), verifies the digest and renames the file. Wrong bytes are fetched again a few
times; after that the run ends with an error that names the object. Before a download, shards are deleted (evicted) if
the folder would exceed `limit_bytes` or the disk would fill up. A process that has a shard open holds a shared flock
on it, which protects the shard from eviction; the shards that a process will open next are protected by the attribute
`wanted`. A download first creates a sparse file of the shard's size, so that all processes count its bytes from the
beginning, as bytes in the folder and, as far as they are still to come, as bytes that are no longer free on the disk.

A full cache keeps the shards with the lowest SHA-256, as many as fit in addition to those in use: the same part of the
corpus in every epoch, on all ranks and after a restart. Deleting the least recently used shard would be a bad rule,
because an epoch uses every shard once: the shard that was used last is the one that is needed again latest. With room
for half of the corpus, that rule fetches six of seven shards again in each epoch; this module fetches half of them
(`benchmarks/results/shard_cache-20261122.json`).

Limits: the file system must support flock, as every local disk does. If all shards in the folder are in use or wanted,
the folder exceeds `limit_bytes`, because a node always holds the shards of two windows. Two runs on different corpora
that share a folder with too little room fetch more than with separate folders. Whether a file system is local is
judged by the name of its type. If no directory is known to be local, the default directory for temporary files is used
(usually `/tmp`). The share of a corpus that is fetched again is a mean: it assumes that the kept shards are spread
evenly over the shuffle windows, so the share of a single epoch differs by some shards.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from stat import S_ISREG
from typing import NamedTuple

import psutil

from electra_dist.data.corpora import StoredShard
from electra_dist.data.manifest import ShardEntry
from electra_dist.data.peer_group import PeerGroup
from electra_dist.errors import ManifestMismatch, StoreAway, StoreError, StoreMissing
from electra_dist.store.atomic_files import file_sha256, is_private, is_temporary, lock_file, readable, writable

GIGABYTE = 1e9  # bytes; the unit of data.cache_limit_gb
SHARDS_DIR = "electra-dist-shards"  # in a cache folder; nobody else keeps files there, so those in it may be deleted
_VARIABLES = ("SLURM_TMPDIR", "TMPDIR")  # environment variables that name a temporary directory of the job
# Names with which the types of remote file systems begin. Those in user space (fuse) mostly show remote storage.
_NOT_LOCAL_DISKS = ("nfs", "lustre", "gpfs", "ceph", "beegfs", "cifs", "smb", "afs", "panfs", "wekafs", "9p", "fuse")
_IN_MEMORY = ("tmpfs", "ramfs")
_FETCHES = 5  # Downloads with a wrong SHA-256, one after another, after which `NodeCache.ensure` raises an error.
_SPARE_BYTES = 64 << 20  # Space that is left free on the disk.
_SHARD_SUFFIX = ".tar"
_SHARD_NAME = re.compile(r"[0-9a-f]{64}\.tar")
_UNVERIFIED_SUFFIX = ".unverified"
# A reservation, which may also hold what has arrived, or a temporary file in which the bytes arrive.
_UNFINISHED_NAME = re.compile(r"([0-9a-f]{64})\.unverified|\.([0-9a-f]{64})\.unverified\.[0-9a-f]{8}\.tmp")
_BLOCK_BYTES = 512  # unit of `st_blocks`


class CacheFolder(NamedTuple):
    """Folder of a node's cache, and what named it: a setting, an environment variable or a directory."""

    path: Path
    source: str  # for the log: a config key, an environment variable or a directory, such as "TMPDIR"


def choose_cache_folder(configured: str | None, folder_in_run: Path, *, has_several_nodes: bool) -> CacheFolder:
    """Choose the folder of a node's cache: `configured` (`data.cache_dir`) if it is set.

    Otherwise a run on one node uses `folder_in_run`, and a run on several nodes a folder on a local disk. That folder
    is created; StoreError is raised if other users can read or write it.
    """
    if configured is not None:
        return CacheFolder(Path(configured), "data.cache_dir")
    if not has_several_nodes:
        return CacheFolder(folder_in_run, "run_dir")
    directory = _temporary_directory()
    path = directory.path / f"electra-dist-cache-{os.getuid()}"
    with writable(path):
        path.mkdir(mode=0o700, exist_ok=True)
    if not is_private(path):
        raise StoreError(
            f"{path}: others may read or write it, or it belongs to another user or is a link; set data.cache_dir "
            f"to a folder of your own"
        )
    return CacheFolder(path, directory.source)


def _temporary_directory() -> CacheFolder:
    """Return the first writable temporary directory on a local disk, or Python's default one if there is none."""
    named = [CacheFolder(Path(os.environ[name]), name) for name in _VARIABLES if os.environ.get(name)]
    for candidate in (*named, CacheFolder(Path("/tmp"), "/tmp")):
        if _is_on_local_disk(candidate.path) and os.access(candidate.path, os.W_OK):
            return candidate
    try:
        return CacheFolder(Path(tempfile.gettempdir()), "the temporary directory of this node")
    except FileNotFoundError:
        raise StoreError(
            "no temporary directory of this node is writable; set data.cache_dir to a folder on a local disk"
        ) from None


def _mounts() -> list[tuple[Path, str]]:
    """Return (mount point, file system type) of all mounts, oldest first; [] if they cannot be read."""
    try:
        return [(Path(mount.mountpoint), mount.fstype) for mount in psutil.disk_partitions(all=True)]
    except OSError:
        return []


def _is_on_local_disk(directory: Path) -> bool:
    """Return whether a directory is on a disk of this node; True if it is under no known mount point."""
    if not directory.is_dir():
        return False
    resolved = directory.resolve()
    mounts_above = [(point, kind) for point, kind in _mounts() if resolved.is_relative_to(point)]
    if not mounts_above:
        return True
    # The directory is on the innermost mount point. Of several mounts at one point, the last one hides the others;
    # the sort is stable, so it stays behind them.
    mounts_above.sort(key=lambda mount: len(mount[0].parts))
    _, file_system = mounts_above[-1]
    return not file_system.startswith(_NOT_LOCAL_DISKS) and file_system not in _IN_MEMORY


class CacheRoom(NamedTuple):
    """Sizes in bytes that decide how much of a corpus stays on a node."""

    capacity_bytes: int  # most bytes of shards that the folder can hold, including those that it holds already
    corpus_bytes: int  # all shards of the corpora on S3
    windows_bytes: int  # the two windows of shards that a node always holds: one in use, one being fetched ahead


def windows_bytes(shard_bytes: Sequence[int], window_shards: int) -> int:
    """Return the most bytes that two shuffle windows, of `window_shards` shards each, can have."""
    return sum(sorted(shard_bytes, reverse=True)[: 2 * window_shards])


def refetched_share(room: CacheRoom) -> float:
    """Return the fraction of the corpus that a node fetches again in each epoch, in [0, 1].

    A node keeps a fraction k of the shards for the whole run. It fetches the other shards in each epoch and deletes
    them after use. Rows are drawn from two shuffle windows (groups of shards) at a time, so that a full cache holds
    the kept shards and the other shards of two windows: capacity = k * corpus + (1 - k) * windows. Return 1 - k.
    """
    if room.capacity_bytes >= room.corpus_bytes:
        return 0.0
    if room.corpus_bytes <= room.windows_bytes or room.capacity_bytes <= room.windows_bytes:
        return 1.0
    kept_share = (room.capacity_bytes - room.windows_bytes) / (room.corpus_bytes - room.windows_bytes)
    return 1.0 - kept_share


def describe_room(room: CacheRoom) -> str:
    """Return one line for the log: how much of the corpus the cache can hold, and what to do if it is not all."""
    corpus = f"the corpus has {room.corpus_bytes / GIGABYTE:,.1f} GB"
    capacity = f"there is room for {room.capacity_bytes / GIGABYTE:,.1f} GB of shards"
    if room.capacity_bytes >= room.corpus_bytes:
        return f"{capacity}, {corpus}: later epochs fetch nothing"
    share = refetched_share(room)
    refetched = f"every epoch fetches {share:.0%} of it again, {share * room.corpus_bytes / GIGABYTE:,.1f} GB a node"
    advice = "for less, raise data.cache_limit_gb or set data.cache_dir to a larger disk"
    if room.capacity_bytes < room.windows_bytes:
        windows = f"two shuffle windows alone have {room.windows_bytes / GIGABYTE:,.1f} GB"
        advice += ", or lower data.shuffle_window_shards in a new run"
        return f"{capacity}, {corpus}: {refetched}, and {windows}; {advice}"
    return f"{capacity}, {corpus}: {refetched}; {advice}"


class NodeCache:
    """Cache folder on a node's disk for shards of corpora on S3; threads, processes, jobs and corpora can share it."""

    def __init__(
        self,
        directory: Path,
        limit_bytes: int | None = None,
        corpus: Collection[str] = (),
        peers: PeerGroup | None = None,
    ) -> None:
        """Keep the shards in `directory`, which the first fetch creates.

        If `limit_bytes` is None, shards are deleted only when the disk is nearly full. `corpus` holds the SHA-256 of
        each shard of the caller's corpora: other shards are deleted first. Shards that this node fetches for its
        `peers` (the other nodes) are deleted last.
        """
        self.refetches = 0  # how many times a shard was fetched again because its bytes were wrong
        # SHA-256 of the shards that the caller has open or will open soon. To change it, assign a new set: threads
        # that fetch may be reading the present one.
        self.wanted: frozenset[str] = frozenset()
        self._corpus = frozenset(corpus)
        self._peers = peers
        self._preferred = peers.owned(sorted(self._corpus)) if peers is not None else frozenset()
        self._directory = directory
        self._limit_bytes = limit_bytes

    def path(self, entry: ShardEntry) -> Path:
        """Return the path that a shard has in the folder; the file exists only after `ensure`."""
        return self._directory / f"{entry.sha256}{_SHARD_SUFFIX}"

    def holds(self, entry: ShardEntry) -> bool:
        """Return whether the folder has a file with the shard's name and size; the file's digest is not checked."""
        return _is_good(self.path(entry), entry, verify=False)

    def bytes_on_disk(self) -> int:
        """Return the bytes of all shards in the folder and of the received parts of unfinished downloads."""
        paths = [path for path in _files(self._directory) if path.suffix != _UNVERIFIED_SUFFIX]
        return sum(stat.st_size for stat in map(_stat, paths) if stat is not None and S_ISREG(stat.st_mode))

    def ensure(self, shard: StoredShard, *, verify: bool, ask_peers: bool = True) -> None:
        """Fetch a shard into the folder if it is missing; wait if another process is fetching it.

        With `verify`, an existing file is fetched again if its digest is wrong. With `ask_peers`, other nodes are
        asked before the store. Raises ManifestMismatch if the fetched bytes are wrong several times in a row.
        """
        entry = shard.entry
        path = self.path(entry)
        # The first check needs no lock, so that all ranks of a node can verify a shard at the same time.
        if _is_good(path, entry, verify=verify):
            return
        with self._locked(entry.sha256):
            # Another process may have fetched the shard while this one waited for the lock.
            if _is_good(path, entry, verify=verify):
                return
            if path.exists():
                self.refetches += 1
                path.unlink(missing_ok=True)
            for digest, unfinished in list(self._unfinished()):
                if digest == entry.sha256:
                    unfinished.unlink(missing_ok=True)
            self._fetch(shard, ask_peers=ask_peers)

    def _fetch(self, shard: StoredShard, *, ask_peers: bool) -> None:
        """Download a shard, verify it and give it its final name; the caller must hold the shard's lock."""
        store, entry = shard
        unverified = self._directory / f"{entry.sha256}{_UNVERIFIED_SUFFIX}"
        peers = self._peers if ask_peers else None
        for _ in range(_FETCHES):
            try:
                self._reserve(unverified, entry.bytes)
                has_arrived = peers is not None and peers.fetch(entry, unverified)
                peers = None  # If the bytes are wrong, the next attempt asks the store at once.
                if not has_arrived:
                    store.fetch(entry.name, unverified)
                if file_sha256(unverified) == entry.sha256:
                    # A file that changes its name while another process adds up the sizes would not be counted there.
                    with self._locked("eviction"):
                        unverified.replace(self.path(entry))
                    return
            finally:
                # A disk that has just become read-only refuses this, too; the error of the download is the one to
                # report.
                with contextlib.suppress(OSError):
                    unverified.unlink(missing_ok=True)
            self.refetches += 1
        raise ManifestMismatch(
            f"{shard.url}: wrong bytes {_FETCHES} times in a row: their sha256 is not {entry.sha256[:12]}..., which "
            f"corpus.json lists; restore this shard or build the corpus again"
        )

    def _reserve(self, unverified: Path, needed_bytes: int) -> None:
        """Evict shards until a new one fits, and reserve its space by a sparse file of its full size."""
        with self._locked("eviction"):  # Only one process at a time, so that no more is deleted than necessary.
            self._make_room(needed_bytes)
            with writable(unverified), unverified.open("wb") as reservation:
                reservation.truncate(needed_bytes)

    def _make_room(self, needed_bytes: int) -> None:
        """Delete shards until `needed_bytes` fit into folder and disk; the caller must hold the lock "eviction"."""
        if self._excess_bytes(needed_bytes) <= 0:
            return
        self._delete_unfinished_of_killed()
        if self._evict_until(lambda: self._excess_bytes(needed_bytes) <= 0, wanted=self.wanted):
            return
        # A wanted shard, which this process will open soon, is deleted only if the disk would be full otherwise. The
        # folder may become larger than its limit instead.
        if self._evict_until(lambda: self._free_bytes() >= needed_bytes, wanted=()):
            return
        raise StoreAway(
            f"{self._directory}: disk full: {self._free_bytes()} bytes free, {needed_bytes} needed for the next "
            "shard, nothing left to evict; free space there, or set data.cache_dir to a larger disk"
        )

    def _evict_until(self, has_room: Callable[[], bool], wanted: Collection[str]) -> bool:
        """Delete shards that are neither in use nor `wanted` until `has_room()` is true; return whether it is."""
        paths = [path for path in _files(self._directory) if _SHARD_NAME.fullmatch(path.name) and path.is_file()]
        order = eviction_order(
            paths, corpus=self._corpus, wanted=wanted, last_used=_last_used, preferred=self._preferred
        )
        for path in order:
            if has_room():
                return True
            _delete_unless_in_use(path)
        return has_room()

    def _unfinished(self) -> Iterator[tuple[str, Path]]:
        """Yield the digest of the shard and the path of each file of an unfinished download."""
        for path in _files(self._directory):
            match = _UNFINISHED_NAME.fullmatch(path.name)
            if match is not None:
                yield match[1] or match[2], path

    def _delete_unfinished_of_killed(self) -> None:
        """Delete unfinished downloads of processes that have ended: nobody holds the locks of their shards."""
        for digest, path in list(self._unfinished()):
            with contextlib.suppress(BlockingIOError), self._locked(digest, wait=False):
                path.unlink(missing_ok=True)

    def _free_bytes(self) -> int:
        """Return the free bytes of the disk, less those that unfinished downloads have reserved and still lack."""
        lacking: Counter[str] = Counter()
        for digest, path in self._unfinished():
            stat = _stat(path)
            if stat is not None:
                reserved_bytes = stat.st_size if path.suffix == _UNVERIFIED_SUFFIX else 0
                lacking[digest] += reserved_bytes - stat.st_blocks * _BLOCK_BYTES
        return shutil.disk_usage(self._directory).free - sum(max(0, num_bytes) for num_bytes in lacking.values())

    def _excess_bytes(self, needed_bytes: int) -> int:
        """Return how many bytes must be deleted before `needed_bytes` can be written; 0 or less means none."""
        excess_on_disk = needed_bytes + _SPARE_BYTES - self._free_bytes()
        if self._limit_bytes is None:
            return excess_on_disk
        # The reservation of a download counts with the shard's full size, so its temporary file is left out.
        stats = [_stat(path) for path in _files(self._directory) if not is_temporary(path.name)]
        used_bytes = sum(stat.st_size for stat in stats if stat is not None and S_ISREG(stat.st_mode))
        excess_in_folder = used_bytes + needed_bytes - self._limit_bytes
        return max(excess_on_disk, excess_in_folder)

    @contextlib.contextmanager
    def _locked(self, name: str, *, wait: bool = True) -> Iterator[None]:
        """Hold an exclusive flock in this folder during the `with` block; `name` is a shard's SHA-256 or "eviction".

        If another process or thread holds it, wait; if `wait` is False, raise BlockingIOError instead.
        """
        path = self._directory / "locks" / name
        with writable(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            # The system releases it when the process ends, so a killed process never blocks the others.
            if not lock_file(descriptor, wait=wait):
                raise StoreError(
                    f"{self._directory}: no file locks in this folder; set data.cache_dir to a local disk"
                )
            yield
        finally:
            os.close(descriptor)  # This also releases the lock.


def eviction_order(
    paths: Iterable[Path],
    *,
    corpus: Collection[str],
    wanted: Collection[str],
    last_used: Callable[[Path], float],
    preferred: Collection[str] = (),
) -> list[Path]:
    """Return the shards (`<sha256>.tar`) among `paths` that may be deleted, in the order in which to delete them.

    Shards of other corpora (digest not in `corpus`) come first, the least recently used one before the others. Those
    of `corpus` follow, those in `preferred` last, and among equals the one with the highest digest first. Shards with
    digests in `wanted` are left out.
    """
    deletable = [path for path in paths if path.stem not in wanted]
    foreign = sorted((path for path in deletable if path.stem not in corpus), key=last_used)
    own = [path for path in deletable if path.stem in corpus]
    # Digests are unrelated to the order in which a run reads the shards, and equal on all ranks and after a restart.
    own.sort(key=lambda path: (path.stem not in preferred, path.stem), reverse=True)
    return foreign + own


def _files(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except FileNotFoundError:
        return []


def _stat(path: Path) -> os.stat_result | None:
    """Return a file's status, or None if another process has deleted or renamed it."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _is_good(path: Path, entry: ShardEntry, *, verify: bool) -> bool:
    """Return whether a file exists and has the size (with `verify`, also the SHA-256) of a manifest entry."""
    try:
        with readable(path):
            if path.stat().st_size != entry.bytes:
                return False
            return not verify or file_sha256(path) == entry.sha256
    except StoreMissing:
        return False


def _last_used(path: Path) -> float:
    """Return when a shard was last opened, which its modification time records; 0 if the file is missing."""
    stat = _stat(path)
    return stat.st_mtime if stat else 0.0


def _delete_unless_in_use(path: Path) -> None:
    """Delete a shard unless a process has it open, which is noticed by the shared flock on the file."""
    with contextlib.suppress(FileNotFoundError, BlockingIOError), path.open("rb") as stream:
        if lock_file(stream, wait=False):
            path.unlink()
