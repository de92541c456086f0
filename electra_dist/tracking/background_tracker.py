"""Send metrics to a tracking service in a thread: no training step waits for it, and no failure reaches the run.

Guarantee: `log` never blocks and never raises. A service that fails, or that falls 1,000 records behind, is dropped
for the rest of this start, and `problems` returns one line about it. `close` waits 30 s for room in a full queue, then
30 s for the thread, so 60 s at most.

Limits: what a dropped service has missed is not sent again; metrics.jsonl has it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from typing import Protocol

_MAX_WAITING = 1000  # records that wait for the service
_CLOSE_S = 30.0  # how long `close` waits for room in the queue, and then for the thread


class Service(Protocol):
    """Connection to a tracking service; all methods are called in one thread, and each may raise anything."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send the values of a step: tag (name of the curve) -> value."""

    def close(self, has_failed: bool) -> None:
        """Send what is left, and mark the run as finished or failed."""


class BackgroundTracker:
    """Sender of metrics to one tracking service. Only rank 0 has one; call `close` at the end."""

    def __init__(self, name: str, connect: Callable[[], Service]) -> None:
        """Start the thread that connects, which may take long, and sends; `name` is a key such as "log.wandb"."""
        self._name = name
        self._connect = connect
        self._queue: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(_MAX_WAITING)
        self._problems: list[str] = []
        self._is_dropped = False
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Hand a step's values, all finite, to the thread; a service that was dropped after a failure gets none."""
        if self._is_dropped:
            return
        try:
            self._queue.put_nowait((step, dict(values)))
        except queue.Full:
            self._drop(f"it is {_MAX_WAITING:,} records behind")

    def problems(self) -> list[str]:
        """Return one line for each failure since the last call, for the log of the run; usually none."""
        new_problems = []
        while self._problems:
            new_problems.append(self._problems.pop(0))
        return new_problems

    def close(self, has_failed: bool) -> None:
        """Wait at most 60 s until the service has all values; `has_failed` marks the run as failed at the service."""
        self._has_failed = has_failed
        if not self._is_dropped:
            try:
                self._queue.put(None, timeout=_CLOSE_S)
            except queue.Full:
                self._drop(f"it is {_MAX_WAITING:,} records behind")
        self._thread.join(0.0 if self._is_dropped else _CLOSE_S)
        if self._thread.is_alive() and not self._is_dropped:
            self._drop(f"it did not take the last records within {_CLOSE_S:.0f} s")

    def _run(self) -> None:
        try:
            service = self._connect()
            while True:
                record = self._queue.get()
                if record is None or self._is_dropped:
                    break
                service.log(*record)
            service.close(self._has_failed)
        except Exception as error:  # noqa: BLE001  (a service may raise anything, which must not reach the run)
            self._drop(_one_line(error))

    def _drop(self, reason: str) -> None:
        self._is_dropped = True
        self._problems.append(
            f"{self._name}: no longer sent to, because {reason}; training goes on, and metrics.jsonl has all values"
        )


def _one_line(error: Exception) -> str:
    """Describe an error by its class and the first line of its text; for a missing package, say how to install it."""
    if isinstance(error, ModuleNotFoundError):
        return f"the package {error.name} is not installed (pip install {error.name})"
    text = str(error).strip()
    first_line = text.splitlines()[0] if text else ""
    return f"of {type(error).__name__}: {first_line}"[:300]
