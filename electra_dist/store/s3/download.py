"""Download an S3 object, or a span (range of bytes) of it, into a file; after a fault, continue at the last good byte.

Guarantee: when `complete` is true, the file holds the bytes of exactly one version (ETag) of the object, in the length
that the service announced and that the header Content-Range gives for the object. Every GET therefore asks for a
range; for a whole object, for all bytes from 0. A span that reaches beyond the object's end gives the bytes up to the
end. If the object is replaced in the meantime, the download begins again. Only bytes beyond the furthest byte so far
then count as progress (`patience.py`). So a download of an object that is replaced again and again ends with an
error, not in an endless loop. A page of HTML or an error document of S3 is not taken for the object, although its
status is 200. A connection that is slower than `LEAST_BYTES_PER_S` is given up, and the next one continues where it
stopped.

Limits: bytes that were changed in transit have the right length and are not noticed. The callers compare SHA-256
digests (`data/shard_cache.py`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import IO, Any, NamedTuple

from electra_dist.store.patience import LEAST_BYTES_PER_S
from electra_dist.store.s3.answers import (
    ERROR_DOCUMENT_BYTES,
    Taken,
    broken,
    check_answer,
    check_object,
    content_range,
    is_error_document,
)

CHECK_NETWORK = "check the network to the service, then start again"
_CHUNK = 128 << 10  # Most bytes read from the connection at a time.


class RateMeter:
    """Meter of the transfer rate of one connection, in windows of `Pace.rate_window_s` seconds."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._num_bytes = 0
        self._elapsed_s = 0.0

    def count(self, num_bytes: int, elapsed_s: float) -> None:
        """Add bytes and the seconds that the connection took for them; raise Again if a full window was too slow."""
        self._num_bytes += num_bytes
        self._elapsed_s += elapsed_s
        if self._elapsed_s < self._window_s:
            return
        if self._num_bytes < LEAST_BYTES_PER_S * self._elapsed_s:
            raise broken(f"slower than {LEAST_BYTES_PER_S:,} bytes/s", CHECK_NETWORK)
        self._num_bytes = 0
        self._elapsed_s = 0.0


class Span(NamedTuple):
    """Range of bytes [start, end) of an object; an end of None is the end of the object."""

    start: int
    end: int | None


class Download:
    """State of one download: the version (ETag) of the object and the bytes received, which are in a file.

    The caller sends GET requests with the arguments `conditions()` and passes each answer to `receive`, until
    `complete` is true. After a fault, the next request asks for the missing bytes only.
    """

    def __init__(
        self,
        key: str,
        sink: IO[bytes],
        rate_window_s: float,
        progress: Callable[[int], None],
        span: Span | None = None,
    ) -> None:
        """Receive into `sink`, an empty, seekable file.

        `progress` is called with the number of new bytes of a chunk. Bytes that arrive again after `restart` are not
        new.
        """
        self._key = key
        self._sink = sink
        self._rate_window_s = rate_window_s
        self._progress = progress
        self._has_span = span is not None
        self._span = Span(start=0, end=None) if span is None else span
        self._etag = ""  # Version of the object of which bytes were received; "" before the first answer.
        self._total = -1  # Bytes that the complete download has; -1 before the first answer.
        self._furthest = 0  # Most bytes ever received, also before a restart.
        self._first_bytes = b""  # The object's first bytes, by which an error document is recognized.

    @property
    def complete(self) -> bool:
        """Return whether all bytes of the object, or of the span, are in the file; False before the first answer."""
        return self._sink.tell() == self._total

    @property
    def ends_before_span(self) -> bool:
        """Return whether HTTP 416 ("no byte in this range") would mean that there is nothing to receive.

        True until the first byte has arrived: the object is empty or ends before the span. Later, 416 means that a
        shorter object has replaced this one, and the caller must call `restart`.
        """
        return self._sink.tell() == 0

    def conditions(self) -> dict[str, str]:
        """Return the arguments of boto3's `get_object` that ask for the missing bytes of the same object version."""
        num_received = self._sink.tell()
        first_byte = self._span.start + num_received
        if self._span.end is None:
            conditions = {"Range": f"bytes={first_byte}-"}
        else:
            conditions = {"Range": f"bytes={first_byte}-{self._span.end - 1}"}  # HTTP ranges include the last byte.
        if num_received > 0:
            conditions["IfMatch"] = self._etag
        return conditions

    def receive(self, answer: dict[str, Any]) -> None:
        """Append the body of the answer to a GET request to the file; if the body ends early, keep what arrived.

        Raises Taken if the answer is of another version or begins at another byte than was asked for: call `restart`.
        Raises Again if the body ended early, came too slowly or is not the object: send a GET for the rest.
        """
        with contextlib.closing(answer["Body"]):
            check_answer(answer, ("ETag", "ContentLength"))
            check_object(answer, self._key)
            self._check_part(answer)
            self._etag = answer["ETag"]
            self._total = self._sink.tell() + answer["ContentLength"]
            meter = RateMeter(self._rate_window_s)
            while True:
                begin = time.monotonic()
                # It returns as soon as some bytes are there; `read` would wait for a whole chunk, however slowly.
                chunk = answer["Stream"].read1(_CHUNK)
                if not chunk:
                    break
                elapsed_s = time.monotonic() - begin
                self._append(chunk)
                meter.count(len(chunk), elapsed_s)
        if not self.complete:
            raise broken(f"the body ended at byte {self._sink.tell()} of {self._total}")
        if is_error_document(self._first_bytes):
            self.restart()
            raise broken("an error document instead of the object")

    def _append(self, chunk: bytes) -> None:
        if len(self._first_bytes) < ERROR_DOCUMENT_BYTES and self._span.start == 0:
            self._first_bytes += chunk[:ERROR_DOCUMENT_BYTES]
        self._sink.write(chunk)
        num_new = self._sink.tell() - self._furthest
        if num_new > 0:
            self._furthest = self._sink.tell()
            self._progress(num_new)

    def _check_part(self, answer: dict[str, Any]) -> None:
        """Raise Taken or Again if an answer has another version or range than asked for; some services send this."""
        num_received = self._sink.tell()
        if num_received > 0 and answer["ETag"] != self._etag:
            raise Taken
        part = content_range(answer)
        if part is None and num_received == 0 and not self._has_span:
            return  # The service ignores ranges and sends the whole object.
        if part is None or part.first != self._span.start + num_received:
            raise Taken
        if part.end - part.first != answer["ContentLength"]:
            raise broken("a body of another length than its range")
        wanted_end = part.size if self._span.end is None else min(self._span.end, part.size)
        if part.end != wanted_end:
            raise broken("another range of bytes than was asked for")

    def restart(self) -> None:
        """Drop all received bytes, because the object was replaced: the next GET asks for its current version."""
        self._etag = ""
        self._total = -1
        self._first_bytes = b""
        self._sink.seek(0)
        self._sink.truncate()
