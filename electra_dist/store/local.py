"""A local folder as a store.

Guarantee: that of `interface.py`.

How: a temporary file is written, synced and renamed (or, for `write_new`, hard-linked, which fails if the name is
taken); `files.py` does it.

Cost: one fsync of the file and one of the folder per local write.

Where it stops: a symbolic link inside a local store is followed (people link data sets into place); a shared file
system must offer atomic rename and link (Lustre, GPFS, WekaFS and NFSv3+ do).
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from electra_dist.store.files import (
    TEMPORARY_SUFFIX,
    is_temporary,
    readable,
    replacing,
    sync_folder,
    writable,
)
from electra_dist.store.interface import Store, check_key


class LocalStore(Store):
    """A folder. It is created by the first write."""

    def __init__(self, folder: Path) -> None:
        self.url = str(folder)
        self._folder = folder

    def local_path(self, key: str) -> Path:
        """See `Store`."""
        return self._folder / check_key(key)

    def read(self, key: str, *, must_exist: bool = False) -> bytes:
        """See `Store`."""
        path = self.local_path(key)
        with readable(path):
            return path.read_bytes()

    def read_range(self, key: str, start: int, length: int, *, must_exist: bool = False) -> memoryview:
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

    def fetch(self, key: str, destination: Path, *, must_exist: bool = False) -> None:
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
                key = (relative / name[1:].removesuffix(TEMPORARY_SUFFIX).rpartition(".")[0]).as_posix()
                if key.startswith(prefix) and doomed(key):
                    self.delete((relative / name).as_posix())
                    found += 1
        return found
