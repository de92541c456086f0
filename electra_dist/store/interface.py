"""The interface of a store: what a local folder and an S3 prefix have in common.

Guarantee: a write is seen whole or not at all, also by a reader that looks while the writer is killed; of several
racing `write_new` calls for one key exactly one returns True. A key cannot name anything outside the store's folder.
A user's mistake (missing bucket, no permission, disk full) is one line with the URL and the next step; no error text
holds a credential.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from electra_dist.errors import StoreError


class Store(ABC):
    """A folder of objects. Keys are relative, '/'-separated paths. Safe to use from several threads."""

    url: str
    retries: int = 0  # requests repeated since the store was opened
    retry_wait_s: float = 0.0  # seconds slept before them

    @abstractmethod
    def local_path(self, key: str) -> Path | None:
        """The file behind `key`, which need not exist; None when the store is not a local folder."""

    @abstractmethod
    def read(self, key: str, *, must_exist: bool = False) -> bytes:
        """All bytes of an object.

        Args:
            must_exist: the object is known to exist, so "not found" is tried again a few times before it is believed.

        Raises:
            StoreMissing: there is no such object.
        """

    @abstractmethod
    def read_range(self, key: str, start: int, length: int, *, must_exist: bool = False) -> memoryview:
        """Bytes [start, start + length) of an object, writable; fewer only where it ends before. See `read`."""

    @abstractmethod
    def exists(self, key: str) -> bool:
        """Whether there is such an object."""

    @abstractmethod
    def size(self, key: str) -> int:
        """Bytes of an object. Raises StoreMissing if there is none."""

    @abstractmethod
    def fetch(self, key: str, destination: Path, *, must_exist: bool = False) -> None:
        """Copy an object to a local file, synced and renamed into place. See `read` for `must_exist` and errors."""

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


def check_key(key: str) -> str:
    """`key` itself, if it names something below the folder.

    Raises:
        StoreError: absolute, empty, with an empty, `.` or `..` part, a backslash or a control character.
    """
    parts = key.split("/")
    if any(part in ("", ".", "..") for part in parts) or any(ord(c) < 32 or c in "\\\x7f" for c in key):
        raise StoreError(f"key {key!r}: not a relative path below its folder; the file that names it is damaged")
    return key
