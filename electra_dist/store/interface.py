"""Define the interface of a store, and what all stores of objects in a bucket have in common.

Guarantee: a reader sees a write entirely or not at all, even if the writer is killed. Of several `write_new` calls for
one free key at the same time, exactly one returns True. A key cannot name anything outside the store. A user's mistake
(missing bucket, no permission, full disk) raises an error of one line with the URL and the next step. No error text
holds a credential.
"""

from __future__ import annotations

import io
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, TypeVar

from typing_extensions import override

from electra_dist.errors import StoreAway, StoreError, StoreMissing, UserError
from electra_dist.store.atomic_files import replacing
from electra_dist.store.patience import Patience, act_for, acting_thread

Item = TypeVar("Item")
Result = TypeVar("Result")

# Control characters, backslashes, and halves of surrogate pairs, which no name of a file in UTF-8 can have; but a byte
# of a name that is not UTF-8 is such a half for Python (PEP 383), and may be in a key.
_BAD_CHARACTER = re.compile("[\0-\x1f\x7f\\\\\ud800-\udc7f\udd00-\udfff]")
REQUEST_THREADS = 16  # requests that `in_parallel` sends at a time


class Store(ABC):
    """Folder of objects, local or on S3; an object is a sequence of bytes under a key (relative path with '/').

    A store can be used from several threads. If storage is full or does not respond, every method waits as long as the
    store's `Patience` allows, then raises StorageLost; any other StoreError (access refused) is raised at once.
    Reading an object that does not exist raises StoreMissing, on S3 only after a few tries, because a reader knows
    that the object exists, for example from a manifest. `read_or_none` is for an object that may be missing.
    """

    url: str  # the folder or the s3:// URL, for messages; without credentials
    patience = Patience(0.0)  # with which its operations wait while storage is away
    reread_pauses_s: tuple[float, ...] = (0.0,) * 4  # seconds to wait before each further reading of wrong bytes
    _damaged_folders: frozenset[str] = frozenset()  # whose bytes were confirmed to be wrong

    def reread(self, key: str, read: Callable[[], tuple[Result, str]]) -> tuple[Result, str]:
        """Call `read` until it finds no fault; return the value and "", or the value and a fault that is confirmed.

        `read` reads an object once and returns (value, text of the fault or ""); different wrong bytes must give
        different texts. A fault is confirmed if the last two of five readings, with a pause between them, have found
        the same: then the bytes in the store are damaged. If the faults differ, the service, a proxy or the network
        changes the bytes on the way, which is waited for like storage that does not respond. After a confirmed fault,
        wrong bytes of the same folder are read again without pauses.
        """
        value, fault = read()
        if not fault:
            return value, ""
        folder = key.rpartition("/")[0]
        with self.patience.outage() as outage:
            while True:
                previous_fault = ""
                for pause_s in self.reread_pauses_s:
                    if not fault:
                        break
                    if folder not in self._damaged_folders:
                        self.patience.sleep(pause_s)
                    previous_fault = fault
                    value, fault = read()
                if not fault:
                    return value, ""
                if fault == previous_fault:
                    # Of two threads that do this at once, one may be ignored: then its next fault has pauses again.
                    self._damaged_folders |= {folder}
                    return value, fault
                outage.wait_after(
                    StoreAway(
                        f"{self.url}/{key} was read {1 + len(self.reread_pauses_s)} times and was wrong in different "
                        f"ways, last: {fault}; check the network and the storage service, then start again"
                    )
                )
                value, fault = read()

    def verified(self, key: str, read: Callable[[], Result]) -> Result:
        """Return the result of `read`, which reads an object and raises a UserError if its content is wrong.

        Wrong content is read again, because a service or a proxy may send another body, such as an error document with
        status 200; the error is raised if a further reading finds the same. A StoreError, which says nothing about the
        content, is raised at once.
        """

        def read_once() -> tuple[Result | UserError, str]:
            try:
                return read(), ""
            except StoreError:
                raise
            except UserError as error:
                return error, str(error)

        content, _ = self.reread(key, read_once)
        if isinstance(content, UserError):
            raise content
        return content

    def read_verified(self, key: str, parse: Callable[[bytes], Result]) -> Result:
        """Return `parse(bytes of an object)`; `parse` raises UserError for wrong content, which is read again."""
        return self.verified(key, lambda: parse(self.read(key)))

    @abstractmethod
    def local_path(self, key: str) -> Path | None:
        """Return the path of an object's file, which need not exist; None if the store is not a local folder."""

    @abstractmethod
    def read(self, key: str) -> bytes:
        """Return all bytes of an object."""

    def read_or_none(self, key: str) -> bytes | None:
        """Return all bytes of an object, or None if it does not exist."""
        try:
            return self.read(key)
        except StoreMissing:
            return None

    @abstractmethod
    def read_range(self, key: str, start: int, length: int) -> memoryview:
        """Return the bytes [start, start + length) of an object in new, writable memory; fewer at the object's end."""

    @abstractmethod
    def exists(self, key: str) -> bool:
        """Return whether there is an object with this key; a prefix or folder of objects does not count."""

    @abstractmethod
    def size(self, key: str) -> int:
        """Return the size of an object in bytes."""

    @abstractmethod
    def fetch(self, key: str, destination: Path) -> None:
        """Copy an object to a local file, which appears or changes only when the copy is complete and synced."""

    @abstractmethod
    def write(self, key: str, data: bytes) -> None:
        """Create or replace an object atomically. After the call, the object survives a crash of this machine."""

    def write_pieces(self, key: str, pieces: Sequence[bytes | memoryview]) -> None:
        """Create or replace an object of any size atomically; its content is `pieces`, one after another."""
        self.write(key, b"".join(pieces))

    @abstractmethod
    def write_new(self, key: str, data: bytes) -> bool:
        """Create an object unless the key is taken; return whether this call created it.

        Of several writers that call this for one free key, in any process on any machine, exactly one receives True.
        The object can therefore serve as a lock.
        """

    @abstractmethod
    def upload(self, path: Path, key: str) -> None:
        """Create or replace an object atomically by the content of a local file of any size."""

    @abstractmethod
    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Return key -> bytes, in the order of keys, of the objects whose keys begin with `prefix`.

        `prefix` need not end at a slash. Unfinished writes are left out. S3 lists sizes with the keys; a local store
        asks for the size of each file.
        """

    def list(self, prefix: str = "") -> list[str]:
        """Return the sorted keys that begin with `prefix`, which need not end at a slash; omit unfinished writes."""
        return [*self.sizes(prefix)]

    @abstractmethod
    def delete(self, key: str) -> None:
        """Delete an object; a key without an object is no error, so an interrupted deletion can simply be repeated."""

    def delete_all(self, keys: Sequence[str]) -> None:
        """Delete several objects, in few requests if the store can do so. After an error, the call can be repeated."""
        for key in keys:
            self.delete(key)

    @abstractmethod
    def discard_unfinished(self, prefix: str, doomed: Callable[[str], bool]) -> int:
        """Delete temporary files and incomplete multipart uploads that killed writers left; return their number.

        Only unfinished writes to keys that begin with `prefix` and for which `doomed(key)` is True are deleted.
        `doomed` must return False for a key that a living process may still be writing.
        """

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url})"


class RemoteStore(Store):
    """Store of objects below a prefix in a bucket, of S3 or of another cloud. Thread-safe."""

    def __init__(self, url: str, endpoint_url: str | None, patience: Patience) -> None:
        """Take a URL that was checked. `endpoint_url` None is the cloud's own service."""
        self.url = url
        self.patience = patience
        self.reread_pauses_s = patience.pace.reread_pauses_s
        self._endpoint_url = endpoint_url

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the URLs and the limits: another process opens the store anew and counts retries from 0."""
        return type(self), (self.url, self._endpoint_url, self.patience)

    @abstractmethod
    def download(self, key: str, sink: IO[bytes], *, must_exist: bool, start: int = 0, end: int | None = None) -> None:
        """Write the bytes [start, end) of one version of an object to `sink`, an empty, seekable file.

        `end` None is the end of the object. With `must_exist`, the answer "not found" is tried again.
        """

    @override
    def local_path(self, key: str) -> None:
        check_key(key)

    @override
    def read(self, key: str) -> bytes:
        sink = io.BytesIO()
        self.download(key, sink, must_exist=True)
        return sink.getvalue()

    @override
    def read_or_none(self, key: str) -> bytes | None:
        sink = io.BytesIO()
        try:
            self.download(key, sink, must_exist=False)
        except StoreMissing:
            return None
        return sink.getvalue()

    @override
    def read_range(self, key: str, start: int, length: int) -> memoryview:
        sink = io.BytesIO()
        if length:
            self.download(key, sink, must_exist=True, start=start, end=start + length)
        return sink.getbuffer()

    @override
    def exists(self, key: str) -> bool:
        try:
            self.size(key)
        except StoreMissing:
            return False
        return True

    @override
    def fetch(self, key: str, destination: Path) -> None:
        with replacing(destination) as out:
            self.download(key, out, must_exist=True)


def in_parallel(
    function: Callable[[Item], Result], items: Sequence[Item], num_threads: int = REQUEST_THREADS
) -> list[Result]:
    """Call a thread-safe function for every item, in up to `num_threads` threads; return the results in order.

    After a failure no further call is begun. When all calls have ended, the error of the first failed item is raised.
    Waits for storage in these threads count as waits of the caller (`WaitReporter.on_wait`).
    """
    if len(items) < 2:
        return [function(item) for item in items]
    has_failed = threading.Event()

    def call(item: Item) -> Result:
        if has_failed.is_set():
            raise CancelledError  # `in_parallel` itself raises the error of the call that has failed
        try:
            return function(item)
        except BaseException:
            has_failed.set()
            raise

    with ThreadPoolExecutor(min(num_threads, len(items)), initializer=act_for, initargs=(acting_thread(),)) as pool:
        futures = [pool.submit(call, item) for item in items]
    for future in futures:
        error = future.exception()
        if error is not None and not isinstance(error, CancelledError):
            raise error
    return [future.result() for future in futures]


def fulfil(future: Future[Result], function: Callable[[], Result]) -> None:
    """Call a function and store its result or its exception in a future, whose `result` a waiting thread calls."""
    try:
        future.set_result(function())
    except BaseException as error:  # noqa: BLE001  (the waiting thread raises it)
        future.set_exception(error)


def check_key(key: str) -> str:
    """Return `key` unchanged if it is a relative path that stays inside a store's folder; raise StoreError otherwise.

    Keys come from manifests and tar files that others may have written. The key "../x" would leave the folder.
    """
    has_bad_part = any(part in ("", ".", "..") for part in key.split("/"))
    has_bad_character = _BAD_CHARACTER.search(key) is not None
    if has_bad_part or has_bad_character:
        raise StoreError(
            f"key {key!r} is not a relative path inside the store: it must not be empty or absolute, nor have empty, "
            f"'.' or '..' parts, backslashes, control characters or characters that no file name has; correct or "
            f"rebuild the file that names this key"
        )
    return key
