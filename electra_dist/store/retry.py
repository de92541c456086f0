"""Decide when a failed storage request is tried again, and when the operation gives up.

Guarantee: an operation ends. It gives up after `tries` failures in a row without progress between them, after
`deadline_s` seconds without progress, or when the store's budget of retries is used up, whichever comes first. New
bytes are progress if they came at `least_bytes_per_s` or faster, counted since the last progress; so one byte a second
does not keep an operation alive. With the defaults, an operation survives an outage of about three minutes. Every
retry and every second waited is counted (`retries`, `wait_s`), so that a run can report the cost of storage faults.

How: the wait before retry k = 0, 1, ... is random, uniform in [0, min(max_wait_s, first_wait_s * 2**k)] (exponential
back-off with "full jitter"), so that a thousand ranks that failed together do not retry together. All operations of a
store share its budget, a token bucket: a retry takes one token, and an operation that succeeds returns `REFUND`
tokens. The other two limits start again with each progress; the budget also ends a read from a storage that always
delivers a few bytes and never completes. Bytes that are wrong although their request succeeded are read again by
`Rereading`, before they count as damaged in the store.

Limits: `failure_kinds.py` decides which errors are retried.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeVar

from electra_dist.errors import StoreExhausted
from electra_dist.escapes import printable

CHECK = "check the object and the storage service, then start again"  # Default advice in an error after all retries.
_Value = TypeVar("_Value")

REFUND = 10  # Retries that a successful operation returns to the budget; at more than ten per operation, it drains.


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """Limits on the retries of one store, and the time-outs of its connections; times are in seconds."""

    tries: int = 30  # consecutive failures without progress after which an operation gives up
    first_wait_s: float = 0.1
    max_wait_s: float = 15.0
    deadline_s: float = 600.0  # since the operation began or last made progress
    budget: int = 10_000  # retries of all operations of a store together
    connect_timeout_s: float = 10.0
    read_timeout_s: float = 20.0  # a connection that is silent for this long counts as failed
    least_bytes_per_s: int = 16 << 10  # a slower connection counts as failed
    rate_window_s: float = 60.0  # time over which the rate of a connection is measured
    reread_pauses_s: tuple[float, ...] = (0.2, 1.0, 4.0, 15.0)  # before each further reading of bytes that are wrong
    announce_after_s: float = 10.0  # a service that has never answered is reported on stderr after this time


class RetryAccount:
    """Counters of retries and the retry budget of one store, shared by all threads that use the store."""

    def __init__(self, policy: RetryPolicy) -> None:
        self.policy = policy
        self.retries = 0
        self.wait_s = 0.0
        self._tokens = policy.budget
        self._announced = False
        self._lock = threading.Lock()
        self._random = random.Random()  # A generator of its own: the global one must stay as a model left it.

    def begin(self, object_name: str) -> Backoff:
        """Return a new failure counter for one operation, such as a download; `object_name` is a URL for messages."""
        return Backoff(self, object_name)

    def succeeded(self) -> None:
        """Record that an operation succeeded: return `REFUND` retries to the budget, up to its initial size."""
        with self._lock:
            self._tokens = min(self.policy.budget, self._tokens + REFUND)

    def announce_once(self, line: str) -> None:
        """Print a line to stderr, at the first call of any thread only."""
        with self._lock:
            if self._announced:
                return
            self._announced = True
        print(printable(line), file=sys.stderr, flush=True)

    def charge_retry(self, longest_wait_s: float) -> float | None:
        """Take one retry from the budget; return a random wait of at most `longest_wait_s`, None if none is left."""
        with self._lock:
            if self._tokens == 0:
                return None
            self._tokens -= 1
            self.retries += 1
            wait_s = self._random.uniform(0.0, longest_wait_s)
            self.wait_s += wait_s
        return wait_s


class Backoff:
    """Counter of one storage operation's failures since its last progress; it ends the retries. Not thread-safe."""

    def __init__(self, account: RetryAccount, object_name: str) -> None:
        self._account = account
        self._object_name = object_name
        self._failures: Counter[str] = Counter()  # by reason, since the last progress
        self._begin = time.monotonic()
        self._last_progress = self._begin
        self._new_bytes = 0  # received since the last progress

    def progress(self, num_bytes: int) -> None:
        """Record that `num_bytes` new bytes arrived; if that was fast enough, reset the failures and the deadline."""
        self._new_bytes += num_bytes
        now = time.monotonic()
        if self._new_bytes >= self._account.policy.least_bytes_per_s * (now - self._last_progress):
            self._failures.clear()
            self._new_bytes = 0
            self._last_progress = now

    def announce(self, reason: str, advice: str) -> None:
        """Tell the user on stderr what this operation waits for: once per store, and only after `announce_after_s`."""
        policy = self._account.policy
        waited_s = time.monotonic() - self._begin
        if waited_s >= policy.announce_after_s:
            self._account.announce_once(
                f"waiting for {self._object_name}: {reason}; {advice}; the next attempts follow by themselves"
            )

    def failures_of(self, reason: str) -> int:
        """Return how many failures with this reason were recorded since the last progress."""
        return self._failures[reason]

    def wait_after_failure(self, reason: str, advice: str = CHECK) -> None:
        """Record a failed attempt and sleep before the next one; raise StoreExhausted if a limit is reached.

        Failures with equal `reason` are counted together. `advice` ends the message of the error.
        """
        policy = self._account.policy
        self._failures[reason] += 1
        num_failures = self._failures.total()

        # Give up if a limit is reached: the number of failures, or the time without progress.
        if num_failures >= policy.tries:
            self._give_up(f"failed {num_failures} times in a row", reason, advice)
        elapsed_s = time.monotonic() - self._last_progress
        if elapsed_s >= policy.deadline_s:
            self._give_up(f"no progress in {elapsed_s:.0f} s", reason, advice)

        # Wait: the longest wait doubles with each failure. The store's budget of retries is the third limit.
        longest_wait_s = min(policy.max_wait_s, policy.first_wait_s * 2.0 ** (num_failures - 1))
        wait_s = self._account.charge_retry(longest_wait_s)
        if wait_s is None:
            self._give_up(f"the store's budget of {policy.budget} retries is used up", reason, advice)
        time.sleep(wait_s)

    def _give_up(self, limit: str, reason: str, advice: str) -> NoReturn:
        """Raise StoreExhausted, for example "URL: failed 30 times in a row, last: 503 SlowDown; check ..."."""
        raise StoreExhausted(f"{self._object_name}: {limit}, last: {reason}; {advice}") from None


