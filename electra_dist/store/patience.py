"""Wait for storage: repeat what failed because of it, until it succeeds or a time limit is over.

Guarantee: an operation that is called through a `Patience` succeeds, or raises its own error if no wait helps
(`failure_kinds.py` decides), or raises StorageLost with the first failure after `limit_s` seconds without progress. So
it ends. From the first second of a wait for storage that is away (full, read-only, unreachable), a line on stderr and
`Patience.reason` name the first failure, and `on_wait` is called about every second; a fault that should pass at once,
such as a broken connection, is shown if it lasts longer than a second. Every store has a `Patience`, and all its
operations wait by themselves.

How: the pause before try k = 0, 1, ... is random, uniform in [0, min(longest_pause_s, first_pause_s * 2**k)], so that
a thousand ranks that failed together do not try again together. Bytes that a download received count as progress if
they came at `LEAST_BYTES_PER_S` or faster since the last progress; so one byte a second does not keep it alive. Bytes
that are wrong although they could be read are read again by `reread`.

Limits: a call that blocks in the operating system, or a request that has begun, cannot be interrupted, so it may
exceed the limit. An operation must be repeatable after a failure.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import math
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from electra_dist.errors import StorageLost, StoreAway, error_line
from electra_dist.escapes import printable
from electra_dist.store.failure_kinds import FailureKind, is_worth_waiting_for, kind_of_error

T = TypeVar("T")
P = ParamSpec("P")

COMMAND_PATIENCE_S = 180.0  # patience of a store that is opened without one
LEAST_BYTES_PER_S = 16 << 10  # a slower connection counts as failed
_BEAT_S = 1.0  # `on_wait` is called this often; a pause is cut into slices of this length
_LEAST_PAUSE_S = 0.001  # with less time left, an operation gives up
_QUIET_S = 1.0  # a fault that should pass at once is shown when it has lasted this long


def print_line(text: str) -> None:
    """Print a line to stderr; do nothing if stderr is a file on storage that does not respond."""
    with contextlib.suppress(OSError, ValueError):
        print(printable(text), file=sys.stderr, flush=True)


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Pauses between tries and time-outs of connections, in seconds."""

    first_pause_s: float = 0.1
    longest_pause_s: float = 10.0
    tries: int | None = None  # failures without progress after which an operation ends before its time; None: no limit
    reread_pauses_s: tuple[float, ...] = (0.2, 1.0, 4.0, 15.0)  # before each further reading of bytes that are wrong
    connect_timeout_s: float = 10.0
    read_timeout_s: float = 20.0  # a connection that is silent for this long counts as failed
    rate_window_s: float = 60.0  # time over which the rate of a connection is measured


