"""Decide what an answer of S3 means: it is what was asked for, the request is sent again, or an error is raised.

Guarantee: an answer with HTTP status 200 is believed only if it has the fields that its operation needs. Proxies, load
balancers and services that are half down answer with status 200 and a page of HTML, an error document, or a part of
what was asked for; then the request is repeated. A listing ends, also if the service repeats its pages. Of an error,
only class, code and HTTP status are used: the service's own text never reaches a message or an exception chain,
because it may quote a key, a token or a signed URL.

When `Download.complete` is true, the file holds the bytes of exactly one version (ETag) of the object, in the length
that the service announced and that the header Content-Range gives for the object. Every GET therefore asks for a
range; for a whole object, for all bytes from 0. A span that reaches beyond the object's end gives the bytes up to the
end. After a fault, the next GET continues at the last good byte; if the object is replaced in the meantime, the
download begins again. Only bytes beyond the furthest byte so far then count as progress (`patience.py`). So a download
of an object that is replaced again and again ends with an error, not in an endless loop. A connection that is slower
than `LEAST_BYTES_PER_S` is given up.

How: `failure_kinds.py` has the table of what each failure means.

Limits: whether the bytes of an object are right is not checked here; bytes that were changed in transit have the right
length. The readers of an object compare its digest, if one is recorded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import time
from collections.abc import Callable, Iterator
from typing import IO, Any, NamedTuple

import botocore.exceptions as boto_errors
import urllib3.exceptions
from botocore.parsers import ResponseParserError

from electra_dist.errors import StoreError, StoreMissing
from electra_dist.store.failure_kinds import (
    CHECK_PROXY,
    CHECK_SERVICE,
    NOT_FOUND,
    S3_MISSING,
    Failure,
    FailureKind,
    boto_failure,
    chain_of_causes,
    s3_failure,
    safe_code,
    transient,
)
from electra_dist.store.patience import LEAST_BYTES_PER_S

FAILURES = (boto_errors.BotoCoreError, boto_errors.ClientError, ResponseParserError, urllib3.exceptions.HTTPError)

_MARKUP_TYPES = ("text/html", "application/xhtml", "application/xml", "text/xml")
_MARKUP_ENDINGS = (".html", ".htm", ".xhtml", ".xml")
_ERROR_DOCUMENT = re.compile(rb"\s*(?:<\?xml[^>]*\?>\s*)?<Error[\s>]")
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
# Operations -> fields of the answer without which the request counts as failed. A proxy's page for a PUT has no ETag.
NEEDED_FIELDS = {
    "get_object": ("ETag", "ContentLength"),
    "list_objects_v2": ("IsTruncated",),
    "list_multipart_uploads": ("IsTruncated",),
    "put_object": ("ETag",),
    "upload_part": ("ETag",),
    "create_multipart_upload": ("UploadId",),
    "complete_multipart_upload": ("ETag",),
}
WRITER_TAG = "writer"  # Metadata key of the random tag that identifies the writer of an object.
_EMPTY_PAGES = 100  # pages in a row that may be without an entry
_MOST_PAGES = 10_000  # pages of a listing; of a thousand entries each

_ERROR_DOCUMENT_BYTES = 1024  # first bytes of an object by which an error document is recognized

CHECK_NETWORK = "check the network to the service, then start again"
_CHUNK = 128 << 10  # Most bytes read from the connection at a time.


class Taken(Exception):
    """Error for a conditional request whose condition does not hold (HTTP status 412).

    For a write with If-None-Match: * the key is taken; for a read with If-Match the object was replaced.
    """


class EmptyRange(Exception):
    """Error (HTTP status 416) for a ranged request if the object is empty or ends before the range begins."""


class Again(Exception):
    """Failure of an S3 request that should be sent again; its kind is TRANSIENT or AWAY."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


def broken(reason: str, advice: str = CHECK_SERVICE) -> Again:
    """Return, not raise, the error for a missing or wrong answer, after which the request is sent again.

    `advice` is the user's next step if all repetitions fail.
    """
    return Again(transient(reason, advice))


class ContentRange(NamedTuple):
    """Range that a GET has returned: bytes [first, end) of an object of `size` bytes."""

    first: int
    end: int
    size: int


class ObjectInfo(NamedTuple):
    """Size of an object on S3, and the random tag by which its writer recognizes it (`S3Store.write_new`)."""

    size: int  # in bytes
    writer_tag: str | None  # None if the writer stored no tag


