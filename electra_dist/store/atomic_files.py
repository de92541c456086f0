"""Replace local files atomically, open, digest and lock them, and report the operating system's errors in one line.

Guarantee: a file that is written through `replacing` never appears half written. A reader sees the old bytes or the
new ones, and after a crash the file holds one of the two. Callers use it for every file that another process may read.
Of files that another program, or a stranger, may have written, only regular ones are opened (`open_regular`): a named
pipe never blocks a reader, and a device never feeds it without end. What is read as a whole has a limit of size.

Limits: neither the content of a file nor the target of a link is checked. A file that is exchanged for a pipe or a
device between the check and the opening is opened.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import fcntl
import hashlib
import io
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO, Literal, NamedTuple

from electra_dist.errors import ManifestMismatch, StoreAway, StoreError, StoreMissing
from electra_dist.store.failure_kinds import OS_FAILURES, FailureKind, os_failure

_FOLDER_TRIES = 20  # Attempts to create a file whose folder other processes remove again and again.

# Permissions of a new file, from which the process's umask takes away: those of any file, of a file that may hold a
# secret, and of a script that may hold one. Nothing else sets permissions.
SHARED, PRIVATE, PRIVATE_PROGRAM = 0o666, 0o600, 0o700

TEMPORARY_SUFFIX = ".tmp"  # An unfinished write of NAME is the file `.NAME.<random>.tmp`.
_TEMPORARY_NAME = re.compile(r"\..+\.[0-9a-f]{8}\.tmp", re.DOTALL)

MOST_BYTES = 1 << 28  # of a configuration, a vocabulary or a record; the largest tokenizer.json has a tenth of it
MOST_DATA_BYTES = 1 << 32  # of a data set that is held in memory as a whole


def is_temporary(name: str) -> bool:
    """Return whether a file name (without folder) is one of a temporary file: `.NAME.<8 hexadecimal digits>.tmp`.

    Temporary files are deleted as leftovers of killed processes. A user's own `.thesis.tmp` is not one of them.
    """
    return _TEMPORARY_NAME.fullmatch(name) is not None


@contextlib.contextmanager
def replacing(path: Path, *, only_new: bool = False, permissions: int = SHARED) -> Iterator[IO[bytes]]:
    """Open a temporary file for writing, which is renamed to `path` when the `with` block ends without an exception.

    Missing folders are created; file and folder are synced to the disk. If the block raises, `path` stays as it was.
    With `only_new`, an existing file raises FileExistsError at the end of the block. The new file gets `permissions`,
    whatever permissions an older file had. Raises StoreAway if the disk is full, read-only or does not respond.
    """
    with writable(path):
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")
        try:
            with create_file(temporary, "xb", permissions) as out:
                yield out
                # The bytes must be on the disk before the name: after a power failure, `path` is never half a file.
                out.flush()
                os.fsync(out.fileno())
            if only_new:
                os.link(temporary, path)  # Unlike a rename, a hard link fails if the name is taken.
            else:
                os.replace(temporary, path)
            sync_folder(path.parent)
        finally:
            # A disk that has just become read-only refuses this, too; the error of the write is the one to report.
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a local file in hexadecimal. Wrap the call in `readable` to convert an OSError."""
    with open_regular(path) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


class NamedDigest(NamedTuple):
    """SHA-256 that a file must have, and what the error message says if the file has another one."""

    sha256: str  # hexadecimal
    named_by: str  # path or URL of the file that names this digest
    next_step: str  # what the user can do about another digest, as an imperative


def check_digest(data: bytes, name: str, expected: NamedDigest) -> None:
    """Raise ManifestMismatch, which names the file, if its content `data` does not have the digest `expected`."""
    found = hashlib.sha256(data).hexdigest()
    if found != expected.sha256:
        raise ManifestMismatch(
            f"{name}: its sha256 is {found}, but {expected.named_by} names {expected.sha256}; {expected.next_step}"
        )


def create_file(path: Path, mode: Literal["wb", "xb"], permissions: int = SHARED) -> BinaryIO:
    """Create missing folders, then open a file for writing; mode "xb" raises FileExistsError if the file exists."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags, permissions)

    # Another process that deletes the last file of the folder removes the folder, too (`LocalStore.delete`), perhaps
    # before this file is in it. The folder is then created again.
    for _ in range(_FOLDER_TRIES - 1):
        with contextlib.suppress(FileNotFoundError):
            make_folder(path.parent)
            return open(path, mode, opener=opener)
    make_folder(path.parent)
    return open(path, mode, opener=opener)


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents, synced to the disk so that they survive a power failure."""
    missing_folders = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing_folders:
        sync_folder(path.parent)


