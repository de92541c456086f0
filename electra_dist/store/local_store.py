"""Store objects as files in a local or shared folder.

Guarantee: a reader sees a write entirely or not at all, even if the writer is killed. Of several `write_new` calls for
one free key at the same time, exactly one returns True.

How: `atomic_files.py` writes and syncs a temporary file, then renames it. `write_new` makes a hard link to the
temporary file instead of renaming it, because a link fails if the name is taken.

Cost: each write syncs the file and its folder once.

Limits: a symbolic link inside the folder is followed, so that data sets can be linked into place. A shared file system
must offer atomic rename and link, as Lustre, GPFS, WekaFS and NFSv3 or newer do.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from electra_dist.errors import StoreError
from electra_dist.store.atomic_files import (
    TEMPORARY_SUFFIX,
    is_temporary,
    readable,
    replacing,
    store_error,
    sync_folder,
    writable,
)
from electra_dist.store.interface import Store, check_key
from electra_dist.store.regular_files import open_regular, read_regular

_MOST_READ_BYTES = 1 << 30  # of an object that is held in memory as a whole
_COPY_BYTES = 1 << 20  # Files are copied in pieces of this size.


class LocalStore(Store):
    """Store on a local or shared folder; the first write creates the folder."""

    def __init__(self, folder: Path) -> None:
        """Remember the folder without reading it. If it is missing, the first write creates it; reads find nothing."""
        self.url = str(folder)
        self._folder = folder

    def local_path(self, key: str) -> Path:
        """Return the path of the file that holds an object; the file need not exist.

        Raises:
            StoreError: The key is not a valid relative path; see `check_key`.
        """
        return self._folder / check_key(key)

    def read(self, key: str, *, must_exist: bool = False) -> bytes:
        """Return all bytes of an object's file, or raise StoreMissing if there is none.

        `must_exist` has no effect: a missing local file is never retried.
        """
        path = self.local_path(key)
        with readable(path):
            return read_regular(path, _MOST_READ_BYTES)

    def read_range(self, key: str, start: int, length: int, *, must_exist: bool = False) -> memoryview:
        """Return the bytes [start, start + length) of an object in new memory; fewer if the file ends earlier.

        Raises StoreMissing if there is no file. `must_exist` has no effect: a missing local file is never retried.
        """
        path = self.local_path(key)
        data = memoryview(bytearray(length))
        num_read = 0
        with readable(path), open_regular(path) as stream:
            stream.seek(start)
            # One call of readinto() reads at most 2 GiB; it returns 0 at the end of the file or of `data`.
            while count := stream.readinto(data[num_read:]):
                num_read += count
        return data[:num_read]

    def exists(self, key: str) -> bool:
        """Return whether the object's file exists; a folder of that name does not count."""
        path = self.local_path(key)
        with readable(path):
            return path.is_file()

    def size(self, key: str) -> int:
        """Return the size of the object's file in bytes, or raise StoreMissing."""
        path = self.local_path(key)
        with readable(path):
            return path.stat().st_size

    def fetch(self, key: str, destination: Path, *, must_exist: bool = False) -> None:
        """Copy an object to the file `destination`, which appears only when it is complete and synced to the disk.

        An existing file is replaced. `must_exist` has no effect: a missing local file is never retried.

        Raises:
            StoreMissing: There is no object with this key.
        """
        source = self.local_path(key)
        with readable(source):
            stream = open_regular(source)
        with stream, replacing(destination) as out:
            shutil.copyfileobj(stream, out, _COPY_BYTES)

    def write(self, key: str, data: bytes) -> None:
        """Create or replace the object's file atomically; return when the file is synced to the disk."""
        with replacing(self.local_path(key)) as out:
            out.write(data)

    def write_new(self, key: str, data: bytes) -> bool:
        """Create the object's file and return True, or return False and change nothing if the file exists.

        The bytes are written to a temporary file, to which a hard link is made; making the link fails if the name is
        taken. So exactly one of several simultaneous writers succeeds.
        """
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

    def upload(self, path: Path, key: str) -> None:
        """Copy a local file into the store, where it appears only when it is complete and synced to the disk."""
        with path.open("rb") as stream, replacing(self.local_path(key)) as out:
            shutil.copyfileobj(stream, out, _COPY_BYTES)

    def list(self, prefix: str = "") -> list[str]:
        """Return the sorted keys of all files that begin with `prefix`, without unfinished writes.

        The prefix is a plain string: "a/b" matches "a/b/x" and "a/bc". Only the folder before its last '/', in this
        example a/, is searched; without a '/', the whole store is. A missing folder has no keys.

        Raises:
            StoreAway: A folder does not respond, so that nothing can be said about its keys.
            StoreError: A folder cannot be read for another reason.
        """
        prefix_folder, _, _ = prefix.rpartition("/")
        search_folder = self._folder
        if prefix_folder:
            search_folder = self._folder / check_key(prefix_folder)
        keys = []
        for folder, _, names in os.walk(search_folder, onerror=_raise_unless_missing):
            key_folder = Path(folder).relative_to(self._folder)
            keys += [(key_folder / name).as_posix() for name in names if not is_temporary(name)]
        return sorted(key for key in keys if key.startswith(prefix))

    def delete(self, key: str) -> None:
        """Delete the object's file, if it exists, and then each folder above it that has become empty.

        The folder of the store itself is never deleted.
        """
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

    def discard_unfinished(self, prefix: str, doomed: Callable[[str], bool]) -> int:
        """Delete temporary files and empty folders that killed writers left in the folder; return the number of files.

        Args:
            prefix: Only temporary files of keys that begin with this string are considered.
            doomed: Called with the key that was being written; the temporary file is deleted if it returns True. It
                must return False for a key that a living process may still be writing.
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
        """Remove an empty folder that a writer created for a file before it was killed; leave any other folder.

        Args:
            key_folder: The folder below that of the store.
            prefix: Only a folder whose path begins with this string is removed.
            doomed: Called with the folder and a slash; the folder is removed if it returns True.
        """
        if key_folder.startswith(prefix) and doomed(f"{key_folder}/"):
            with contextlib.suppress(OSError):  # The folder is not empty, or no longer exists.
                (self._folder / key_folder).rmdir()


def _raise_unless_missing(error: OSError) -> None:
    """Raise the error of a folder that cannot be listed, because a folder that does not respond must not look empty.

    A folder that is missing, or that another process has just deleted, is empty.
    """
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return
    raise store_error(Path(error.filename), error) from None


def _final_name(temporary_name: str) -> str:
    """Return the name that a temporary file would have received: "a.bin" for ".a.bin.1f2e3d4c.tmp"."""
    name_and_random = temporary_name.removeprefix(".").removesuffix(TEMPORARY_SUFFIX)
    name, _, _ = name_and_random.rpartition(".")
    return name
