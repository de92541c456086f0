"""Local files: atomic replacement, digests, and the system's errors as one line each.

Guarantee: `replacing` is the only way in which this project replaces a file that another process may read: the reader
sees the old bytes or the new ones, and after a crash the file is one of the two.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from electra_dist.errors import StoreError, StoreMissing

TEMPORARY_SUFFIX = ".tmp"  # `.NAME.<random>.tmp`: never listed


def is_temporary(name: str) -> bool:
    """Whether a file name is that of an unfinished write."""
    return name.startswith(".") and name.endswith(TEMPORARY_SUFFIX)


@contextlib.contextmanager
def replacing(path: Path, *, only_new: bool = False) -> Iterator[IO[bytes]]:
    """A file to write that becomes `path`, synced, when the block ends well, and vanishes when it does not.

    Args:
        only_new: never replace; a taken name raises FileExistsError.

    Raises:
        StoreError: the disk is full, read-only or refuses the write.
    """
    with writable(path):
        make_folder(path.parent)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")
        try:
            with temporary.open("xb") as out:
                yield out
                out.flush()
                os.fsync(out.fileno())
            if only_new:
                os.link(temporary, path)
            else:
                os.replace(temporary, path)
            sync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def file_sha256(path: Path) -> str:
    """Digest of a local file, read once."""
    with path.open("rb", buffering=0) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def make_folder(folder: Path) -> None:
    """Create a folder and those above it, each synced into the one that it is in."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Return when the folder's entries are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turns what the system says about reading `path` into a StoreError of one line."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise StoreMissing(f"{path}: no such file; check the path, or build what should be there") from None
    except IsADirectoryError:
        raise StoreMissing(f"{path}: a folder, not a file; check the path") from None
    except PermissionError:
        raise StoreError(f"{path}: not readable; give this user the right to read it") from None
    except OSError as error:
        if error.errno == errno.EMFILE:
            raise StoreError(f"{path}: too many open files; raise `ulimit -n`") from None
        raise StoreError(f"{path}: cannot be read ({error.strerror}); check the disk, then start again") from None


@contextlib.contextmanager
def writable(path: Path) -> Iterator[None]:
    """Turns what the system says about writing `path` into a StoreError of one line; lets FileExistsError through."""
    try:
        yield
    except FileExistsError:
        if path.exists() and path.parent.is_dir():
            raise
        raise StoreError(f"{path.parent}: is a file, not a folder; choose another path") from None
    except NotADirectoryError:
        raise StoreError(f"{path.parent}: not a folder; choose another path") from None
    except PermissionError:
        raise StoreError(f"{path}: not writable; give this user the right to write, or choose another path") from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreError(f"{path}: disk full; free space there, or choose another path") from None
        if error.errno == errno.EROFS:
            raise StoreError(f"{path}: read-only file system; choose another path") from None
        raise StoreError(f"{path}: cannot be written ({error.strerror}); check the disk, then start again") from None
