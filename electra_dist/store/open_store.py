"""Store objects as files in a folder, and open the store that a URL names: a folder, or a prefix of S3 or a cloud.

How: `atomic_files.py` writes and syncs a temporary file, then renames it. `write_new` makes a hard link to the
temporary file instead of renaming it, because a link fails if the name is taken. So exactly one of several
simultaneous writers succeeds. A missing file is never retried.

Limits: a symbolic link inside the folder is followed, so that data sets can be linked into place. A shared file system
must offer atomic rename and link, as Lustre, GPFS, WekaFS and NFSv3 or newer do.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from typing_extensions import override

from electra_dist.errors import StoreAway, StoreError, StoreMissing, UserError
from electra_dist.store.atomic_files import (
    TEMPORARY_SUFFIX,
    is_temporary,
    nearest_folder,
    open_regular,
    read_regular,
    readable,
    replacing,
    store_error,
    sync_folder,
    writable,
)
from electra_dist.store.interface import Store, check_key
from electra_dist.store.patience import Patience, command_patience, waits

REMOTE_SCHEMES = ("s3://", "az://", "gs://")  # of stores that are no folder
_MOST_READ_BYTES = 1 << 30  # Larger objects are not read into memory as a whole.
_COPY_BYTES = 1 << 20  # Files are copied in pieces of this size.


class LocalStore(Store):
    """Store in a local or shared folder. The first write creates the folder; until then the store is empty."""

    def __init__(self, folder: Path, patience: Patience | None = None) -> None:
        """Use a folder. If `patience` is None, no operation waits for a disk that is full or away."""
        self.url = str(folder)
        self.patience = patience or Patience(0.0)
        self._folder = folder

    @override
    def local_path(self, key: str) -> Path:
        return self._folder / check_key(key)

    @override
    @waits
    def read(self, key: str) -> bytes:
        path = self.local_path(key)
        with readable(path):
            return read_regular(path, _MOST_READ_BYTES)

    @override
    @waits
    def read_range(self, key: str, start: int, length: int) -> memoryview:
        path = self.local_path(key)
        data = memoryview(bytearray(length))
        num_read = 0
        with readable(path), open_regular(path) as stream:
            stream.seek(start)
            # One call of readinto() reads at most 2 GiB; it returns 0 at the end of the file or of `data`.
            while count := stream.readinto(data[num_read:]):
                num_read += count
        return data[:num_read]

    @override
    @waits
    def exists(self, key: str) -> bool:
        path = self.local_path(key)
        with readable(path):
            return path.is_file()

    @override
    @waits
    def size(self, key: str) -> int:
        path = self.local_path(key)
        with readable(path):
            return path.stat().st_size

    @override
    @waits
    def fetch(self, key: str, destination: Path) -> None:
        source = self.local_path(key)
        with readable(source):
            stream = open_regular(source)
        with stream, replacing(destination) as out:
            shutil.copyfileobj(stream, out, _COPY_BYTES)

    @override
    @waits
    def write(self, key: str, data: bytes) -> None:
        with replacing(self.local_path(key)) as out:
            out.write(data)

    @override
    @waits
    def write_pieces(self, key: str, pieces: Sequence[bytes | memoryview]) -> None:
        path = self.local_path(key)
        _check_space(path, sum(len(piece) for piece in pieces))
        with replacing(path) as out:
            for piece in pieces:
                out.write(piece)

    @override
    @waits
    def write_new(self, key: str, data: bytes) -> bool:
        path = self.local_path(key)
        try:
            with replacing(path, only_new=True) as out:
                out.write(data)
        except FileExistsError:
            return False
        except StoreError:
            # The process that created the object first may have deleted this call's temporary file as a leftover.
            if path.exists():
                return False
            raise
        return True

    @override
    @waits
    def upload(self, path: Path, key: str) -> None:
        with path.open("rb") as stream, replacing(self.local_path(key)) as out:
            shutil.copyfileobj(stream, out, _COPY_BYTES)

    @override
    @waits
    def sizes(self, prefix: str = "") -> dict[str, int]:
        found = {}
        for key in self.list(prefix):
            path = self._folder / key  # also a name that is no key of ours, such as one with a backslash
            with contextlib.suppress(StoreMissing), readable(path):  # deleted since it was listed
                found[key] = path.stat().st_size
        return found

    @override
    @waits
    def list(self, prefix: str = "") -> list[str]:
        prefix_folder, _, _ = prefix.rpartition("/")
        search_folder = self._folder
        if prefix_folder:
            search_folder = self._folder / check_key(prefix_folder)
        keys = []
        for folder, _, names in os.walk(search_folder, onerror=_raise_unless_missing):
            key_folder = Path(folder).relative_to(self._folder)
            keys += [(key_folder / name).as_posix() for name in names if not is_temporary(name)]
        return sorted(key for key in keys if key.startswith(prefix))

    @override
    @waits
    def delete(self, key: str) -> None:
        """Delete the file, then each folder above it, within the store, that has become empty."""
        path = self.local_path(key)
        with writable(path):
            path.unlink(missing_ok=True)
            # rmdir() fails at the first folder that is not empty, or that another process has just removed.
            with contextlib.suppress(OSError):
                sync_folder(path.parent)
                for folder in path.parents:
                    if folder == self._folder:
                        break
                    folder.rmdir()

    @override
    @waits
    def discard_unfinished(self, prefix: str, doomed: Callable[[str], bool]) -> int:
        """Delete what killed writers left, and return the number of deleted files.

        These are temporary files for which `doomed(key of the finished file)` is True, and empty folders.
        """
        num_deleted = 0
        # The walk is completed before anything is deleted, because `delete` also removes empty folders.
        for folder, folder_names, names in list(os.walk(self._folder, onerror=_raise_unless_missing)):
            key_folder = Path(folder).relative_to(self._folder)
            if not names and not folder_names:
                self._remove_empty(key_folder.as_posix(), prefix, doomed)
            temporary_names = [name for name in names if is_temporary(name)]
            for name in temporary_names:
                final_key = (key_folder / _final_name(name)).as_posix()
                if final_key.startswith(prefix) and doomed(final_key):
                    self.delete((key_folder / name).as_posix())
                    num_deleted += 1
        return num_deleted

    def _remove_empty(self, key_folder: str, prefix: str, doomed: Callable[[str], bool]) -> None:
        if key_folder.startswith(prefix) and doomed(f"{key_folder}/"):
            with contextlib.suppress(OSError):  # The folder is not empty, or no longer exists.
                (self._folder / key_folder).rmdir()


def _check_space(path: Path, needed_bytes: int) -> None:
    """Raise StoreAway if the disk has no room for a large file, because a try would fill it for other users, too."""
    try:
        free_bytes = shutil.disk_usage(nearest_folder(path.parent)).free
    except OSError:
        return  # The write itself has the better message.
    if free_bytes < needed_bytes:
        raise StoreAway(
            f"{path}: disk full: {free_bytes / 1e6:.1f} MB free, {needed_bytes / 1e6:.1f} MB needed; free space "
            f"there, or choose another path"
        )


def _raise_unless_missing(error: OSError) -> None:
    """Raise StoreError if `error` says anything else than that a folder is missing.

    A folder that exists and cannot be listed would otherwise look empty.
    """
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return
    raise store_error(Path(error.filename), error) from None


def _final_name(temporary_name: str) -> str:
    """Return the name that a temporary file was to get when complete: "a.bin" for ".a.bin.1f2e3d4c.tmp"."""
    name_and_random = temporary_name.removeprefix(".").removesuffix(TEMPORARY_SUFFIX)
    name, _, _ = name_and_random.rpartition(".")
    return name


def open_store(url: str, endpoint_url: str | None = None, patience: Patience | None = None) -> Store:
    """Return the store at a local path (~ is expanded), file://, s3://, az:// or gs://; read nothing yet.

    A missing folder or bucket is noticed at the first use. `endpoint_url` names an S3-compatible service, such as
    http://10.0.0.1:9000; None is AWS. `patience` says how long operations wait for storage that is full or does not
    respond; None means three minutes, as in a command. Raises UserError for a malformed URL.
    """
    if patience is None:
        patience = command_patience()
    if url.startswith("s3://"):
        from electra_dist.store.s3.s3_store import S3Store  # its import of boto3 takes long

        return S3Store(url, endpoint_url, patience)
    if url.startswith(REMOTE_SCHEMES):
        from electra_dist.store.cloud_store import CloudStore

        return CloudStore(url, endpoint_url, patience)
    scheme, separator, rest = url.partition("://")
    if not separator:
        path = url
    elif scheme == "file":
        path = rest
    else:
        raise UserError(f"{scheme}://...: unknown kind of storage; give a local path, s3://, az:// or gs://")
    if not path:
        raise UserError(f"empty storage path {url!r}; give a local path or s3://bucket/prefix")
    return LocalStore(without_tilde(path), patience)


def without_tilde(path: str | Path) -> Path:
    """Replace a leading ~ or ~USER of a path by that user's home folder; raise UserError if there is none."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(
            f"{path}: there is no such user, or this user has no home folder; write the whole path, or set HOME"
        ) from None


def absolute_location(location: str) -> str:
    """Return a local path as an absolute path, with "~" expanded; return a URL or an empty string unchanged."""
    return str(without_tilde(location).absolute()) if location and "://" not in location else location
