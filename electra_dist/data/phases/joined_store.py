"""Read the files of several corpora through one store, so that one cache of shards serves all phases of a run.

Guarantee: a key of the first corpus is its own key there. A key of the n-th later corpus begins with `phase-n/`. Every
error names the folder or URL of the corpus that it comes from.

Limits: the store is for reading only. A shard of the first corpus in a folder that is called like a prefix of a later
corpus would be looked up there; its digest does not agree then, and the run is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from electra_dist.store.interface import Store, check_key


def phase_key(phase: int, key: str) -> str:
    """Return the key in a joined store of an object of a phase's corpus; phase 0 is that of `data.corpus`."""
    return f"phase-{phase}/{key}" if phase else key


class JoinedStore(Store):
    """Store that reads the objects of several corpora, one for each phase of a run, under keys of `phase_key`."""

    url = "data.phases"

    def __init__(self, stores: Sequence[Store]) -> None:
        """Keep the stores of the corpora, in the order of the phases."""
        self._stores = list(stores)
        self.reread_pauses_s = stores[0].reread_pauses_s

    @property
    def retries(self) -> int:  # type: ignore[override]
        """Return how many requests were repeated since the stores were opened, over all corpora."""
        return sum(store.retries for store in self._stores)

    @property
    def retry_wait_s(self) -> float:  # type: ignore[override]
        """Return the seconds slept before these requests."""
        return sum(store.retry_wait_s for store in self._stores)

    def _find(self, key: str) -> tuple[Store, str]:
        """Return the store of the corpus that holds an object, and the object's key in it."""
        for phase, store in enumerate(self._stores):
            prefix = phase_key(phase, "")
            if phase and key.startswith(prefix):
                return store, key.removeprefix(prefix)
        return self._stores[0], key

    def local_path(self, key: str) -> Path | None:
        """Return the path of the file that holds an object, or None if its corpus is not in a local folder."""
        store, own_key = self._find(check_key(key))
        return store.local_path(own_key)

    def read(self, key: str, *, must_exist: bool = False) -> bytes:
        """Return all bytes of an object."""
        store, own_key = self._find(key)
        return store.read(own_key, must_exist=must_exist)

    def read_range(self, key: str, start: int, length: int, *, must_exist: bool = False) -> memoryview:
        """Return the bytes [start, start + length) of an object in new, writable memory."""
        store, own_key = self._find(key)
        return store.read_range(own_key, start, length, must_exist=must_exist)

    def exists(self, key: str) -> bool:
        """Return whether there is an object with this key."""
        store, own_key = self._find(key)
        return store.exists(own_key)

    def size(self, key: str) -> int:
        """Return the size of an object in bytes."""
        store, own_key = self._find(key)
        return store.size(own_key)

    def fetch(self, key: str, destination: Path, *, must_exist: bool = False) -> None:
        """Copy an object to a local file."""
        store, own_key = self._find(key)
        store.fetch(own_key, destination, must_exist=must_exist)

    def list(self, prefix: str = "") -> list[str]:
        """Return the sorted keys of all corpora that begin with `prefix`."""
        keys = [phase_key(phase, key) for phase, store in enumerate(self._stores) for key in store.list()]
        return sorted(key for key in keys if key.startswith(prefix))

    def write(self, key: str, data: bytes) -> None:
        """Refuse: a run does not write into its corpora."""
        self._refuse()

    def write_new(self, key: str, data: bytes) -> bool:
        """Refuse: a run does not write into its corpora."""
        self._refuse()

    def upload(self, path: Path, key: str) -> None:
        """Refuse: a run does not write into its corpora."""
        self._refuse()

    def delete(self, key: str) -> None:
        """Refuse: a run does not delete from its corpora."""
        self._refuse()

    def discard_unfinished(self, prefix: str, doomed: Callable[[str], bool]) -> int:
        """Refuse: a run does not delete from its corpora."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        """Raise an error for a call that would change a corpus; no part of a run makes one."""
        raise AssertionError("the corpora of a run are only read")
