"""Send the requests of a store to S3, and repeat those that fail until they succeed or a limit is reached.

How: boto3's own retries are off, because they do not cover a failure while a body is read, and would multiply with
those of `patience.py`. `errors.py` decides what is repeated by the table in `failure_kinds.py`, `answers.py` checks
that an answer with status 200 comes from S3, and `client.py` ends requests that take too long. Expired credentials are
read again from their source before each further attempt.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

from electra_dist.errors import StoreAway, StoreMissing, UserError
from electra_dist.store.interface import check_key
from electra_dist.store.patience import Outage, Patience
from electra_dist.store.s3.answers import NEEDED_FIELDS, ObjectInfo, check_answer, check_object, object_info, pages
from electra_dist.store.s3.client import Answer, S3Client, check_endpoint
from electra_dist.store.s3.download import Download, Span
from electra_dist.store.s3.errors import FAILURES, TRIES_MISSING, Again, EmptyRange, Taken, classify


class S3Requests:
    """Sender of requests about objects below s3://bucket/prefix. Thread-safe, also after a fork (see `S3Client`)."""

    def __init__(self, url: str, endpoint_url: str | None, patience: Patience) -> None:
        """Check both URLs (None: AWS) without a request; raise UserError if one is malformed or holds secrets."""
        bucket, prefix = _split_url(url)
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self.bucket = bucket
        self.prefix = f"{prefix}/" if prefix else ""  # what the full key of each object begins with
        self.client = S3Client(endpoint_url, patience)
        self._patience = patience
        self._endpoint_text = check_endpoint(endpoint_url)
        self._answered = False  # Whether any request has succeeded.

    def name_object(self, key: str) -> dict[str, str]:
        """Return the arguments of a boto3 request that name an object: its bucket and its full key."""
        return {"Bucket": self.bucket, "Key": self.prefix + check_key(key)}

    def call(
        self,
        key: str,
        operation: str,
        arguments: Mapping[str, Any],
        body: bytes | None = None,
        check: Callable[[Answer], None] = lambda answer: None,
    ) -> Answer:
        """Call boto3's method `operation` until it succeeds or fails for good, and return the answer.

        `key` is for messages only; "" is the store itself. `check` receives the answer, and raises Again if the
        request must be repeated. Raises Taken if a condition does not hold (HTTP 412), EmptyRange if the object ends
        before the range (HTTP 416).
        """
        with self._patience.outage() as outage:
            while True:
                try:
                    with self._classified(key):
                        answer = self.client.send(operation, arguments, body)
                        check_answer(answer, NEEDED_FIELDS.get(operation, ()))
                        check(answer)
                except Again as failure:
                    self._wait(key, failure, outage)
                else:
                    return answer

    def object_info(self, key: str) -> ObjectInfo:
        """Return an object's size and its writer's random tag, by a GET of one byte (two GETs if it is empty).

        The answer to a HEAD request would not show whether the bucket, the key or the permission is missing.
        """
        get = self.name_object(key)
        try:
            answer = self.call(
                key, "get_object", {**get, "Range": "bytes=0-0"}, check=lambda answer: check_object(answer, key)
            )
        except EmptyRange:
            # An empty object has no byte 0; without a range its GET succeeds.
            answer = self.call(key, "get_object", get, check=lambda answer: check_object(answer, key))
        answer["Body"].close()
        return object_info(answer)

    def download(self, key: str, sink: IO[bytes], *, must_exist: bool, span: Span | None = None) -> None:
        """Download an object, or a span of its bytes, to an empty, seekable file.

        After a failed attempt, the download continues after the last byte that arrived; if the object was replaced in
        the meantime, it starts again from the beginning. With `must_exist`, the answer "not found" is retried.
        """
        with self._patience.outage() as outage:
            download = Download(key, sink, self._patience.pace.rate_window_s, outage.progress, span)
            while not download.complete:
                try:
                    with self._classified(key, must_exist):
                        answer = self.client.send("get_object", {**self.name_object(key), **download.conditions()})
                        download.receive(answer)
                except EmptyRange:
                    if download.ends_before_span:
                        break
                    self._begin_again(key, download, outage)
                except Taken:  # Another version of the object.
                    self._begin_again(key, download, outage)
                except Again as failure:
                    self._wait(key, failure, outage)

    def list_all(
        self,
        operation: str,
        prefix: str,
        entries_field: str,
        next_fields: dict[str, str],
        name_of: Callable[[dict[str, Any]], tuple[str, ...]],
    ) -> Sequence[dict[str, Any]]:
        """Return all entries of an S3 listing; begin again if the listing does not advance. See `answers.pages`."""

        def fetch_page(arguments: dict[str, Any], check: Callable[[Answer], None]) -> Answer:
            return self.call("", operation, arguments, check=check)

        first_page = {"Bucket": self.bucket, "Prefix": self.prefix + prefix}
        with self._patience.outage() as outage:
            while True:
                try:
                    return list(pages(fetch_page, first_page, entries_field, next_fields, name_of))
                except Again as failure:  # The listing does not advance; `call` has repeated pages that failed.
                    self._wait("", failure, outage)

    @contextlib.contextmanager
    def _classified(self, key: str, must_exist: bool = False) -> Iterator[None]:
        """Replace a boto3 exception in the `with` block by what `classify` returns; without one, set `_answered`."""
        try:
            yield
        except FAILURES as error:
            failure = classify(
                error,
                where=self._describe(key),
                bucket=self.bucket,
                answered=self._answered,
                must_exist=must_exist,
            )
            raise failure from None  # The text and traceback of boto3 may quote a signed request.
        self._answered = True

    def _wait(self, key: str, failure: Again, outage: Outage) -> None:
        if failure.renew:
            self.client.renew()
        text = f"{self._describe(key)}: {failure.reason}; {failure.advice}"
        if failure.missing and outage.failures_of(text) + 1 >= TRIES_MISSING:
            raise StoreMissing(f"{self._describe(key)}: {failure.reason}, {TRIES_MISSING} times; {failure.advice}")
        outage.wait_after(StoreAway(text), is_away=failure.is_away)

    def _begin_again(self, key: str, download: Download, outage: Outage) -> None:
        """Restart the download of an object that was replaced meanwhile; this counts as a failed attempt."""
        download.restart()
        self._wait(key, Again("the object was replaced during the download"), outage)

    def _describe(self, key: str) -> str:
        """Return an object's URL for messages, such as "s3://b/x at 10.0.0.1:9000"; the store's URL for the key ""."""
        return f"{self.url}/{key}".rstrip("/") + self._endpoint_text


def _split_url(url: str) -> tuple[str, str]:
    """Return the bucket and the prefix of an s3:// URL; the prefix has no slash at its ends and may be empty."""
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    if "@" in bucket or ":" in bucket:
        raise UserError(
            "s3:// URL with a colon or @ in its bucket: keep credentials out of URLs; set them as AWS_* variables"
        )
    if not bucket:
        raise UserError(f"{url}: the URL has no bucket; give s3://bucket/prefix")
    prefix = prefix.strip("/")
    if prefix:
        check_key(prefix)
    return bucket, prefix
