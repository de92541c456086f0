"""Pack the Python packages of a run into one file, which job.sh unpacks on each node's own disk before ranks start.

A thousand ranks that import torch and DeepSpeed from a shared file system open some ten thousand files each. With
`electra-dist submit --stage-environment`, a node reads one file, and its ranks import from the node's disk.

Guarantee: the unpacked folder on a node gets its final name only when it is complete. If the archive cannot be read or
unpacked, for example because the disk is full, the ranks import from the shared file system as without the option.

How: the name of the archive contains a digest of the names, sizes and modification times of all its files, so a
changed environment gives an archive with another name. The unpacked folder comes first in PYTHONPATH. The interpreter
and its standard library are not copied.

Limits: the copies of earlier environments stay on the node until its temporary folder is emptied.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sysconfig
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from electra_dist.store.atomic_files import replacing

OWN_PACKAGES = ("electra_dist", "electra_launcher", "electra_kernels")


class PackedFile(NamedTuple):
    """One file of the Python packages, to be packed into the archive."""

    path: Path  # where it is on this machine
    name: str  # its path in the archive, relative to the folder that will be in PYTHONPATH


def environment_files(
    folders: Sequence[Path] | None = None, packages: Sequence[str] = OWN_PACKAGES
) -> list[PackedFile]:
    """Return all files of this interpreter's installed packages, sorted by their paths in the archive.

    The result has all files in `folders` (None: where pip installs), and the files of `packages`, which may lie
    elsewhere, as after `pip install --editable`. If two files have the same path in the archive, the one of
    `packages` is taken. A package that is not installed is left out.
    """
    if folders is None:
        folders = [Path(path) for path in sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})]
    file_of_name: dict[str, PackedFile] = {}
    for folder in folders:
        for packed in _files_below(folder, folder):
            file_of_name[packed.name] = packed
    for package in packages:
        for folder in _package_folders(package):
            for packed in _files_below(folder, folder.parent):
                file_of_name[packed.name] = packed
    return [file_of_name[name] for name in sorted(file_of_name)]


def archive_name(files: Sequence[PackedFile]) -> str:
    """Return the file name of the archive of `files`; it changes when a file's size or modification time changes."""
    digest = hashlib.sha256()
    for packed in files:
        status = packed.path.stat()
        digest.update(f"{packed.name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode(errors="surrogateescape"))
    return f"environment-{digest.hexdigest()[:16]}.tar"


def write_archive(file: Path, files: Sequence[PackedFile]) -> None:
    """Pack `files` into the archive `file` by an atomic replacement; do nothing if the archive exists.

    The archive's name must come from `archive_name`, so that an existing archive has the same content.
    """
    if file.exists():
        return
    with replacing(file) as out, tarfile.open(fileobj=out, mode="w") as archive:
        for packed in files:
            archive.add(packed.path, packed.name, recursive=False)


def _package_folders(package: str) -> list[Path]:
    """Return the folders from which `import` loads a package, usually one; [] if the package is not installed."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        return []
    return [Path(location) for location in spec.submodule_search_locations or ()]


def _files_below(folder: Path, root: Path) -> Iterator[PackedFile]:
    """Yield the regular files below `folder`; their paths in the archive are relative to `root`."""
    for path in folder.rglob("*"):
        if path.is_file():
            yield PackedFile(path, path.relative_to(root).as_posix())
