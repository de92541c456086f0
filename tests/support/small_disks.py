"""Small disks that tests fill, free and make read-only under the folders of a real run."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

BALLAST = "ballast"


def can_mount() -> bool:
    """Return whether this process may mount a file system: it is root, and no container forbids it."""
    if os.geteuid() != 0:
        return False
    probe = "d=$(mktemp -d); mount -t tmpfs tmpfs $d && umount $d; e=$?; rmdir $d; exit $e"
    return subprocess.run(probe, shell=True, capture_output=True).returncode == 0


def folder_in_memory() -> Path | None:
    """Return a folder in memory with 2 GB of room, or None, which is the default folder for temporary files.

    SIGKILL loses nothing that the kernel holds, so the kind of the disk changes no result; writing to it takes time.
    """
    folder = Path("/dev/shm")
    if folder.is_dir() and os.access(folder, os.W_OK) and shutil.disk_usage(folder).free > 2e9:
        return folder
    return None


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int = 4) -> Iterator[Path]:
    """Mount an empty tmpfs of so many MiB on a folder, which is created, and unmount it at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


@contextlib.contextmanager
def freezable_disk(folder: Path, megabytes: int = 16) -> Iterator[Path]:
    """Mount an empty ext4 file system at a folder during a `with` block; mounting needs root.

    After `fsfreeze --freeze FOLDER`, every write to it blocks until `fsfreeze --unfreeze FOLDER`, as on a network
    share whose server does not answer. Unfreeze it before the block ends.
    The folder is created if it is missing; the image of the file system, of so many MiB, is written beside it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    image = folder.with_name(f"{folder.name}.ext4")
    with image.open("wb") as file:
        file.truncate(megabytes << 20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


@contextlib.contextmanager
def disk_with_quota(folder: Path, megabytes: int) -> Iterator[Path]:
    """Mount an empty btrfs file system on a folder during a `with` block, with a quota of so many MiB.

    Its size is far more, so a write ends with EDQUOT. It needs root and mkfs.btrfs; every kernel with btrfs has its
    quotas, while those of ext4, xfs and tmpfs are options of the kernel's build.
    """
    folder.mkdir(parents=True, exist_ok=True)
    image = folder.with_name(f"{folder.name}.btrfs")
    with image.open("wb") as file:
        file.truncate(128 << 20)
    subprocess.run(["mkfs.btrfs", "-q", str(image)], check=True, capture_output=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(folder)], check=True)
    try:
        subprocess.run(["btrfs", "quota", "enable", str(folder)], check=True)
        subprocess.run(["btrfs", "qgroup", "limit", f"{megabytes}M", "0/5", str(folder)], check=True)
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def fill_command(disk: Path) -> str:
    """Return the shell command that fills a disk to its last byte."""
    return f"cat /dev/zero > {shlex.quote(str(disk / BALLAST))} 2>/dev/null; true"


def free(disk: Path) -> None:
    """Free what `fill_command` has filled."""
    (disk / BALLAST).unlink()


def remount_command(disk: Path, option: str) -> str:
    """Return the shell command that makes a disk read-only ("ro") or writable ("rw")."""
    return f"mount -o remount,{option} {shlex.quote(str(disk))}"
