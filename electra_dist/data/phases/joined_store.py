"""Read the files of several corpora through one store, so that one cache of shards serves all phases of a run.

A phase of a run is a range of its steps that trains on one corpus (config key `data.phases`).

Guarantee: an object of the first corpus has the same key in the joined store as in its own store. The key of an object
of the n-th later corpus begins with `phase-n/`. Every error names the folder or URL of the corpus that it concerns.

Limits: the store is for reading only. If the first corpus has a shard in a subfolder called `phase-n`, the shard is
looked up in the n-th later corpus instead; the run is then refused, because the bytes found there have another digest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from electra_dist.store.interface import Store, check_key


def phase_key(phase: int, key: str) -> str:
    """Return the key by which a joined store finds an object of one corpus.

    Args:
        phase: number of the phase that trains on the corpus; 0 means `data.corpus`.
        key: the object's key in the store of its own corpus.
    """
    return f"phase-{phase}/{key}" if phase else key


class JoinedStore(Store):
    """Read-only store of the objects of several corpora, one corpus for each phase of a run.

    `phase_key` gives the key of an object. The methods raise the errors of the corpus's own store, and AssertionError
    if a caller tries to write or delete.
    """

    url = "data.phases"

    def __init__(self, stores: Sequence[Store]) -> None:
        """Keep the stores of the corpora, in the order of the phases."""
        self._stores = list(stores)
        self.reread_pauses_s = stores[0].reread_pauses_s

    @property
    def retries(self) -> int:  # type: ignore[override]
        """Return how many failed requests were repeated since the stores were opened, summed over all corpora."""
        return sum(store.retries for store in self._stores)

    @property
    def retry_wait_s(self) -> float:  # type: ignore[override]
        """Return the total time, in seconds, that all stores have waited before they repeated requests."""
        return sum(store.retry_wait_s for store in self._stores)

    def _find(self, key: str) -> tuple[Store, str]:
        """Return the store of the corpus that an object's key belongs to, and the object's key in that store."""
        for phase, store in enumerate(self._stores):
            prefix = phase_key(phase, "")
            if phase and key.startswith(prefix):
                return store, key.removeprefix(prefix)
        return self._stores[0], key

    def local_path(self, key: str) -> Path | None:
        """Return the path of the file that holds an object, or None if its corpus is not in a local folder.

        Raises:
            StoreError: The key is not a valid relative path.
        """
        store, own_key = self._find(check_key(key))
        return store.local_path(own_key)

    def read(self, key: str, *, must_exist: bool = False) -> bytes:
        """Return all bytes of an object, or raise StoreMissing.

        Args:
            key: key of the object, as made by `phase_key`.
            must_exist: the caller knows that the object exists, so a store on S3 repeats a request that is answered
                "not found".
        """
        store, own_key = self._find(key)
        return store.read(own_key, must_exist=must_exist)

    def read_range(self, key: str, start: int, length: int, *, must_exist: bool = False) -> memoryview:
        """Return the bytes [start, start + length) of an object in new, writable memory, or raise StoreMissing.

        The result is shorter if the object ends earlier.
        """
        store, own_key = self._find(key)
        return store.read_range(own_key, start, length, must_exist=must_exist)

    def exists(self, key: str) -> bool:
        """Return whether there is an object with this key."""
        store, own_key = self._find(key)
        return store.exists(own_key)

    def size(self, key: str) -> int:
        """Return the size of an object in bytes, or raise StoreMissing."""
        store, own_key = self._find(key)
        return store.size(own_key)

    def fetch(self, key: str, destination: Path, *, must_exist: bool = False) -> None:
        """Copy an object to a local file, which appears only when it is complete; raise StoreMissing if there is none.

        Args:
            key: key of the object, as made by `phase_key`.
            destination: path of the local file.
            must_exist: the caller knows that the object exists, so a store on S3 repeats a request that is answered
                "not found".
        """
        store, own_key = self._find(key)
        store.fetch(own_key, destination, must_exist=must_exist)

    def list(self, prefix: str = "") -> list[str]:
        """Return the sorted keys of all corpora, in the form that `phase_key` gives them, that begin with `prefix`."""
        keys = [phase_key(phase, key) for phase, store in enumerate(self._stores) for key in store.list()]
        return sorted(key for key in keys if key.startswith(prefix))

    def write(self, key: str, data: bytes) -> None:
        """Raise AssertionError, because a run does not write into its corpora."""
        self._refuse()

    def write_new(self, key: str, data: bytes) -> bool:
        """Raise AssertionError, because a run does not write into its corpora."""
        self._refuse()

    def upload(self, path: Path, key: str) -> None:
        """Raise AssertionError, because a run does not write into its corpora."""
        self._refuse()

    def delete(self, key: str) -> None:
        """Raise AssertionError, because a run does not delete from its corpora."""
        self._refuse()

    def discard_unfinished(self, prefix: str, doomed: Callable[[str], bool]) -> int:
        """Raise AssertionError, because a run does not delete from its corpora."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        """Raise AssertionError for a call that would change a corpus, which is a mistake in the calling code."""
        raise AssertionError("the corpora of a run are only read")