class Patience:
    """Repeater of failed storage operations. It waits while storage is unavailable, up to a time limit.

    Any thread may call its methods. Each waiting thread has the whole limit for itself.
    """

    def __init__(
        self,
        limit_s: float,
        note: Callable[[str], None] = print_line,
        clock: Callable[[], float] = time.monotonic,
        *,
        pace: Pace | None = None,
        key: str = "cluster.storage_patience_s",
    ) -> None:
        """Wait at most `limit_s` seconds (0: never); call `note` when a wait begins and when storage is back.

        `key` is the config key that sets the limit, named in the error; "" if there is none.
        """
        self.limit_s = limit_s
        self.pace = pace or Pace()
        self.on_wait: Callable[[str], None] = lambda reason: None
        """Called about every second, with the reason, while the thread that created this object waits, or a thread of
        `in_parallel` for it. When the wait is over, it is called once with an empty text."""
        self.retries = 0  # tries after the first one, of all operations
        self.retry_wait_s = 0.0  # seconds slept before them
        self._note = note
        self._clock = clock
        self._key = key
        self._owner = threading.get_ident()
        self._lock = threading.Lock()
        self._limits: dict[int, float] = {}  # acting thread -> seconds, in a block of `at_most`
        self._reasons: dict[int, str] = {}  # thread that waits, if that is shown -> first failure of its operation
        self._owners_threads: set[int] = set()  # threads of `_reasons` that the owner waits for
        self._began = 0.0  # when the first of the present waits began
        self._last_beat = 0.0
        self._is_abandoned = threading.Event()
        self._random = random.Random()  # a generator of its own: the global one must stay as a model left it
        self._damaged_folders: set[str] = set()  # of which bytes were confirmed to be wrong

    def __reduce__(self) -> tuple[Callable[..., Patience], tuple[float, Pace, str]]:
        """Pickle the limits only: another process counts, prints and waits for itself."""
        return _unpickle, (self.limit_s, self.pace, self._key)

    @property
    def reason(self) -> str:
        """Return why a thread waits for storage now (its first failure, as one line), or "" if none waits."""
        return next(iter(list(self._reasons.values())), "")

    @property
    def is_abandoned(self) -> bool:
        """Return whether `abandon` was called."""
        return self._is_abandoned.is_set()

    def abandon(self) -> None:
        """End all present and future waits at once, because the run ends for another reason."""
        self._is_abandoned.set()

    def call(self, operation: Callable[[], T]) -> T:
        """Call an operation until it succeeds, and return its value; raise its error if no wait helps.

        Raises StorageLost, which names the first failure, when the limit is over or `abandon` was called.
        """
        with self.outage() as outage:
            while True:
                try:
                    return operation()
                except Exception as error:  # noqa: BLE001  (it is raised again if no wait helps)
                    outage.wait_after(error)

    @contextlib.contextmanager
    def at_most(self, limit_s: float) -> Iterator[None]:
        """Within the `with` block, wait at most `limit_s` seconds, in this thread and in its `in_parallel` threads."""
        thread = acting_thread()
        outer_limit_s = self._limits.get(thread, math.inf)
        self._limits[thread] = min(limit_s, outer_limit_s)
        try:
            yield
        finally:
            self._limits[thread] = outer_limit_s

    def limit_now_s(self) -> float:
        """Return for how many seconds this thread waits at most now."""
        return min(self.limit_s, self._limits.get(acting_thread(), math.inf))

    @contextlib.contextmanager
    def outage(self) -> Iterator[Outage]:
        """Give an `Outage` to a `with` block that repeats one operation itself: it calls `wait_after` at each failure.

        If the block ends without an exception, the operation has succeeded, and a wait that was shown is over.
        """
        outage = Outage(self)
        try:
            yield outage
        except BaseException:
            outage.close(is_back=False)
            raise
        outage.close(is_back=True)

    def reread(
        self, name: str, read: Callable[[], tuple[T, str]], pauses_s: Sequence[float] | None = None
    ) -> tuple[T, str]:
        """Call `read` until it finds no fault; return the value and "", or the value and a fault that is confirmed.

        `read` reads once and returns (value, text of the fault or ""); different wrong bytes must give different
        texts. A fault is confirmed if the last two of five readings, with a pause between them, have found the same:
        then the bytes in the store are damaged. If the faults differ, the service, a proxy or the network changes the
        bytes on the way, which is waited for like storage that does not respond. After a confirmed fault, wrong bytes
        of the same folder (`name` up to its last slash) are read again without pauses.
        """
        pauses_s = self.pace.reread_pauses_s if pauses_s is None else pauses_s
        folder = name.rpartition("/")[0]
        with self.outage() as outage:
            while True:
                value, fault = read()
                previous_fault = ""
                for pause_s in pauses_s:
                    if not fault:
                        return value, ""
                    if folder not in self._damaged_folders:
                        self._is_abandoned.wait(pause_s)
                    previous_fault = fault
                    value, fault = read()
                is_confirmed = fault == previous_fault
                if not fault or is_confirmed:
                    break
                outage.wait_after(
                    StoreAway(
                        f"{name} was read {1 + len(pauses_s)} times and was wrong in different ways, last: {fault}; "
                        f"check the network and the storage service, then start again"
                    )
                )
        if fault:
            self._damaged_folders.add(folder)
        return value, fault

    def beat(self) -> bool:
        """Report through `on_wait` that this thread waits, if it does; return whether the wait must end (`abandon`).

        Call it about every second in an operation that takes long while its storage does not respond.
        """
        reason = self._reasons.get(threading.get_ident(), "")
        if reason:
            self._report(reason)
        return bool(reason) and self.is_abandoned

    def wait_for(self, future: Future[T]) -> T:
        """Wait for a future and return its result; report meanwhile that the thread behind it waits for storage."""
        is_reported = False
        while not concurrent.futures.wait([future], _BEAT_S).done:
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
            if now - self._last_beat < _BEAT_S:
                return
            self._last_beat = now
        self.on_wait(reason)

    def _pause(self, pause_s: float, reason: str) -> None:
        """Sleep, and report meanwhile that this thread waits for `reason`; "" reports nothing."""
        end = self._clock() + pause_s
        while True:
            if reason:
                self._report(reason)
            remaining_s = end - self._clock()
            if remaining_s <= 0 or self._is_abandoned.wait(min(remaining_s, _BEAT_S)):
                return

    def _draw_pause(self, longest_s: float) -> float:
        with self._lock:
            pause_s = self._random.uniform(0.0, longest_s)
            self.retries += 1
            self.retry_wait_s += pause_s
        return pause_s

    def _begin_wait(self, reason: str) -> bool:
        """Record that this thread waits for storage, for `reason`; the first thread that waits also prints a line.

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
            self._note(f"waiting up to {self.limit_now_s():g} s for storage: {reason}")
        return True

    def _end_wait(self, is_back: bool) -> None:
        """End the wait of this thread.

        If it was the last one of the thread that created this object, tell `on_wait`. If no thread waits any more and
        `is_back`, log that storage is back.
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


def _unpickle(limit_s: float, pace: Pace, key: str) -> Patience:
    return Patience(limit_s, pace=pace, key=key)


def waiting(patience: Patience | None, operation: Callable[[], T]) -> T:
    """Call an operation, again and again as `patience` allows while storage fails; only once if it is None."""
    return operation() if patience is None else patience.call(operation)


