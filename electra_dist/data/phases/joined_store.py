"""Read the files of several corpora through one store, so that one cache of shards serves all phases of a run.

Guarantee: an object of the first corpus has the same key in the joined store as in its own store. The key of an object
of the n-th later corpus begins with `phase-n/`. Every error names the folder or URL of the corpus that it concerns.

Limits: the store is for reading only. If the first corpus has a shard in a subfolder called `phase-n`, the shard is
looked up in the n-th later corpus instead; the run is then refused, because the bytes found there have another digest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from typing_extensions import override

from electra_dist.store.interface import Store, check_key


def phase_key(phase: int, key: str) -> str:
    """Prefix an object's key with its data phase, so that one store can serve all corpora; phase 0 has no prefix."""
    return f"phase-{phase}/{key}" if phase else key


class JoinedStore(Store):
    """Read-only store that joins the stores of a run's corpora, one for each phase; `phase_key` makes its keys.

    Reading raises the errors of the corpus's own store. Writing or deleting raises AssertionError.
    """

    url = "data.phases"

    def __init__(self, stores: Sequence[Store]) -> None:
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
        for phase, store in enumerate(self._stores):
            prefix = phase_key(phase, "")
            if phase and key.startswith(prefix):
                return store, key.removeprefix(prefix)
        return self._stores[0], key

    @override
    def local_path(self, key: str) -> Path | None:
        store, own_key = self._find(check_key(key))
        return store.local_path(own_key)

    @override
    def read(self, key: str, *, must_exist: bool = False) -> bytes:
        store, own_key = self._find(key)
        return store.read(own_key, must_exist=must_exist)

    @override
    def read_range(self, key: str, start: int, length: int, *, must_exist: bool = False) -> memoryview:
        store, own_key = self._find(key)
        return store.read_range(own_key, start, length, must_exist=must_exist)

    @override
    def exists(self, key: str) -> bool:
        store, own_key = self._find(key)
        return store.exists(own_key)

    @override
    def size(self, key: str) -> int:
        store, own_key = self._find(key)
        return store.size(own_key)

    @override
    def fetch(self, key: str, destination: Path, *, must_exist: bool = False) -> None:
        store, own_key = self._find(key)
        store.fetch(own_key, destination, must_exist=must_exist)

    @override
    def sizes(self, prefix: str = "") -> dict[str, int]:
        found = {}
        for phase, store in enumerate(self._stores):
            found.update({phase_key(phase, key): size for key, size in store.sizes().items()})
        return {key: found[key] for key in sorted(found) if key.startswith(prefix)}

    @override
    def write(self, key: str, data: bytes) -> None:
        self._refuse()

    @override
    def write_new(self, key: str, data: bytes) -> bool:
        self._refuse()

    @override
    def upload(self, path: Path, key: str) -> None:
        self._refuse()

    @override
    def delete(self, key: str) -> None:
        self._refuse()

    @override
    def discard_unfinished(self, prefix: str, doomed: Callable[[str], bool]) -> int:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise AssertionError("the corpora of a run are only read")
