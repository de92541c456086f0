"""Download an S3 object, or a span of it, into a file, continuing after each fault from the last good byte.

If the object is replaced in the meantime, the download begins again.

A span is a range of bytes of the object.

Guarantee: when `complete` is true, the file holds the bytes of exactly one version (ETag) of the object, in the length
that the service announced. A span that reaches beyond the object's end gives the bytes up to the end. If the object is
replaced and the download begins again, only bytes beyond the furthest byte so far count as progress for the retry
limits. So a download of an object that is replaced again and again ends with an error, not in an endless loop.

Cost: a broken connection loses at most one chunk (128 KiB), the amount that is read from it at a time.

Limits: bytes that were changed in transit have the right length and are not noticed. The callers compare SHA-256
digests (`data/verified_shards.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import IO, Any, NamedTuple

from electra_dist.store.s3_errors import Again, Taken

_CHUNK = 128 << 10  # Bytes read from the connection at a time.


class Span(NamedTuple):
    """Range of bytes [start, end) of an object; an end of None is the end of the object."""

    start: int
    end: int | None


class Download:
    """State of one download: the version (ETag) of the object and the bytes received, which are in a file.

    The caller sends GET requests with the arguments `conditions()` and passes each answer to `receive`, until
    `complete` is true. After a fault, the next request asks for the missing bytes only.
    """

    def __init__(self, sink: IO[bytes], progress: Callable[[], None], span: Span | None = None) -> None:
        """Prepare a download; nothing is requested yet.

        Args:
            sink: Empty, seekable file for the bytes.
            progress: Called after each chunk (at most 128 KiB) that makes the file longer than it has ever been. After
                a `restart`, which empties the file, it is not called again until the file exceeds its former length.
            span: The part of the object to download; None for all of it.
        """
        self._sink = sink
        self._progress = progress
        self._has_span = span is not None
        self._span = Span(start=0, end=None) if span is None else span
        self._etag = ""  # Version of the object of which bytes were received; "" before the first answer.
        self._total = -1  # Bytes that the complete download has; -1 before the first answer.
        self._furthest = 0  # Most bytes ever received, also before a restart.

    @property
    def complete(self) -> bool:
        """Return whether all bytes of the object, or of the span, are in the file; False before the first answer."""
        return self._sink.tell() == self._total

    @property
    def ends_before_span(self) -> bool:
        """Return whether HTTP 416 ("no byte in this range"), if the next request gets it, means that nothing is left.

        It is True if a span was asked for and no byte of it was received. The object then ends before the span, and
        the download ends with no bytes. It is False if bytes were received already: the object must then have been
        replaced by a shorter one, and the caller must call `restart`.
        """
        return self._has_span and self._sink.tell() == 0

    def conditions(self) -> dict[str, str]:
        """Return the keyword arguments of boto3's `get_object` that make the next GET request continue the download.

        `Range` names the bytes that are still missing. Once bytes were received, `IfMatch` is the ETag of the object
        version that they came from, so that the service refuses the request (HTTP 412) if the object was replaced. The
        result is empty for the first request for a whole object.
        """
        num_received = self._sink.tell()
        if num_received == 0 and not self._has_span:
            return {}
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

        Args:
            answer: Result of boto3's `get_object` with the arguments that `conditions` returned.

        Raises:
            Taken: The answer is of another version of the object or begins at another byte than asked for; call
                `restart`.
            Again: The body ended early; send another GET for the rest.
        """
        num_received = self._sink.tell()
        with contextlib.closing(answer["Body"]) as body:
            # Some services ignore If-Match or Range, so the answer itself is checked.
            if num_received > 0 and answer["ETag"] != self._etag:
                raise Taken
            is_ranged_request = num_received > 0 or self._has_span
            if is_ranged_request and not _starts_at(answer, self._span.start + num_received):
                raise Taken
            self._etag = answer["ETag"]
            self._total = num_received + answer["ContentLength"]
            while chunk := body.read(_CHUNK):
                self._sink.write(chunk)
                # Bytes that were received before a restart are no progress.
                if self._sink.tell() > self._furthest:
                    self._furthest = self._sink.tell()
                    self._progress()
        if not self.complete:
            raise Again(f"the body ended at byte {self._sink.tell()} of {self._total}")

    def restart(self) -> None:
        """Delete all received bytes, so that the next GET asks for the object's current version from the first byte.

        Call this if the object was replaced during the download.
        """
        self._etag = ""
        self._total = -1
        self._sink.seek(0)
        self._sink.truncate()


def _starts_at(answer: dict[str, Any], first: int) -> bool:
    """Return whether the header Content-Range of an answer, "bytes FIRST-LAST/SIZE", begins at byte `first`.

    A service that ignores ranges sends the whole object without this header; the result is then False.
    """
    return str(answer.get("ContentRange", "")).startswith(f"bytes {first}-")
