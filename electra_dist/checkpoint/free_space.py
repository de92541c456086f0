"""Compare the free space of the disks that a run saves to with what its next checkpoint needs, before the save.

Limits: quotas are not seen, nor what other processes will write until the save. A target on S3 has no limit.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from electra_dist.store.interface import Store


def nearest_folder(folder: Path) -> Path:
    """Return the folder itself if it exists, otherwise its nearest existing parent, on the same disk."""
    folder = folder.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def save_folders(targets: Sequence[Store], staging: Path) -> list[Path]:
    """Return the folders to which a rank writes its checkpoint file: all local targets, or `staging` without any."""
    local_paths = [target.local_path("checkpoint") for target in targets]
    local_folders = [path.parent for path in local_paths if path is not None]
    return local_folders or [staging]


def shortage(folders: Sequence[Path], needed_bytes: int) -> str:
    """Return a text about a disk that is too full for `needed_bytes` in each folder on it; "" if all have enough.
    The needs of folders on one disk add up; the folders need not exist. A disk that does not answer is passed over,
    because the save will report it.
    """
    folders_by_disk: dict[int, list[Path]] = {}
    for folder in folders:
        try:
            device = nearest_folder(folder).stat().st_dev
        except OSError:
            continue
        folders_by_disk.setdefault(device, []).append(folder)
    for disk_folders in folders_by_disk.values():
        disk_needs_bytes = needed_bytes * len(disk_folders)
        try:
            disk = os.statvfs(nearest_folder(disk_folders[0]))
        except OSError:
            continue
        free_bytes = disk.f_bavail * disk.f_frsize
        if free_bytes < disk_needs_bytes:
            return (
                f"the disk of {disk_folders[0]} has {free_bytes / 1e9:.3g} GB free, and a checkpoint needs "
                f"{disk_needs_bytes / 1e9:.3g} GB there"
            )
    return ""