def classify(error: Exception, where: str, bucket: str, *, answered: bool, must_exist: bool) -> Exception:
    """Return the exception to raise for a failed request: Again, StoreError, StoreMissing, Taken or EmptyRange.

    `error` is one of `FAILURES`; `where` is the URL and the endpoint, for a message. `answered` says whether the
    service has answered this store before, so that URL and credentials are probably right. If `must_exist`, the answer
    "not found" gives Again.
    """
    if isinstance(error, boto_errors.ClientError):
        return _classify_answer(error, where, bucket, answered=answered, must_exist=must_exist)
    for cause in chain_of_causes(error):
        if isinstance(cause, Again):  # Raised while boto3 read the body of an upload: it went out too slowly.
            return cause
    failure, code = boto_failure(error)
    return _to_exception(failure, where, bucket, code=code, status=0, answered=answered)


def _classify_answer(
    error: boto_errors.ClientError, where: str, bucket: str, *, answered: bool, must_exist: bool
) -> Exception:
    """Return the exception for an error code or HTTP status of S3; `where` is the object, for messages."""
    code = safe_code(str(error.response.get("Error", {}).get("Code", "")))
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    if code == "PreconditionFailed" or status == 412:
        return Taken()
    if code == "InvalidRange" or status == 416:
        return EmptyRange()
    if code in S3_MISSING:
        if must_exist:
            return Again(NOT_FOUND)
        return StoreMissing(f"{where}: no such object; check the URL, or build or restore the object")
    failure = s3_failure(code, status)
    return _to_exception(failure, where, bucket, code=code, status=status, answered=answered)


def _to_exception(failure: Failure, where: str, bucket: str, *, code: str, status: int, answered: bool) -> Exception:
    """Return Again for a failure that may pass, otherwise StoreError; `status` is 0 if there was no answer."""
    words = {"code": code, "status": status, "bucket": bucket}
    reason = failure.reason.format(**words)
    advice = failure.advice.format(**words)
    kind = failure.kind_for(answered=answered)
    if kind in (FailureKind.TRANSIENT, FailureKind.AWAY):
        return Again(dataclasses.replace(failure, kind=kind, reason=reason, advice=advice))
    return StoreError(f"{where}: {reason}; {advice}")


def check_answer(answer: dict[str, Any], fields: tuple[str, ...]) -> None:
    """Raise Again if an answer lacks one of `fields`, which S3 always sends for this operation.

    For an operation without such fields (a deletion, which S3 answers with 204), a page of HTML with status 200 raises
    Again, too.
    """
    for field in fields:
        if field not in answer:
            raise broken(f"an answer without {field}", CHECK_PROXY)
    about = answer["ResponseMetadata"]
    is_page = about["HTTPStatusCode"] == 200 and about["HTTPHeaders"].get("content-type", "").startswith("text/html")
    if not fields and is_page:
        raise broken("a page of HTML instead of an answer of S3", CHECK_PROXY)


def check_object(answer: dict[str, Any], key: str) -> None:
    """Raise Again if the answer to a GET is HTML or XML, unless the key ends in .html, .htm, .xhtml or .xml."""
    is_markup = str(answer.get("ContentType", "")).startswith(_MARKUP_TYPES)
    if is_markup and not key.lower().endswith(_MARKUP_ENDINGS):
        raise broken("a page of HTML or XML instead of the object", CHECK_PROXY)


def object_info(answer: dict[str, Any]) -> ObjectInfo:
    """Return the size of an object and the tag of its writer, from the answer to a GET, also one of a range."""
    part = content_range(answer)
    # Without a range, the answer is the whole object.
    size = answer["ContentLength"] if part is None else part.size
    return ObjectInfo(size=size, writer_tag=answer["Metadata"].get(WRITER_TAG))


def content_range(answer: dict[str, Any]) -> ContentRange | None:
    """Return which part of an object an answer holds, by its header Content-Range; None if that is not valid."""
    match = _CONTENT_RANGE.fullmatch(str(answer.get("ContentRange", "")))
    if match is None:
        return None
    first, last, size = (int(group) for group in match.groups())
    return ContentRange(first=first, end=last + 1, size=size)


