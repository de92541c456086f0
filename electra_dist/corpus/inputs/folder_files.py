"""Search a local folder for files of known kinds; count everything else that is in it.

Guarantee: each file and link below the folder is yielded or counted. Real folders are searched first, sorted by path,
then folders that a link leads to. A folder that was searched before is not searched again, which also ends cycles of
links. If a folder is reached by a real path and by a link, its files therefore have the names of the real path. A
folder that may not be listed is an error.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from electra_dist.corpus.inputs.file_kinds import is_no_data, kind_of
from electra_dist.corpus.inputs.skipped_inputs import SkippedInputs
from electra_dist.errors import UserError


def files_in_folder(folder: Path, skipped: SkippedInputs, *, with_pages: bool = False) -> Iterator[tuple[str, Path]]:
    """Yield the name and the path of each file of known kind below a folder; count everything else.

    `with_pages` also yields HTML pages and WARC files. Raises UserError if a folder may not be listed.
    """
    searched: set[tuple[int, int]] = set()  # device and inode of the folders
    waiting = deque([folder])
    while waiting:
        for path in sorted(_walk(waiting.popleft(), folder, searched, waiting, skipped)):
            name = path.relative_to(folder).as_posix()
            reason = _reason_to_skip(path, name, with_pages)
            if reason is None:
                yield name, path
            else:
                skipped.add(reason, name)


def _reason_to_skip(path: Path, name: str, with_pages: bool) -> str | None:
    """Return why an entry of a folder is left out, as a key of `SKIP_REASONS`; None if the entry is read."""
    try:
        if not path.exists():  # the target is missing, or links lead to one another in a circle
            return "broken_link"
        if not path.is_file():
            return "not_a_file"
    except OSError as error:
        raise UserError(
            f"{path}: what the link leads to cannot be read ({error.strerror}); give read permission, or remove it"
        ) from None
    if kind_of(path.name, with_pages=with_pages) is None:
        return "unknown_kind"
    return "no_data" if is_no_data(name) else None


def _walk(
    start: Path, root: Path, searched: set[tuple[int, int]], linked: deque[Path], skipped: SkippedInputs
) -> Iterator[Path]:
    """Yield the paths of all visible files in the folder `start` and its real sub-folders; no link is followed.

    Three arguments are changed. `searched` gets device and inode of each folder, and `linked` gets the links to
    folders, for the caller to follow later. `skipped` counts hidden entries and folders searched before, by names
    relative to `root`.
    """
    waiting = [start]
    while waiting:
        folder = waiting.pop()
        status = folder.stat()
        identity = (status.st_dev, status.st_ino)
        if identity in searched:
            skipped.add("read_before", folder.relative_to(root).as_posix())
            continue
        searched.add(identity)
        for entry in _entries(folder):
            path = folder / entry.name
            if entry.name.startswith("."):
                skipped.add("hidden", path.relative_to(root).as_posix())
            elif entry.is_dir(follow_symlinks=False):
                waiting.append(path)
            elif entry.is_symlink() and os.path.isdir(path):  # False, not an error, for a link in a circle
                linked.append(path)
            else:
                yield path


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise UserError(
            f"{folder}: the folder cannot be listed ({error.strerror}); give read permission, or move it out of the "
            "input"
        ) from None
