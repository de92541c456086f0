"""Pack the Python packages of a run into one file, and unpack it on each node's own disk before the ranks start.

A thousand ranks that import torch and DeepSpeed from a shared file system open some ten thousand files each. With
`electra-dist submit --stage-environment`, a node reads one file, and its ranks import from the node's disk.

Guarantee: the copy on a node appears under its name only when it is complete. If the archive cannot be read or
unpacked, for example because the disk is full, the ranks import from the shared file system as without the option.

How: the archive is named by the names, sizes and times of all its files, so a changed environment makes another one.
The unpacked folder comes first in PYTHONPATH; the interpreter and its standard library stay where they are.

Limits: the copies of earlier environments stay on the node until its temporary folder is emptied.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shlex
import sysconfig
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from electra_dist.store.atomic_files import replacing

OWN_PACKAGES = ("electra_dist", "launcher", "electra_kernels")


class PackedFile(NamedTuple):
    """A file of the environment, and its path in the archive."""

    path: Path
    name: str


def environment_files(
    folders: Sequence[Path] | None = None, packages: Sequence[str] = OWN_PACKAGES
) -> list[PackedFile]:
    """Return the files of this interpreter's packages, in the order of their names.

    Args:
        folders: folders that hold packages; None: those in which pip installs.
        packages: packages that may be elsewhere, as after `pip install --editable`.
    """
    if folders is None:
        folders = [Path(path) for path in sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})]
    files = {packed.name: packed for folder in folders for packed in _files_below(folder, folder)}
    for package in packages:
        spec = importlib.util.find_spec(package)
        for location in (spec.submodule_search_locations or ()) if spec is not None else ():
            folder = Path(location)
            files |= {packed.name: packed for packed in _files_below(folder, folder.parent)}
    return [files[name] for name in sorted(files)]


def archive_name(files: Sequence[PackedFile]) -> str:
    """Return the file name of the archive of these files, which changes with the name, size or time of any of them."""
    digest = hashlib.sha256()
    for packed in files:
        status = packed.path.stat()
        digest.update(f"{packed.name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode(errors="surrogateescape"))
    return f"environment-{digest.hexdigest()[:16]}.tar"


def write_archive(file: Path, files: Sequence[PackedFile]) -> None:
    """Write the archive, unless it exists; it appears under its name when it is complete.

    Raises:
        StoreError: the disk is full or refuses the write.
    """
    if file.exists():
        return
    with replacing(file) as out, tarfile.open(fileobj=out, mode="w") as archive:
        for packed in files:
            archive.add(packed.path, packed.name, recursive=False)


def staging_lines(archive: str) -> str:
    """Return shell commands that unpack an archive on this node, if it is not there, and put it first in PYTHONPATH.

    Args:
        archive: path of the archive, on a file system that the node shares.
    """
    name = Path(archive).stem
    return f"""
    archive={shlex.quote(archive)}
    staged=${{SLURM_TMPDIR:-${{TMPDIR:-/tmp}}}}/electra-dist-environments-$(id -u)
    mkdir -p -m 700 "$staged"
    if [ -O "$staged" ] && [ ! -d "$staged/{name}" ]; then
        unpacked=$(mktemp -d "$staged/unpacking.XXXXXX")
        tar -xf "$archive" -C "$unpacked" && mv -T "$unpacked" "$staged/{name}"
        rm -rf "$unpacked" # What is left if the disk is full, or another job was faster.
    fi
    if [ -O "$staged" ] && [ -d "$staged/{name}" ]; then
        export PYTHONPATH="$staged/{name}${{PYTHONPATH:+:$PYTHONPATH}}"
    fi"""


def _files_below(folder: Path, root: Path) -> Iterator[PackedFile]:
    """Yield the regular files below a folder, with their paths relative to `root`."""
    for path in folder.rglob("*"):
        if path.is_file():
            yield PackedFile(path, path.relative_to(root).as_posix())
