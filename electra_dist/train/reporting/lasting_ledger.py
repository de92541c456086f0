"""Write a run's events to ledger.jsonl from two threads; keep them in memory while the disk is full or away."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

from electra_dist.errors import StoreAway
from electra_dist.run.ledger import Event, Ledger, has_event
from electra_dist.store.patience import Patience


class LastingLedger:
    """Writer of a run's ledger.jsonl that two threads of rank 0 may use: the step loop and the checkpoint writer."""

    def __init__(self, run_dir: Path, patience: Patience) -> None:
        self._run_dir = run_dir
        self._patience = patience
        self._ledger = Ledger(run_dir)
        self._lock = threading.Lock()

    def record(self, event: Event, step: int, **details: Any) -> None:
        """Append an event and wait until it is on the disk; raise StorageLost if the disk is away for too long."""
        self.record_soon(event, step, **details)
        self._patience.call(self.sync)

    def record_soon(self, event: Event, step: int, **details: Any) -> None:
        """Append an event without waiting for a disk that is full or away.

        An event that the disk refuses stays in memory. It is written before the next event, and before the next
        checkpoint is committed.
        """
        with self._lock, contextlib.suppress(StoreAway):
            self._ledger.append(event, step, **details)

    def record_once(self, event: Event, step: int, **details: Any) -> None:
        """Append an event as `record_soon` does, unless the ledger has an event of this kind and step already."""
        if not self._patience.call(lambda: has_event(self._run_dir, event, step)):
            self.record_soon(event, step, **details)

    def sync(self) -> None:
        """Write the events that the disk has refused so far. Raises StoreAway if the disk refuses them again."""
        with self._lock:
            self._ledger.sync()

    def close(self) -> None:
        """Write the events that the disk has refused, and close the file. Raises StoreAway if that fails again."""
        self._ledger.close()

    def discard(self) -> None:
        """Close the file without another attempt to write the events that the disk has refused."""
        self._ledger.discard()
