"""Choose the folder in which a node keeps the shards of a corpus on S3, and state what follows from its room.

Guarantee: a run on several nodes never keeps its cache in the run folder, which all nodes share, unless
`data.cache_dir` names a folder there. A folder in a temporary directory belongs to this user alone, because compiled
code is kept in it, too.

How: the temporary directories of the job and of the node are tried in turn; one on a network file system or in memory
is passed over. The name of the folder is the same at every start, so that a restart finds the shards of the start
before, as far as the node's directory outlives the job.

Cost: one reading of the list of mounts.

Limits: file systems are told apart by the names of their types; `/tmp` is used if no directory is known to be local.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from electra_dist.errors import StoreError
from electra_dist.store.atomic_files import writable

_VARIABLES = ("SLURM_TMPDIR", "TMPDIR")  # of the environment; they name a temporary directory of the job
_MOUNTS = Path("/proc/self/mounts")
# Types of file systems that are not a disk of the node. Those of user space (fuse) mostly show remote storage.
_NOT_LOCAL_DISKS = ("nfs", "lustre", "gpfs", "ceph", "beegfs", "cifs", "smb", "afs", "panfs", "wekafs", "9p", "fuse")
_IN_MEMORY = ("tmpfs", "ramfs")


class CacheFolder(NamedTuple):
    """Folder of a node's cache, and where it comes from: a config key or a variable of the environment."""

    path: Path
    source: str


def choose_cache_folder(
    configured: str | None,
    folder_in_run: Path,
    *,
    has_several_nodes: bool,
    environment: Mapping[str, str] = os.environ,
) -> CacheFolder:
    """Return the folder in which this node caches shards and compiled code; create it in a temporary directory.

    Args:
        configured: `data.cache_dir`, which is always taken if it is set.
        folder_in_run: The folder that a run on a single node uses by default.
        has_several_nodes: Whether the run has ranks on other nodes, too.
        environment: Variables of the environment.

    Raises:
        StoreError: No temporary directory of this node can be written, or the folder there belongs to another user.
    """
    if configured is not None:
        return CacheFolder(Path(configured), "data.cache_dir")
    if not has_several_nodes:
        return CacheFolder(folder_in_run, "run_dir")
    mounts = _read_mounts()
    fallback = CacheFolder(Path(tempfile.gettempdir()), "the temporary directory of this node")
    named = [CacheFolder(Path(environment[name]), name) for name in _VARIABLES if environment.get(name)]
    candidates = [*named, CacheFolder(Path("/tmp"), "/tmp")]
    local = [directory for directory in candidates if _is_on_local_disk(directory.path, mounts)]
    directory = next((candidate for candidate in local if os.access(candidate.path, os.W_OK)), fallback)
    path = directory.path / f"electra-dist-cache-{os.getuid()}"
    _make_private(path)
    return CacheFolder(path, directory.source)


def _make_private(path: Path) -> None:
    """Create a folder that only this user can read and write; accept an existing one of this user.

    Raises:
        StoreError: The folder cannot be created, or the name is taken by somebody or something else.
    """
    with writable(path):
        path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    if path.is_symlink() or status.st_uid != os.getuid():
        raise StoreError(f"{path}: belongs to another user or is a link; set data.cache_dir to a folder of your own")


def _read_mounts() -> list[tuple[Path, str]]:
    """Return the mount points of this machine with the types of their file systems; empty where there is no list."""
    try:
        lines = _MOUNTS.read_text(errors="replace").splitlines()
    except OSError:
        return []
    fields = [line.split() for line in lines]
    return [(Path(words[1]), words[2]) for words in fields if len(words) > 2]


def _is_on_local_disk(directory: Path, mounts: list[tuple[Path, str]]) -> bool:
    """Return whether a directory exists and lies on a disk of this node, as far as the list of mounts shows."""
    if not directory.is_dir():
        return False
    resolved = directory.resolve()
    above = [(point, kind) for point, kind in mounts if resolved.is_relative_to(point)]
    if not above:
        return True
    # Of several mounts at one point the last one is seen.
    _, kind = max(enumerate(above), key=lambda numbered: (len(numbered[1][0].parts), numbered[0]))[1]
    return not kind.startswith(_NOT_LOCAL_DISKS) and kind not in _IN_MEMORY