def patient(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function so that it is called again while its storage is full or cannot be reached.

    Its keyword argument `patience` says how long; with None, the first error is raised at once.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        patience = kwargs.get("patience")
        assert patience is None or isinstance(patience, Patience)
        return waiting(patience, lambda: function(*args, **kwargs))

    return call


class _HasPatience(Protocol):
    @property
    def patience(self) -> Patience | None: ...


HasPatience = TypeVar("HasPatience", bound=_HasPatience)


def waits(method: Callable[Concatenate[HasPatience, P], T]) -> Callable[Concatenate[HasPatience, P], T]:
    """Decorate a method so that it is called again while its storage is full or cannot be reached.

    The object's attribute `patience` says how long. When that time is over, the first error is raised as StorageLost;
    if `patience` is None, the first error is raised at once. `failure_kinds` decides which errors are waited for.
    """

    @functools.wraps(method)
    def call(self: HasPatience, *args: P.args, **kwargs: P.kwargs) -> T:
        return waiting(self.patience, lambda: method(self, *args, **kwargs))

    return call


def command_patience() -> Patience:
    """Return a new patience for a command: three minutes, because no config key sets it."""
    return Patience(COMMAND_PATIENCE_S, key="")


class Outage:
    """Record of one operation that is repeated while storage is unavailable: its failures since its last progress."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._first: Exception | None = None  # failure since the last progress
        self._since = 0.0  # when it came
        self._failures: Counter[str] = Counter()  # since the last progress, by their text
        self._is_shown = False
        self._new_bytes = 0  # received since the last progress
        self._last_progress = patience._clock()

    def failures_of(self, text: str) -> int:
        """Return how many failures with this text came since the last progress."""
        return self._failures[text]

    def is_over_with_only(self, text: str) -> bool:
        """Return whether the store's whole time limit is over, with nothing but failures of this text meanwhile.

        The result is False if `Patience.at_most` or `abandon` has ended the wait earlier.
        """
        patience = self._patience
        is_over = patience._clock() - self._since > patience.limit_s - _LEAST_PAUSE_S
        return is_over and self._failures[text] == self._failures.total()

    def progress(self, num_bytes: int) -> None:
        """Record that `num_bytes` new bytes arrived; if they came fast enough, the time limit begins anew."""
        self._new_bytes += num_bytes
        now = self._patience._clock()
        if self._new_bytes >= LEAST_BYTES_PER_S * (now - self._last_progress):
            self.close(is_back=True)
            self._first = None
            self._failures.clear()
            self._new_bytes = 0
            self._last_progress = now

    def wait_after(self, error: Exception, *, is_away: bool | None = None) -> None:
        """Pause before the operation is tried again; raise `error` if no wait helps, StorageLost after the limit.

        `is_away` is True for storage that does not respond, False for a fault that should be gone at once, and None if
        the error itself decides which of the two it is.
        """
        patience = self._patience
        is_end_of_inner_wait = isinstance(error, StorageLost) and error.patience is patience
        if is_end_of_inner_wait or not is_worth_waiting_for(error):
            raise error
        if isinstance(error, StorageLost):  # of an operation that has waited with another patience, which is shorter
            error = StoreAway(error.reason)
        if self._first is None:
            self._first = error
            self._since = patience._clock()
        self._failures[str(error)] += 1
        num_failures = self._failures.total()

        # Give up.
        waited_s = patience._clock() - self._since
        has_no_try_left = patience.pace.tries is not None and num_failures >= patience.pace.tries
        remaining_s = patience.limit_now_s() - waited_s
        if patience.is_abandoned or remaining_s < _LEAST_PAUSE_S or has_no_try_left:
            raise self._lost(waited_s) from None

        # Wait.
        pace = patience.pace
        # Without the bound, the power overflows after a thousand failures.
        doublings = min(num_failures - 1, 30)
        pause_s = patience._draw_pause(min(pace.longest_pause_s, pace.first_pause_s * 2.0**doublings))
        pause_s = min(pause_s, remaining_s)
        if is_away is None:
            is_away = kind_of_error(error) is FailureKind.AWAY
        if not self._is_shown and (is_away or waited_s + pause_s > _QUIET_S):
            self._is_shown = patience._begin_wait(error_line(self._first).removeprefix("error: "))
        patience._pause(pause_s, str(self._first) if self._is_shown else "")

    def _lost(self, waited_s: float) -> StorageLost:
        patience = self._patience
        text = str(self._first)
        limit_s = patience.limit_now_s()
        if limit_s > 0:
            limit = f" ({patience._key} {limit_s:g})" if patience._key and limit_s == patience.limit_s else ""
            text = f"{self._first}; storage was waited for {waited_s:.0f} s{limit}"
        return StorageLost(text, patience, str(self._first))

    def close(self, is_back: bool) -> None:
        """End the wait if one was reported; with `is_back` (the last try succeeded), report that storage is back."""
        if self._is_shown:
            self._is_shown = False
            self._patience._end_wait(is_back)


_acting = threading.local()


def acting_thread() -> int:
    """Return the thread for which this one works: itself, or the caller of `in_parallel` in a thread of its pool."""
    return getattr(_acting, "thread", threading.get_ident())


def act_for(thread: int) -> None:
    """Record that this thread of a pool works for another thread, which waits for it."""
    _acting.thread = thread