def nearest_folder(folder: Path) -> Path:
    """Return `folder` if it exists, otherwise its nearest existing parent, which tells on what disk it would be."""
    folder = folder.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def is_private(folder: Path) -> bool:
    """Return whether a path is a folder that belongs to this user and that no other user may read or write.

    Check this before you use a folder of a known name in a shared directory such as /tmp: another user may have
    created it, or a symbolic link in its place.
    """
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and stat.S_IMODE(status.st_mode) & 0o077 == 0


def sync_folder(folder: Path) -> None:
    """Call fsync on a folder: without this, a power failure may undo a creation, rename or deletion in it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock_file(file: int | IO[bytes], *, shared: bool = False, wait: bool = True) -> bool:
    """Lock an open file by flock until it is closed or the process ends; return False if its file system has no locks.

    If another process holds the lock, wait for it; if `wait` is False, raise BlockingIOError instead.
    """
    operation = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    if not wait:
        operation |= fcntl.LOCK_NB
    try:
        fcntl.flock(file, operation)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


def disk_problem(folder: Path) -> str:
    """Return why nothing can be written to a folder's disk, such as "read-only file system"; "" if no reason is found.

    Nothing is written for this, so a used-up quota is not noticed. The result for a missing folder is "".
    """
    try:
        disk = os.statvfs(folder)
    except OSError as error:
        is_missing = isinstance(error, (FileNotFoundError, NotADirectoryError))
        return "" if is_missing else os_failure(error).reason
    if disk.f_flag & os.ST_RDONLY:
        return OS_FAILURES[errno.EROFS].reason
    if disk.f_blocks > 0 and disk.f_bavail == 0:
        return OS_FAILURES[errno.ENOSPC].reason
    return ""


def did_you_mean(path: Path) -> str:
    """Return " (did you mean NAME?)" with the name in its folder most like that of a missing `path`; else ""."""
    try:
        names = [] if path.exists() else os.listdir(path.parent)
    except OSError:
        return ""
    similar = difflib.get_close_matches(path.name, names, n=1, cutoff=0.8)
    return f" (did you mean {similar[0]}?)" if similar else ""


@contextlib.contextmanager
def readable(path: Path, next_step: str = "check the path, or build or restore the file") -> Iterator[None]:
    """Convert an OSError of the `with` block to a StoreError about `path`, a StoreMissing if there is no file.

    `next_step` says what the user can do if there is no file.
    """
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise StoreMissing(f"{path}: no such file; {next_step}") from None
    except IsADirectoryError:
        raise StoreMissing(f"{path}: is a folder, not a file; give the path of a file") from None
    except PermissionError:
        raise StoreError(f"{path}: not readable; give this user the right to read it") from None
    except OSError as error:
        raise store_error(path, error) from None


@contextlib.contextmanager
def writable(path: Path) -> Iterator[None]:
    """Convert an OSError of the `with` block to a StoreError of one line: `path` and what the user can do.

    StoreAway is raised if the disk is full, read-only or does not respond. A FileExistsError about `path` itself is
    not converted, because callers of `replacing` with `only_new` expect it.
    """
    try:
        yield
    except FileExistsError:
        # Creating the folder raises this, too, if there is a file of its name.
        is_about_path_itself = path.exists() and path.parent.is_dir()
        if is_about_path_itself:
            raise
        raise StoreError(f"{path.parent}: is a file, not a folder; choose another path") from None
    except NotADirectoryError:
        raise StoreError(f"{path.parent}: is not a folder; choose another path") from None
    except PermissionError:
        raise StoreError(f"{path}: not writable; give this user the right to write, or choose another path") from None
    except OSError as error:
        raise store_error(path, error) from None


def store_error(path: Path, error: OSError) -> StoreError:
    """Return the one-line error for an OSError about a file: StoreAway if waiting may help, otherwise StoreError."""
    failure = os_failure(error)
    message = f"{path}: {failure.reason}; {failure.advice}"
    if failure.kind in (FailureKind.TRANSIENT, FailureKind.AWAY):
        return StoreAway(message)
    return StoreError(message)


def open_regular(path: Path | str) -> io.BufferedReader:
    """Open a regular file, or one that a link leads to; raise StoreError for a pipe, socket or device."""
    status = os.stat(path)  # first, because opening a named pipe waits, and opening a device may have an effect
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise StoreError(f"{path}: is a named pipe, a socket or a device; give a regular file")
    return open(path, "rb")


def check_regular(path: Path | str) -> None:
    """Raise an error unless a path is a regular file that can be read: call this before a library opens the path."""
    open_regular(path).close()


def read_regular(path: Path | str, most_bytes: int = MOST_BYTES) -> bytes:
    """Return the bytes of a file; raise StoreError if it has more than `most_bytes` or is a pipe, socket or device."""
    with open_regular(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        data = file.read(most_bytes + 1) if size_bytes <= most_bytes else b""
    if max(size_bytes, len(data)) > most_bytes:  # it may have grown while it was read
        raise StoreError(f"{path}: has more than the {most_bytes:,} bytes that are read of such a file; replace it")
    return data
