"""Where bytes live: a local folder or s3://bucket/prefix behind one small interface.

Guarantee: a write is seen whole or not at all, also by a reader that looks while the writer is killed; of several
racing `write_new` calls for one key exactly one returns True. A key cannot name anything outside the store's folder.
What a user can mend (missing bucket, refused, disk full) is one line with the URL and the next step; no text ever
holds a credential.

How: locally a temporary file is written, synced and renamed (or, for `write_new`, hard-linked, which fails if the name
is taken). S3 is in `store_s3.py` and needs the extra `s3` (boto3).

Cost: one fsync of the file and one of the folder per local write.

Where it stops: a symbolic link inside a local store is followed (people link data sets into place); a shared file
system must offer atomic rename and link (Lustre, GPFS, WekaFS and NFSv3+ do).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from electra_dist.errors import StoreError, StoreMissing, UserError
from electra_dist.store.retry import RetryPolicy

_TEMPORARY = ".tmp"  # `.NAME.<random>.tmp`: never listed


class Store(ABC):
    """A folder of objects. Keys are relative, '/'-separated paths. Safe to use from several threads."""

    url: str
    retries: int = 0  # requests repeated since the store was opened
    retry_wait_s: float = 0.0  # seconds slept before them

    @abstractmethod
    def local_path(self, key: str) -> Path | None:
        """The file behind `key`, which need not exist; None when the store is not a local folder."""

    @abstractmethod
    def read(self, key: str, *, promised: bool = False) -> bytes:
        """All bytes of an object.

        Args:
            promised: the object is known to exist, so "not found" is tried again a few times before it is believed.

        Raises:
            StoreMissing: there is no such object.
        """

    @abstractmethod
    def read_range(self, key: str, start: int, length: int, *, promised: bool = False) -> memoryview:
        """Bytes [start, start + length) of an object, writable; fewer only where it ends before. See `read`."""

    @abstractmethod
    def exists(self, key: str) -> bool:
        """Whether there is such an object."""

    @abstractmethod
    def size(self, key: str) -> int:
        """Bytes of an object. Raises StoreMissing if there is none."""

    @abstractmethod
    def fetch(self, key: str, destination: Path, *, promised: bool = False) -> None:
        """Copy an object to a local file, synced and renamed into place. See `read` for `promised` and errors."""

    @abstractmethod
    def write(self, key: str, data: bytes) -> None:
        """Create or replace an object; a reader sees the old bytes or the new ones, never a mixture."""

    @abstractmethod
    def write_new(self, key: str, data: bytes) -> bool:
        """Create an object only if the key is free; False if it is taken. Of racing writers exactly one wins."""

    @abstractmethod
    def upload(self, path: Path, key: str) -> None:
        """Create or replace an object from a local file of any size, as atomic as `write`."""

    @abstractmethod
    def list(self, prefix: str = "") -> list[str]:
        """Sorted keys that begin with `prefix` (a plain string prefix, as in S3)."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove an object; nothing happens if there is none."""

    @abstractmethod
    def discard_unfinished(self, prefix: str, doomed: Callable[[str], bool]) -> int:
        """Remove what killed writers left, unseen, of keys that begin with `prefix` and are `doomed`; how many."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url})"


def open_store(url: str, endpoint_url: str | None = None, *, retry: RetryPolicy | None = None) -> Store:
    """The store at a local path or at s3://bucket/prefix. Nothing is touched until the first use.

    Args:
        endpoint_url: S3 service other than AWS's, for example http://10.0.0.1:9000.
        retry: how patient to be with S3.

    Raises:
        UserError: another scheme, a malformed URL, or S3 without boto3.
    """
    if url.startswith("s3://"):
        from electra_dist.store.s3 import S3Store  # boto3 is an optional extra

        return S3Store(url, endpoint_url, retry or RetryPolicy())
    scheme, separator, rest = url.partition("://")
    if separator and scheme != "file":
        raise UserError(f"{scheme}://...: unknown kind of storage; give a local path or s3://bucket/prefix")
    if not (path := rest if separator else url):
        raise UserError("empty storage path; give a local path or s3://bucket/prefix")
    return LocalStore(Path(path).expanduser())


def check_key(key: str) -> str:
    """`key` itself, if it names something below the folder.

    Raises:
        StoreError: absolute, empty, with an empty, `.` or `..` part, a backslash or a control character.
    """
    parts = key.split("/")
    if any(part in ("", ".", "..") for part in parts) or any(ord(c) < 32 or c in "\\\x7f" for c in key):
        raise StoreError(f"key {key!r}: not a relative path below its folder; the file that names it is damaged")
    return key


class LocalStore(Store):
    """A folder. It is created by the first write."""

    def __init__(self, folder: Path) -> None:
        self.url = str(folder)
        self._folder = folder

    def local_path(self, key: str) -> Path:
        """See `Store`."""
        return self._folder / check_key(key)

    def read(self, key: str, *, promised: bool = False) -> bytes:
        """See `Store`."""
        path = self.local_path(key)
        with readable(path):
            return path.read_bytes()

    def read_range(self, key: str, start: int, length: int, *, promised: bool = False) -> memoryview:
        """See `Store`."""
        path = self.local_path(key)
        data, done = memoryview(bytearray(length)), 0
        with readable(path), path.open("rb", buffering=0) as stream:
            stream.seek(start)
            while count := stream.readinto(data[done:]):  # one read gives at most 2 GiB
                done += count
        return data[:done]

    def exists(self, key: str) -> bool:
        """See `Store`."""
        path = self.local_path(key)
        with readable(path):
            return path.is_file()

    def size(self, key: str) -> int:
        """See `Store`."""
        path = self.local_path(key)
        with readable(path):
            return path.stat().st_size

    def fetch(self, key: str, destination: Path, *, promised: bool = False) -> None:
        """See `Store`."""
        source = self.local_path(key)
        with readable(source):
            stream = source.open("rb")
        with stream, replacing(destination) as out:
            shutil.copyfileobj(stream, out, 1 << 20)

    def write(self, key: str, data: bytes) -> None:
        """See `Store`."""
        with replacing(self.local_path(key)) as out:
            out.write(data)

    def write_new(self, key: str, data: bytes) -> bool:
        """See `Store`."""
        path = self.local_path(key)
        try:
            with replacing(path, only_new=True) as out:
                out.write(data)
        except FileExistsError:
            return False
        return True

    def upload(self, path: Path, key: str) -> None:
        """See `Store`."""
        with path.open("rb") as stream, replacing(self.local_path(key)) as out:
            shutil.copyfileobj(stream, out, 1 << 20)

    def list(self, prefix: str = "") -> list[str]:
        """See `Store`."""
        inside = prefix.rpartition("/")[0]
        top = self._folder / check_key(inside) if inside else self._folder
        keys = []
        for folder, _, names in os.walk(top):
            relative = Path(folder).relative_to(self._folder)
            keys += [(relative / name).as_posix() for name in names if not is_temporary(name)]
        return sorted(key for key in keys if key.startswith(prefix))

    def delete(self, key: str) -> None:
        """See `Store`."""
        path = self.local_path(key)
        with writable(path):
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # a folder that is not empty, or that another process just removed
                sync_folder(path.parent)
                for folder in path.parents:
                    if folder == self._folder:
                        break
                    folder.rmdir()

    def discard_unfinished(self, prefix: str, doomed: Callable[[str], bool]) -> int:
        """See `Store`."""
        found = 0
        for folder, _, names in list(os.walk(self._folder)):
            relative = Path(folder).relative_to(self._folder)
            for name in filter(is_temporary, names):
                key = (relative / name[1:].removesuffix(_TEMPORARY).rpartition(".")[0]).as_posix()
                if key.startswith(prefix) and doomed(key):
                    self.delete((relative / name).as_posix())
                    found += 1
        return found


def is_temporary(name: str) -> bool:
    """Whether a file name is that of an unfinished write."""
    return name.startswith(".") and name.endswith(_TEMPORARY)


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
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{_TEMPORARY}")
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
