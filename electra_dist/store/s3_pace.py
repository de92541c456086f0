"""End S3 requests that are answered too slowly, or are sent too slowly, so that none takes for ever.

Guarantee: a connection over which less than `least_bytes_per_s` arrive or leave during `rate_window_s` counts as
failed, and so does a request without a complete answer after the time that its bytes take at that rate, plus one
window. The time-outs of sockets do not ensure this: they start again with every byte.

How: bodies are measured while they are read (`RateMeter`) or sent (`PacedBody`). For everything else (names that are
not resolved, headers, listings, credentials) `call_within` sends the request in a thread of its own and stops waiting
for it.

Cost: starting a thread takes about 0.1 ms per request, of a request's several.

Limits: a request that is given up on goes on in its thread until its connection breaks. Its upload has ended by then,
because its body is measured, so that it cannot replace what a later request writes.
"""

from __future__ import annotations

import concurrent.futures
import io
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from electra_dist.store.retry import RetryPolicy
from electra_dist.store.s3_errors import Again

_Result = TypeVar("_Result")
_ADVICE = "check the network to the service, then start again"


class RateMeter:
    """Measurement of how fast the bytes of one connection come or go, in windows of `rate_window_s` seconds."""

    def __init__(self, policy: RetryPolicy) -> None:
        """Begin the first window.

        Args:
            policy: Its `least_bytes_per_s` and `rate_window_s` are used.
        """
        self._policy = policy
        self._num_bytes = 0
        self._elapsed_s = 0.0

    def count(self, num_bytes: int, elapsed_s: float) -> None:
        """Add bytes and the time that the connection took for them.

        Args:
            num_bytes: Bytes that came or went.
            elapsed_s: Time that was spent on them, without the time that the caller needed to use or to make them.

        Raises:
            Again: A window is over, and too few bytes came or went in it.
        """
        self._num_bytes += num_bytes
        self._elapsed_s += elapsed_s
        if self._elapsed_s < self._policy.rate_window_s:
            return
        if self._num_bytes < self._policy.least_bytes_per_s * self._elapsed_s:
            raise Again(f"slower than {self._policy.least_bytes_per_s:,} bytes/s", advice=_ADVICE)
        self._num_bytes = 0
        self._elapsed_s = 0.0


class PacedBody(io.BytesIO):
    """Body of an upload that raises Again while boto3 reads it, if the service accepts its bytes too slowly.

    boto3 reads a block, sends it, and reads the next one; so the time between two reads is that of sending a block.
    """

    def __init__(self, data: bytes, policy: RetryPolicy) -> None:
        """Begin at the first byte of `data`.

        Args:
            data: The body.
            policy: Its `least_bytes_per_s` and `rate_window_s` are used.
        """
        super().__init__(data)
        self._policy = policy
        self._meter = RateMeter(policy)
        self._block_bytes = 0  # size of the block that was read last
        self._block_read = time.monotonic()

    def read(self, size: int | None = -1) -> bytes:
        """Return the next `size` bytes (all of the rest for -1 or None); raise Again if the last ones went slowly."""
        now = time.monotonic()
        self._meter.count(self._block_bytes, now - self._block_read)
        block = super().read(size)
        self._block_bytes = len(block)
        self._block_read = now
        return block

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move to a byte and begin a new measurement, because boto3 also reads the body to compute its digest."""
        self._meter = RateMeter(self._policy)
        self._block_bytes = 0
        self._block_read = time.monotonic()
        return super().seek(offset, whence)


def call_within(limit_s: float, request: Callable[[], _Result]) -> _Result:
    """Return the result of `request`, or raise its exception; wait for at most `limit_s` seconds.

    Raises:
        Again: The limit is over. The request goes on in its thread, and its result is dropped.
    """
    future: concurrent.futures.Future[_Result] = concurrent.futures.Future()

    def run() -> None:
        """Send the request and keep its result or its exception for the caller."""
        try:
            future.set_result(request())
        except BaseException as error:  # noqa: BLE001 - the caller's thread raises it
            future.set_exception(error)

    threading.Thread(target=run, name="s3-request", daemon=True).start()
    concurrent.futures.wait([future], limit_s)
    if not future.done():
        raise Again(f"no complete answer in {limit_s:.0f} s", advice=_ADVICE)
    return future.result()


def limit_of_request(policy: RetryPolicy, num_bytes: int) -> float:
    """Return how long a request may take, in seconds, that sends `num_bytes` and receives a small answer."""
    return policy.rate_window_s + num_bytes / policy.least_bytes_per_s
