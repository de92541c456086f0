"""An S3 object, or a span of one, on its way into a file: continued from the last good byte.

An object that was replaced meanwhile is begun again.

Guarantee: when `complete` is true the sink holds the bytes of exactly one version (ETag) of the object, in the length
that the service announced (of a span that reaches beyond the object's end: what there is of it). Bytes had before a
restart do not count as progress, so an object that is replaced all the time ends in an error and not in a loop.

Cost: a broken connection loses at most one chunk (128 KiB).

Where it stops: bytes that were flipped on the way have the right length; `data/cache.py` finds them by digest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import IO, Any, NamedTuple

from electra_dist.store.s3_errors import Again, Taken

_CHUNK = 128 << 10


class Span(NamedTuple):
    """Bytes [start, end) of an object."""

    start: int
    end: int | None


class Download:
    """An object or a span of it on its way into a file: which version, how far."""

    def __init__(self, sink: IO[bytes], progress: Callable[[], None], span: Span | None = None) -> None:
        self._sink = sink
        self._progress = progress
        self._ranged = span is not None
        self._start, self._end = span or Span(0, None)
        self._etag = ""
        self._total = -1
        self._furthest = 0  # also before a restart: bytes had before are no progress

    @property
    def complete(self) -> bool:
        """Whether all bytes are there."""
        return self._sink.tell() == self._total

    @property
    def ends_before_span(self) -> bool:
        """Given that the service has no byte of what was asked for: whether that is because the object is short."""
        return self._ranged and self._sink.tell() == 0

    def conditions(self) -> dict[str, str]:
        """What to ask for: all of it, or the rest of the same version."""
        done = self._sink.tell()
        if not (done or self._ranged):
            return {}
        last = "" if self._end is None else self._end - 1
        return {"Range": f"bytes={self._start + done}-{last}"} | ({"IfMatch": self._etag} if done else {})

    def receive(self, answer: dict[str, Any]) -> None:
        """Write the body as far as it comes. Raises Taken if it is of another version."""
        done = self._sink.tell()
        with contextlib.closing(answer["Body"]) as body:
            if done and answer["ETag"] != self._etag:
                raise Taken
            if (done or self._ranged) and not _starts_at(answer, self._start + done):
                raise Taken
            self._etag, self._total = answer["ETag"], done + answer["ContentLength"]
            while chunk := body.read(_CHUNK):
                self._sink.write(chunk)
                if self._sink.tell() > self._furthest:
                    self._furthest = self._sink.tell()
                    self._progress()
        if not self.complete:
            raise Again(f"the body ended at byte {self._sink.tell()} of {self._total}")

    def restart(self) -> None:
        """Forget everything but how far it once came."""
        self._etag, self._total = "", -1
        self._sink.seek(0)
        self._sink.truncate()


def _starts_at(answer: dict[str, Any], first: int) -> bool:
    return str(answer.get("ContentRange", "")).startswith(f"bytes {first}-")
