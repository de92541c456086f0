"""Wait for storage that is full, read-only or silent, and give up after a limit.

Guarantee: an operation that is called through a `Patience` either succeeds, or raises its own error if no wait helps
(`failure_kinds.py` decides), or raises StorageLost with the first failure once the limit is over. While it waits, a
line on stderr and `Patience.reason` name the first failure. The operation is tried again after 0.5 s, then after
pauses that double up to 10 s.

Limits: a call that blocks in the operating system cannot be interrupted, so it may exceed the limit. An operation must
be repeatable after a failure.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from electra_dist.errors import StorageLost, error_line
from electra_dist.escapes import printable
from electra_dist.store.failure_kinds import is_worth_waiting_for

T = TypeVar("T")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0
_SLICE_S = 1.0  # a pause is cut into slices, after each of which `on_wait` is called


def print_line(text: str) -> None:
    """Print a line to stderr; do nothing if stderr is a file on storage that does not respond."""
    with contextlib.suppress(OSError, ValueError):
        print(printable(text), file=sys.stderr, flush=True)


class Patience:
    """Repeater of failed storage operations. It waits while storage is unavailable, up to a time limit.

    Any thread may call its methods. Each waiting thread has the whole limit for itself.
    """

    def __init__(
        self, limit_s: float, note: Callable[[str], None] = print_line, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Wait at most `limit_s` s (0: never). `note` receives a line when a wait begins and when storage is back."""
        self.limit_s = limit_s
        self.on_wait: Callable[[str], None] = lambda reason: None
        """Called about every second, with the reason, while the thread that created this object waits.

        When the wait is over, it is called once with an empty text.
        """
        self._note = note
        self._clock = clock
        self._owner = threading.get_ident()
        self._reasons: dict[int, str] = {}  # thread -> first failure of the operation that it waits for
        self._is_abandoned = threading.Event()

    @property
    def reason(self) -> str:
        """Return why some thread waits for storage now (the first failure, as one line); "" if no thread waits."""
        return next(iter(list(self._reasons.values())), "")

    @property
    def is_abandoned(self) -> bool:
        """Return whether `abandon` was called."""
        return self._is_abandoned.is_set()

    def abandon(self) -> None:
        """End all present and future waits at once, because the run ends for another reason."""
        self._is_abandoned.set()

    def call(self, operation: Callable[[], T]) -> T:
        """Call an operation until it succeeds, and return its value; raise its own error if no wait helps.

        Raises StorageLost, which names the first failure, when the limit is over or `abandon` was called.
        """
        with self.outage() as outage:
            while True:
                try:
                    return operation()
                except Exception as error:  # noqa: BLE001  (it is raised again if no wait helps)
                    outage.wait_after(error)

    @contextlib.contextmanager
    def outage(self) -> Iterator[Outage]:
        """Give an `Outage` to a `with` block that repeats an operation itself and calls `wait_after` if it fails."""
        outage = Outage(self)
        try:
            yield outage
        except BaseException:
            outage.close(is_back=False)
            raise
        outage.close(is_back=True)

    def _pause(self, pause_s: float, reason: str) -> None:
        end = self._clock() + pause_s
        while True:
            if threading.get_ident() == self._owner:
                self.on_wait(reason)
            remaining_s = end - self._clock()
            if remaining_s <= 0 or self._is_abandoned.wait(min(remaining_s, _SLICE_S)):
                return


class Outage:
    """State of one operation that is repeated while storage is unavailable: its first failure, and when it came."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._first: Exception | None = None
        self._since = 0.0
        self._pause_s = FIRST_PAUSE_S

    def wait_after(self, error: Exception) -> None:
        """Pause before the operation is tried again; raise `error` if no wait helps, StorageLost after the limit."""
        if not is_worth_waiting_for(error):
            raise error
        patience = self._patience
        if self._first is None:
            self._begin(error)
        waited_s = patience._clock() - self._since
        if patience.is_abandoned or waited_s >= patience.limit_s:
            raise StorageLost(
                f"{self._first}; storage was waited for {waited_s:.0f} s (cluster.storage_patience_s "
                f"{patience.limit_s:g})"
            ) from None
        remaining_s = patience.limit_s - waited_s
        patience._pause(min(self._pause_s, remaining_s), str(self._first))
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def _begin(self, error: Exception) -> None:
        patience = self._patience
        self._first = error
        self._since = patience._clock()
        if patience.limit_s > 0 and not patience.is_abandoned:
            patience._reasons[threading.get_ident()] = str(error)
            reason = error_line(error).removeprefix("error: ")
            patience._note(f"waiting up to {patience.limit_s:g} s for storage: {reason}")

    def close(self, is_back: bool) -> None:
        """End the waits, if there were any; with `is_back` (the last try succeeded), report that storage is back."""
        was_waiting = self._patience._reasons.pop(threading.get_ident(), "")
        if self._first is not None and threading.get_ident() == self._patience._owner:
            self._patience.on_wait("")
        if was_waiting and is_back:
            waited_s = self._patience._clock() - self._since
            self._patience._note(f"storage is back after {waited_s:.0f} s: {was_waiting.partition(';')[0]}")