def pages(
    request: Callable[[dict[str, Any], Callable[[dict[str, Any]], None]], dict[str, Any]],
    arguments: dict[str, Any],
    entries_field: str,
    next_fields: dict[str, str],
    name_of: Callable[[dict[str, Any]], tuple[str, ...]],
) -> Iterator[dict[str, Any]]:
    """Yield the entries of a listing of S3, page by page; raise Again if the listing does not advance.

    `request(arguments, check)` fetches a page, and repeats this if `check(page)` raises Again. The field
    `entries_field` of a page holds its entries. `next_fields` maps an argument of the next request to the field of the
    page that holds its value. `name_of` returns what identifies an entry. After Again, the caller must begin the
    listing anew. More than 10,000 pages (ten million entries) raise StoreError.
    """

    def check_page(page: dict[str, Any]) -> None:
        if page["IsTruncated"] and any(not page.get(field) for field in next_fields.values()):
            raise broken("a page of a listing without a token for the next one", CHECK_PROXY)

    seen: set[tuple[str, ...]] = set()
    num_empty = 0
    for _ in range(_MOST_PAGES):
        page = request(arguments, check_page)
        entries = page.get(entries_field, [])
        if entries and seen.issuperset(name_of(entry) for entry in entries):
            raise broken("a listing that repeats a page", CHECK_PROXY)
        num_empty = 0 if entries else num_empty + 1
        if num_empty > _EMPTY_PAGES:
            raise broken("a listing of empty pages without an end", CHECK_PROXY)
        for entry in entries:
            if name_of(entry) not in seen:
                seen.add(name_of(entry))
                yield entry
        if not page["IsTruncated"]:
            return
        arguments = {**arguments, **{argument: page[field] for argument, field in next_fields.items()}}
    raise StoreError(
        f"{arguments['Bucket']}/{arguments['Prefix']}: the listing has more than {_MOST_PAGES:,} pages; name a longer "
        f"prefix"
    )


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


class Download:
    """State of one download of an object, or of a span of its bytes: its version (ETag), and the file of what arrived.

    The caller sends GET requests with the arguments `conditions()` and passes each answer to `receive`, until
    `complete` is true. After a fault, the next request asks for the missing bytes only.
    """

    def __init__(
        self,
        key: str,
        sink: IO[bytes],
        rate_window_s: float,
        progress: Callable[[int], None],
        start: int,
        end: int | None,
    ) -> None:
        """Receive the bytes [start, end) of the object, or up to its end (None), into `sink`, an empty, seekable file.

        `progress` is called with the number of new bytes of a chunk. Bytes that arrive again after `restart` are not
        new.
        """
        self._key = key
        self._sink = sink
        self._rate_window_s = rate_window_s
        self._progress = progress
        self._start = start
        self._end = end
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

        This is so until the first byte has arrived: the object is empty or ends before the span. Later, 416 means that
        a shorter object has replaced this one, and the caller must call `restart`.
        """
        return self._sink.tell() == 0

    def conditions(self) -> dict[str, str]:
        """Return the arguments of boto3's `get_object` that ask for the missing bytes of the same object version."""
        num_received = self._sink.tell()
        first_byte = self._start + num_received
        last_byte = "" if self._end is None else self._end - 1  # HTTP ranges include the last byte.
        conditions = {"Range": f"bytes={first_byte}-{last_byte}"}
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
        if _ERROR_DOCUMENT.match(self._first_bytes):
            self.restart()
            raise broken("an error document instead of the object")

    def _append(self, chunk: bytes) -> None:
        if len(self._first_bytes) < _ERROR_DOCUMENT_BYTES and self._start == 0:
            self._first_bytes += chunk[:_ERROR_DOCUMENT_BYTES]
        self._sink.write(chunk)
        num_new = self._sink.tell() - self._furthest
        if num_new > 0:
            self._furthest = self._sink.tell()
            self._progress(num_new)

    def _check_part(self, answer: dict[str, Any]) -> None:
        """Raise Taken or Again if an answer is of another version or range than asked for, as some services send."""
        num_received = self._sink.tell()
        if num_received > 0 and answer["ETag"] != self._etag:
            raise Taken
        part = content_range(answer)
        if part is None and num_received == 0 and self._end is None:
            return  # The service ignores ranges and sends the whole object.
        if part is None or part.first != self._start + num_received:
            raise Taken
        if part.end - part.first != answer["ContentLength"]:
            raise broken("a body of another length than its range")
        wanted_end = part.size if self._end is None else min(self._end, part.size)
        if part.end != wanted_end:
            raise broken("another range of bytes than was asked for")

    def restart(self) -> None:
        """Drop all received bytes, because the object was replaced: the next GET asks for its current version."""
        self._etag = ""
        self._total = -1
        self._first_bytes = b""
        self._sink.seek(0)
        self._sink.truncate()
