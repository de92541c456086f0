"""Store objects as files in a local or shared folder.

Guarantee: a reader sees a write entirely or not at all, even if the writer is killed. Of several racing `write_new`
calls for one key, exactly one returns True.

How: `atomic_files.py` writes and syncs a temporary file, then renames it. `write_new` makes a hard link instead of
renaming, because a link fails if the name is taken.

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

from electra_dist.store.atomic_files import (
    TEMPORARY_SUFFIX,
    is_temporary,
    readable,
    replacing,
    sync_folder,
    writable,
)
from electra_dist.store.interface import Store, check_key

_COPY_BYTES = 1 << 20  # Files are copied in pieces of this size.


class LocalStore(Store):
    """Store on a local or shared folder; the first write creates the folder."""

    def __init__(self, folder: Path) -> None:
        """Remember the folder without touching it."""
        self.url = str(folder)
        self._folder = folder

    def local_path(self, key: str) -> Path:
        """Return the path of the file that holds an object; the file need not exist."""
        return self._folder / check_key(key)

    def read(self, key: str, *, must_exist: bool = False) -> bytes:
        """Return all bytes of an object's file; `must_exist` changes nothing for local files."""
        path = self.local_path(key)
        with readable(path):
            return path.read_bytes()

    def read_range(self, key: str, start: int, length: int, *, must_exist: bool = False) -> memoryview:
        """Return the bytes [start, start + length) of an object, fewer if the file ends earlier, in new memory."""
        path = self.local_path(key)
        data = memoryview(bytearray(length))
        num_read = 0
        with readable(path), path.open("rb", buffering=0) as stream:
            stream.seek(start)
            while count := stream.readinto(data[num_read:]):  # One read returns at most 2 GiB.
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
        """Copy an object to a file outside the store, which appears only when it is complete."""
        source = self.local_path(key)
        with readable(source):
            stream = source.open("rb")
        with stream, replacing(destination) as out:
            shutil.copyfileobj(stream, out, _COPY_BYTES)

    def write(self, key: str, data: bytes) -> None:
        """Create or replace the object's file atomically, synced to the disk."""
        with replacing(self.local_path(key)) as out:
            out.write(data)

    def write_new(self, key: str, data: bytes) -> bool:
        """Create the object's file with a hard link; return False if the name is taken."""
        path = self.local_path(key)
        try:
            with replacing(path, only_new=True) as out:
                out.write(data)
        except FileExistsError:
            return False
        return True

    def upload(self, path: Path, key: str) -> None:
        """Copy a local file into the store, where it appears only when it is complete."""
        with path.open("rb") as stream, replacing(self.local_path(key)) as out:
            shutil.copyfileobj(stream, out, _COPY_BYTES)

    def list(self, prefix: str = "") -> list[str]:
        """Return the sorted keys of all files that begin with `prefix`, without unfinished writes.

        Only the deepest folder that the prefix names in full is searched.
        """
        prefix_folder = prefix.rpartition("/")[0]
        top = self._folder / check_key(prefix_folder) if prefix_folder else self._folder
        keys = []
        for folder, _, names in os.walk(top):
            relative = Path(folder).relative_to(self._folder)
            keys += [(relative / name).as_posix() for name in names if not is_temporary(name)]
        return sorted(key for key in keys if key.startswith(prefix))

    def delete(self, key: str) -> None:
        """Delete the object's file, if it exists, and the folders above it that are then empty."""
        path = self.local_path(key)
        with writable(path):
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # A folder is not empty, or another process has just removed it.
                sync_folder(path.parent)
                for folder in path.parents:
                    if folder == self._folder:
                        break
                    folder.rmdir()

    def discard_unfinished(self, prefix: str, doomed: Callable[[str], bool]) -> int:
        """Delete temporary files that killed writers left in the folder; return their number.

        Args:
            prefix: Only writes of keys that begin with this string are considered.
            doomed: Called with the key that was being written; the temporary file is deleted if it returns True.
        """
        num_deleted = 0
        for folder, _, names in list(os.walk(self._folder)):
            relative = Path(folder).relative_to(self._folder)
            for name in filter(is_temporary, names):
                key = (relative / _final_name(name)).as_posix()
                if key.startswith(prefix) and doomed(key):
                    self.delete((relative / name).as_posix())
                    num_deleted += 1
        return num_deleted


def _final_name(temporary_name: str) -> str:
    """Return NAME for the name `.NAME.<random>.tmp` of an unfinished write."""
    return temporary_name[1:].removesuffix(TEMPORARY_SUFFIX).rpartition(".")[0]