class Rereading:
    """Reader that reads bytes again if they do not match their digest. Thread-safe.

    Bytes count as damaged in the store only if the last two readings, with a pause between them, have the same fault.
    If the fault differs each time, the service, a proxy or the network has changed the bytes on the way. Use one
    object for readings that belong together, such as those of one checkpoint: once damage is confirmed, the object no
    longer pauses between readings.
    """

    def __init__(self, pauses_s: Sequence[float]) -> None:
        """Take the pauses in seconds (one or more) before each further reading of wrong bytes."""
        self._pauses_s = pauses_s
        self._is_confirmed = False

    def read(self, name: str, read: Callable[[], tuple[_Value, str]]) -> tuple[_Value, str]:
        """Call `read` until its fault is "" or all readings are used up; return the last value and its fault.

        `read` reads once and returns (value, text of the fault); different wrong bytes must give different texts. If
        the last two faults differ, StoreExhausted is raised, and its message says that `name` was read.
        """
        value, fault = read()
        previous_fault = ""
        for pause_s in self._pauses_s:
            if not fault:
                return value, ""
            if not self._is_confirmed:
                time.sleep(pause_s)
            previous_fault = fault
            value, fault = read()
        if fault and fault != previous_fault:
            raise StoreExhausted(
                f"{name} was read {1 + len(self._pauses_s)} times and was wrong in different ways, last: {fault}; "
                f"check the network and the storage service, then start again"
            )
        if fault:
            self._is_confirmed = True
        return value, fault
