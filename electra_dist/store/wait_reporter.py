"""Report that threads wait for storage: by a line on stderr, by the first failure, and by a call about every second.

Guarantee: however many threads wait at the same time, one line says that the first wait began and one that storage is
back, and `on_wait` is called about once a second.

How: a thread that waits has an entry from `begin` to `end`. The owner is the thread that created the reporter; a
thread of `in_parallel` waits for the thread that called it (`acting_thread`), so its wait counts as the owner's.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from electra_dist.escapes import printable

T = TypeVar("T")

BEAT_S = 1.0  # `on_wait` is called this often
_acting = threading.local()


def print_line(text: str) -> None:
    """Print a line to stderr; do nothing if stderr is a file on storage that does not respond."""
    with contextlib.suppress(OSError, ValueError):
        print(printable(text), file=sys.stderr, flush=True)


def acting_thread() -> int:
    """Return the thread for which this one works: itself, or the caller of `in_parallel` in a thread of its pool."""
    return getattr(_acting, "thread", threading.get_ident())


def act_for(thread: int) -> None:
    """Record that this thread of a pool works for another thread, which waits for it."""
    _acting.thread = thread


class WaitReporter:
    """Reporter of waits for storage to its owner, the thread that made it. Any thread may call its methods."""

    def __init__(self, note: Callable[[str], None], clock: Callable[[], float]) -> None:
        """Call `note` with a line when the first thread begins to wait, and with another when storage is back."""
        self.on_wait: Callable[[str], None] = lambda reason: None
        """Called about every second, with the reason, while the owner waits, or a thread of `in_parallel` for it. When
        the wait is over, it is called once with an empty text."""
        self._note = note
        self._clock = clock
        self._owner = threading.get_ident()
        self._lock = threading.Lock()
        self._reasons: dict[int, str] = {}  # thread that waits, if that is shown -> first failure of its operation
        self._owners_threads: set[int] = set()  # threads of `_reasons` that the owner waits for
        self._began = 0.0  # when the first of the present waits began
        self._last_beat = 0.0

    @property
    def reason(self) -> str:
        """Return why a thread waits for storage now (its first failure, as one line), or "" if none waits."""
        return next(iter(list(self._reasons.values())), "")

    def begin(self, reason: str, limit_s: float) -> bool:
        """Record that this thread waits up to `limit_s` s for storage; the first thread that waits also notes a line.

        Returns False, and records nothing, if the thread waits already, in an operation that calls this one.
        """
        thread = threading.get_ident()
        with self._lock:
            if thread in self._reasons:
                return False
            is_first = not self._reasons
            self._reasons[thread] = reason
            if acting_thread() == self._owner:
                self._owners_threads.add(thread)
            if is_first:
                self._began = self._clock()
                self._last_beat = 0.0
        if is_first:
            self._note(f"waiting up to {limit_s:g} s for storage: {reason}")
        return True

    def end(self, *, is_back: bool) -> None:
        """End the wait of this thread.

        If the owner waits for nothing any more, call `on_wait` with an empty text. If no thread waits any more and
        `is_back`, note that storage is back.
        """
        thread = threading.get_ident()
        with self._lock:
            reason = self._reasons.pop(thread)
            was_owners = thread in self._owners_threads
            self._owners_threads.discard(thread)
            is_owner_free = was_owners and not self._owners_threads
            is_last = not self._reasons
            waited_s = self._clock() - self._began
        if is_owner_free:
            self.on_wait("")
        if is_last and is_back:
            self._note(f"storage is back after {waited_s:.0f} s: {reason.partition(';')[0]}")

    def beat(self) -> bool:
        """Return whether this thread has begun a wait; if the owner is concerned, call `on_wait` with the reason.

        Call it about every second in an operation that takes long while its storage does not respond.
        """
        reason = self._reasons.get(threading.get_ident(), "")
        if reason:
            self._report(reason)
        return bool(reason)

    def wait_for(self, future: Future[T]) -> T:
        """Wait for a future and return its result; report meanwhile that the thread behind it waits for storage."""
        is_reported = False
        while not concurrent.futures.wait([future], BEAT_S).done:
            reason = self.reason
            if reason and acting_thread() == self._owner:
                is_reported = True
                self._report(reason)
        if is_reported:
            self.on_wait("")
        return future.result()

    def _report(self, reason: str) -> None:
        if acting_thread() != self._owner:
            return
        with self._lock:
            now = time.monotonic()
            if now - self._last_beat < BEAT_S:
                return
            self._last_beat = now
        self.on_wait(reason)
