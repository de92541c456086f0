"""Define the interface of a store, which a local folder and an S3 prefix both implement.

A store holds objects: sequences of bytes, each under a key, which is a relative path.

Guarantee: a reader sees a write entirely or not at all, even if the writer is killed. Of several `write_new` calls for
one free key at the same time, exactly one returns True. A key cannot name anything outside the store. A user's mistake
(missing bucket, no permission, full disk) raises an error of one line with the URL and the next step. No error text
holds a credential.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from electra_dist.errors import StoreError

Item = TypeVar("Item")
Result = TypeVar("Result")

REQUEST_THREADS = 16  # requests that `in_parallel` sends at a time


class Store(ABC):
    """Folder of objects, local or on S3. An object is a sequence of bytes under a key.

    Keys are relative paths with '/' between the parts. A store can be used from several threads. Any method may
    raise StoreError (access refused, disk full).
    """

    url: str  # the folder or the s3:// URL, for messages; without credentials
    retries: int = 0  # requests repeated since the store was opened
    retry_wait_s: float = 0.0  # seconds slept before these requests
    reread_pauses_s: tuple[float, ...] = (0.0,) * 4  # seconds before each further reading of bytes that are wrong

    @abstractmethod
    def local_path(self, key: str) -> Path | None:
        """Return the path of the file that holds an object, or None if the store is not a local folder."""

    @abstractmethod
    def read(self, key: str, *, must_exist: bool = False) -> bytes:
        """Return all bytes of an object."""

    @abstractmethod
    def read_range(self, key: str, start: int, length: int, *, must_exist: bool = False) -> memoryview:
        """Return the bytes [start, start + length) of an object in new, writable memory."""

    @abstractmethod
    def exists(self, key: str) -> bool:
        """Return whether there is an object with this key; a prefix or folder of objects does not count."""

    @abstractmethod
    def size(self, key: str) -> int:
        """Return the size of an object in bytes."""

    @abstractmethod
    def fetch(self, key: str, destination: Path, *, must_exist: bool = False) -> None:
        """Copy an object to a local file."""

    @abstractmethod
    def write(self, key: str, data: bytes) -> None:
        """Create or replace an object; a reader sees the old bytes or the new ones, never a mixture."""

    @abstractmethod
    def write_new(self, key: str, data: bytes) -> bool:
        """Create an object unless there is one with this key already; return whether this call created it."""

    @abstractmethod
    def upload(self, path: Path, key: str) -> None:
        """Create or replace an object with the content of a local file of any size."""

    @abstractmethod
    def list(self, prefix: str = "") -> list[str]:
        """Return the sorted keys that begin with `prefix`."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Delete an object; a key without an object is no error, so an interrupted deletion can simply be repeated."""

    def delete_all(self, keys: Sequence[str]) -> None:
        """Delete several objects; a key without an object is no error."""
        for key in keys:
            self.delete(key)

    @abstractmethod
    def discard_unfinished(self, prefix: str, doomed: Callable[[str], bool]) -> int:
        """Delete what killed processes left of unfinished writes, and return the number of these writes."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url})"


def in_parallel(function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Call a function for every item, up to `REQUEST_THREADS` calls at a time, to send several requests to a store."""
    if len(items) < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(min(REQUEST_THREADS, len(items))) as pool:
        return list(pool.map(function, items))


def _is_file_name(key: str) -> bool:
    """Return whether the file system can write all characters of a key; it cannot write half of a surrogate pair."""
    try:
        os.fsencode(key)
    except UnicodeEncodeError:
        return False
    return True


def check_key(key: str) -> str:
    """Return `key` unchanged if it is a relative path that stays inside the folder of a store; otherwise raise."""
    has_bad_part = any(part in ("", ".", "..") for part in key.split("/"))
    has_bad_character = any(ord(character) < 32 or character in "\\\x7f" for character in key)
    if has_bad_part or has_bad_character or not _is_file_name(key):
        raise StoreError(
            f"key {key!r} is not a relative path inside the store: it must not be empty or absolute, nor have empty, "
            f"'.' or '..' parts, backslashes, control characters or characters that no file name has; correct or "
            f"rebuild the file that names this key"
        )
    return key
