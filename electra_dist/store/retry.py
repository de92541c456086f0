"""When to try a failed request again: exponential back-off with full jitter, a deadline and a budget for each store.

Guarantee: an operation ends. It gives up after `tries` failures in a row without a byte of progress, after
`deadline_s` without progress, or when the store's budget of retries is used up, whichever comes first. Every retry and
every second waited is counted (`retries`, `wait_s`), so that a run can show what its storage costs it.

How: wait k is uniform in [0, min(max_wait_s, first_wait_s * 2**k)] ("full jitter"), so that a thousand ranks that
failed together do not come back together. The budget is a bucket: a retry takes one token, an operation that succeeds
puts `REFUND` back. It stops what the other two limits cannot see: storage that always yields a little and never ends.

Cost: nothing while requests succeed. With the defaults an outage is waited out for about three minutes.

Where it stops: which errors deserve a retry is the store's knowledge (`s3.py`).
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import NoReturn

from electra_dist.errors import StoreExhausted

CHECK = "check the object and the storage service, then start again"
REFUND = 10  # tokens that one successful operation returns: more than ten retries per operation drain the bucket


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """How patient a store is. Times in seconds."""

    tries: int = 30  # failures in a row without progress
    first_wait_s: float = 0.1
    max_wait_s: float = 15.0
    deadline_s: float = 600.0  # since the operation began or last made progress
    budget: int = 10_000  # retries in hand for a whole store
    connect_timeout_s: float = 10.0
    read_timeout_s: float = 20.0  # silence on a connection that ends an attempt


class RetryAccount:
    """Counters and budget of one store, shared by its threads."""

    def __init__(self, policy: RetryPolicy) -> None:
        self.policy = policy
        self.retries = 0
        self.wait_s = 0.0
        self._tokens = policy.budget
        self._lock = threading.Lock()
        self._random = random.Random()  # own generator: the waits must not move the global one that a model may use

    def begin(self, what: str) -> Backoff:
        """The back-off of one operation; `what` names the object in its error."""
        return Backoff(self, what)

    def succeeded(self) -> None:
        """Note an operation that ended well."""
        with self._lock:
            self._tokens = min(self.policy.budget, self._tokens + REFUND)

    def take(self, longest_wait_s: float) -> float | None:
        """A jittered wait of at most `longest_wait_s`, paid for with one token; None when the bucket is empty."""
        with self._lock:
            if self._tokens == 0:
                return None
            self._tokens -= 1
            self.retries += 1
            wait_s = self._random.uniform(0.0, longest_wait_s)
            self.wait_s += wait_s
        return wait_s


class Backoff:
    """The failures of one operation. One owner, one thread."""

    def __init__(self, account: RetryAccount, what: str) -> None:
        self._account = account
        self._what = what
        self._failures: Counter[str] = Counter()  # by reason, since the last progress
        self._since = time.monotonic()

    def progress(self) -> None:
        """Note that bytes arrived: the failures before no longer count."""
        self._failures.clear()
        self._since = time.monotonic()

    def failed(self, reason: str, tries: int | None = None, advice: str = CHECK) -> None:
        """Wait before the next attempt.

        Args:
            reason: the failure in a few words, for the error.
            tries: failures for this reason to bear, where that is fewer than the policy's for all reasons.
            advice: the user's next step, for the error.

        Raises:
            StoreExhausted: nothing is left to try; names the object, the last failure and the next step.
        """
        policy = self._account.policy
        self._failures[reason] += 1
        failures = self._failures.total()
        elapsed_s = time.monotonic() - self._since
        if failures >= policy.tries or self._failures[reason] >= (tries or policy.tries):
            self._give_up(f"failed {failures} times in a row", reason, advice)
        if elapsed_s >= policy.deadline_s:
            self._give_up(f"no progress in {elapsed_s:.0f} s", reason, advice)
        wait_s = self._account.take(min(policy.max_wait_s, policy.first_wait_s * 2.0 ** (failures - 1)))
        if wait_s is None:
            self._give_up(f"the store's budget of {policy.budget} retries is used up", reason, advice)
        time.sleep(wait_s)

    def _give_up(self, limit: str, reason: str, advice: str) -> NoReturn:
        raise StoreExhausted(f"{self._what}: {limit}, last: {reason}; {advice}") from None
