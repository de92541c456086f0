"""Choose the folder in which a node caches shards and compiled code, and predict how much of a corpus it holds.

Guarantee: a run on several nodes never keeps its cache in the run folder, which all nodes share, unless
`data.cache_dir` names a folder there. A cache folder in a temporary directory belongs to this user, and no other user
can write to it, because compiled code is loaded from it.

How: the temporary directories of the job and of the node are tried in turn; those on a network file system or in
memory are passed over. The name of the cache folder is the same at every start, so a restart finds the shards of the
previous start if the temporary directory still exists.

Limits: whether a file system is local is judged by the name of its type. If no directory is known to be local, the
default directory for temporary files is used (usually `/tmp`). The share of a corpus that is fetched again is a mean:
it assumes that the kept shards are spread evenly over the shuffle windows, so the share of a single epoch differs by
some shards (measured in `benchmarks/results/shard_cache-20261122.json`).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from electra_dist.errors import StoreError
from electra_dist.store.atomic_files import is_private, writable

GIGABYTE = 1e9  # bytes; the unit of data.cache_limit_gb
SHARDS_DIR = "electra-dist-shards"  # in a cache folder; nobody else keeps files there, so those in it may be deleted
_VARIABLES = ("SLURM_TMPDIR", "TMPDIR")  # environment variables that name a temporary directory of the job
# Names with which the types of remote file systems begin. Those in user space (fuse) mostly show remote storage.
_NOT_LOCAL_DISKS = ("nfs", "lustre", "gpfs", "ceph", "beegfs", "cifs", "smb", "afs", "panfs", "wekafs", "9p", "fuse")
_IN_MEMORY = ("tmpfs", "ramfs")


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
    _make_private(path)
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


def _make_private(path: Path) -> None:
    """Create a folder that only this user can read and write; if it exists and others can, raise StoreError."""
    with writable(path):
        path.mkdir(mode=0o700, exist_ok=True)
    if not is_private(path):
        raise StoreError(
            f"{path}: others may read or write it, or it belongs to another user or is a link; set data.cache_dir "
            f"to a folder of your own"
        )


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
