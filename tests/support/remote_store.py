"""Provide a store on the local disk whose objects must be fetched, as those on S3 must."""

from __future__ import annotations

import time
from pathlib import Path

from electra_dist.store.atomic_files import replacing
from electra_dist.store.open_store import LocalStore


class Remote(LocalStore):
    """Local store without local paths, so that its objects must be fetched; `fetched` lists the keys of all fetches.

    A fetch sleeps `pause_s` seconds after each KiB.
    """

    def __init__(self, folder: Path, pause_s: float = 0.0) -> None:
        super().__init__(folder)
        self.pause_s = pause_s
        self.fetched: list[str] = []

    def local_path(self, key: str) -> None:  # type: ignore[override]
        return None

    def fetch(self, key: str, destination: Path) -> None:
        self.fetched.append(key)
        data = super().local_path(key).read_bytes()
        with replacing(destination) as out:
            for first in range(0, len(data), 1024):
                out.write(data[first : first + 1024])
                out.flush()
                time.sleep(self.pause_s)
