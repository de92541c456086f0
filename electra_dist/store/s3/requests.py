"""Send the requests of a store to S3 in bounded time, and repeat those that fail as long as the store is patient.

Guarantee: a connection over which less than `LEAST_BYTES_PER_S` arrive or leave during `Pace.rate_window_s` counts as
failed, and so does a request without a complete answer after the time that its bytes take at that rate, plus one
window. The time-outs of sockets do not ensure this: they start again with every byte. Expired credentials are read
again from their source before each further attempt.

How: boto3's own retries are off, because they do not cover a failure while a body is read, and would multiply with
those of `patience.py`. `answers.py` decides what an answer means. Bodies are measured while they are read
(`RateMeter`) or sent (`PacedBody`). For everything else (names that are not resolved, headers, listings, credentials)
`call_within` sends the request in a thread of its own and stops waiting for it.

Limits: a request that is given up on goes on in its thread until its connection breaks. Its upload has ended by then,
because its body is measured, so that it cannot replace what a later request writes.
"""

from __future__ import annotations

import base64
import concurrent.futures
import contextlib
import hashlib
import io
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, TypeVar
from urllib.parse import urlsplit

import boto3
import botocore.client
from botocore.exceptions import ClientError
from typing_extensions import override

from electra_dist.errors import UserError
from electra_dist.store.failure_kinds import Failure
from electra_dist.store.interface import check_key, fulfil
from electra_dist.store.patience import LEAST_BYTES_PER_S, Outage, Pace, Patience
from electra_dist.store.s3.answers import (
    CHECK_NETWORK,
    FAILURES,
    NEEDED_FIELDS,
    Again,
    Download,
    EmptyRange,
    ObjectInfo,
    RateMeter,
    Taken,
    broken,
    check_answer,
    check_object,
    classify,
    object_info,
    pages,
)

Answer = dict[str, Any]  # what boto3 returns: the fields of an answer by name
_Result = TypeVar("_Result")
_SLICE_S = 1.0  # A wait for an answer is cut into slices.
_COMPLETION_S = 600.0  # The service may copy all parts of an upload before it answers.


def content_md5(data: bytes) -> str:
    """Return the MD5 of `data` in base64, the value of the header Content-MD5 with which S3 checks an upload."""
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


def make_client(endpoint_url: str | None, pace: Pace) -> Any:
    """Return a new boto3 S3 client, which reads the credentials from their source (environment, profile, role).

    boto3's own retries are switched off, because `S3Requests` repeats requests itself. Answers of `get_object` have an
    extra field "Stream", urllib3's response. Its method `read1` returns the bytes that have arrived, whereas boto3's
    `Body` waits for all bytes that were asked for.
    """
    config = botocore.client.Config(
        retries={"total_max_attempts": 1, "mode": "standard"},
        connect_timeout=pace.connect_timeout_s,
        read_timeout=pace.read_timeout_s,
        max_pool_connections=64,  # boto3's default of 10 may be fewer than the threads that use the store.
        tcp_keepalive=True,
        # Older services refuse CRC32 trailers and checks. Content-MD5 and the readers' digests replace them.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        # Services other than AWS often have no host name for each bucket.
        s3={"addressing_style": "path" if endpoint_url else "auto"},
    )
    client = boto3.session.Session().client("s3", endpoint_url=endpoint_url, config=config)
    client.meta.events.register("after-call.s3.GetObject", _add_stream)
    client.meta.events.register("before-call.s3.DeleteObjects", _add_md5)
    client.meta.events.register("before-parse.s3", _refuse_redirect)
    return client


def _refuse_redirect(response_dict: Mapping[str, Any], **_: Any) -> None:
    """Raise ClientError for a redirect that names no region; boto3 calls this before it parses an answer.

    boto3 would ask the service for the bucket's region. If the answer were such a redirect, too, boto3 would ask
    again, up to Python's recursion limit. AWS names the region in each redirect.
    """
    is_redirect = 300 <= response_dict["status_code"] < 400
    if is_redirect and "x-amz-bucket-region" not in response_dict["headers"]:
        status = {"HTTPStatusCode": response_dict["status_code"]}
        raise ClientError({"Error": {}, "ResponseMetadata": status}, "redirected request") from None


def _add_md5(params: dict[str, Any], **_: Any) -> None:
    """Add the header Content-MD5, which older services need, before a DeleteObjects request is signed."""
    params["headers"]["Content-MD5"] = content_md5(params["body"])


def _add_stream(http_response: Any, parsed: dict[str, Any], **_: Any) -> None:
    parsed["Stream"] = http_response.raw


class PacedBody(io.BytesIO):
    """Body of an upload that raises Again while boto3 reads it, if the service accepts its bytes too slowly.

    boto3 reads a block, sends it, and reads the next one. So the time between two reads is the time to send a block.
    """

    def __init__(self, data: bytes, window_s: float) -> None:
        super().__init__(data)
        self._window_s = window_s
        self._meter = RateMeter(window_s)
        self._block_bytes = 0  # size of the block that was read last
        self._block_read = time.monotonic()

    @override
    def read(self, size: int | None = -1) -> bytes:
        now = time.monotonic()
        self._meter.count(self._block_bytes, now - self._block_read)
        block = super().read(size)
        self._block_bytes = len(block)
        self._block_read = now
        return block

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move to a byte, and measure the upload's speed anew: boto3 reads the body before, too, for its digest."""
        self._meter = RateMeter(self._window_s)
        self._block_bytes = 0
        self._block_read = time.monotonic()
        return super().seek(offset, whence)


def call_within(limit_s: float, request: Callable[[], _Result], patience: Patience) -> _Result:
    """Call `request` in a thread, and return its result or raise its exception; raise Again after `limit_s` seconds.

    A request that is over the limit goes on in its thread, and its result is dropped. If an earlier try of the request
    has failed, this thread still reports that it waits for storage. When the run ends for another reason, a first try
    gets at most `Pace.rate_window_s`.
    """
    future: concurrent.futures.Future[_Result] = concurrent.futures.Future()
    threading.Thread(target=fulfil, args=(future, request), name="s3-request", daemon=True).start()
    begin = time.monotonic()
    while not future.done():
        waited_s = time.monotonic() - begin
        if waited_s >= limit_s:
            raise broken(f"no complete answer in {limit_s:.0f} s", CHECK_NETWORK)
        is_waiting = patience.reporter.beat()
        if patience.is_abandoned and (is_waiting or waited_s >= patience.pace.rate_window_s):
            raise broken("the run ends")
        concurrent.futures.wait([future], min(limit_s - waited_s, _SLICE_S))
    return future.result()


class S3Requests:
    """Sender of requests about objects below s3://bucket/prefix. Thread-safe.

    It may be used after a fork: each process makes a boto3 client of its own at its first request, because it must not
    use the connections of its parent.
    """

    def __init__(self, url: str, endpoint_url: str | None, patience: Patience) -> None:
        """Check both URLs (None: AWS) without a request; raise UserError if one is malformed or holds secrets."""
        bucket, prefix = _split_url(url)
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self.bucket = bucket
        self.prefix = f"{prefix}/" if prefix else ""  # what the full key of each object begins with
        self._endpoint_url = endpoint_url
        self._patience = patience
        self._lock = threading.Lock()
        self._client_of: tuple[int, Any] | None = None  # boto3 client and the id of the process that it is for.
        self._endpoint_text = check_endpoint(endpoint_url)
        self._answered = False  # Whether any request has succeeded.

    def name_object(self, key: str) -> dict[str, str]:
        """Return the arguments of a boto3 request that name an object: its bucket and its full key."""
        return {"Bucket": self.bucket, "Key": self.prefix + check_key(key)}

    def send(self, operation: str, arguments: Mapping[str, Any], body: bytes | None = None) -> Answer:
        """Call boto3's method `operation` and return its answer. The caller must still read the body of a GET.

        Raises Again if the service took too long or boto3 could not parse the answer. Other failures raise one of
        `answers.FAILURES`.
        """
        window_s = self._patience.pace.rate_window_s

        def request() -> Answer:
            method = getattr(self._boto_client(), operation)
            upload = {} if body is None else {"Body": PacedBody(body, window_s)}
            try:
                return method(**arguments, **upload)
            except (ValueError, TypeError, AttributeError, LookupError):
                # Dates and numbers of another form, and error documents whose fields are lists, trees or missing.
                raise broken("an answer that boto3 cannot parse") from None

        if operation == "complete_multipart_upload":
            return call_within(_COMPLETION_S, request, self._patience)
        return call_within(window_s + len(body or b"") / LEAST_BYTES_PER_S, request, self._patience)

    def _boto_client(self) -> Any:
        process_id = os.getpid()
        with self._lock:
            if self._client_of is None or self._client_of[0] != process_id:
                self._client_of = (process_id, make_client(self._endpoint_url, self._patience.pace))
            _, client = self._client_of
            return client

    def call(
        self,
        key: str,
        operation: str,
        arguments: Mapping[str, Any],
        body: bytes | None = None,
        check: Callable[[Answer], None] = lambda answer: None,
    ) -> Answer:
        """Call boto3's method `operation` until it succeeds or fails for good, and return the answer.

        `key` is for messages only; "" is the store itself. `check` receives each answer, and raises Again if the
        request must be repeated. Raises Taken if a condition does not hold (HTTP 412), EmptyRange if the object ends
        before the range (HTTP 416).
        """
        with self._patience.outage() as outage:
            while True:
                try:
                    with self._classified(key):
                        answer = self.send(operation, arguments, body)
                        check_answer(answer, NEEDED_FIELDS.get(operation, ()))
                        check(answer)
                except Again as again:
                    self._wait_or_raise(key, again.failure, outage)
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

    def download(self, key: str, sink: IO[bytes], *, must_exist: bool, start: int, end: int | None) -> None:
        """Write an object, or its bytes [start, end), to `sink`, an empty, seekable file; an `end` of None is its end.

        After a failed attempt, the download continues after the last byte that arrived; if the object was replaced in
        the meantime, it starts again from the beginning.
        """
        with self._patience.outage() as outage:
            download = Download(key, sink, self._patience.pace.rate_window_s, outage.progress, start, end)
            while not download.complete:
                try:
                    with self._classified(key, must_exist):
                        answer = self.send("get_object", {**self.name_object(key), **download.conditions()})
                        download.receive(answer)
                except EmptyRange:
                    if download.ends_before_span:
                        break
                    self._begin_again(key, download, outage)
                except Taken:  # Another version of the object.
                    self._begin_again(key, download, outage)
                except Again as again:
                    self._wait_or_raise(key, again.failure, outage)

    def list_all(
        self,
        operation: str,
        prefix: str,
        entries_field: str,
        next_fields: dict[str, str],
        name_of: Callable[[dict[str, Any]], tuple[str, ...]],
    ) -> Sequence[dict[str, Any]]:
        """Return all entries of a listing by boto3's method `operation`; if it does not advance, begin it again.

        The other arguments are as in `pages`, but for `prefix`, with which the listed keys begin.
        """

        def fetch_page(arguments: dict[str, Any], check: Callable[[Answer], None]) -> Answer:
            return self.call("", operation, arguments, check=check)

        first_page = {"Bucket": self.bucket, "Prefix": self.prefix + prefix}
        with self._patience.outage() as outage:
            while True:
                try:
                    return list(pages(fetch_page, first_page, entries_field, next_fields, name_of))
                except Again as again:  # The listing does not advance; `call` has repeated pages that failed.
                    self._wait_or_raise("", again.failure, outage)

    @contextlib.contextmanager
    def _classified(self, key: str, must_exist: bool = False) -> Iterator[None]:
        """Replace a boto3 exception of the `with` block by what `classify` returns; without one, set `_answered`."""
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

    def _wait_or_raise(self, key: str, failure: Failure, outage: Outage) -> None:
        """Pause before a request is repeated; raise StoreMissing or StorageLost if no repetition will help."""
        if failure.renew_credentials:
            with self._lock:
                self._client_of = None  # the next request makes a new client, which reads the credentials again
        outage.wait_after_failure(self._describe(key), failure)

    def _begin_again(self, key: str, download: Download, outage: Outage) -> None:
        """Restart a download because the object was replaced meanwhile; this counts as a failed attempt."""
        download.restart()
        self._wait_or_raise(key, broken("the object was replaced during the download").failure, outage)

    def _describe(self, key: str) -> str:
        """Return an object's URL for messages, such as "s3://b/x at 10.0.0.1:9000"; for "", the store's URL."""
        return f"{self.url}/{key}".rstrip("/") + self._endpoint_text


def check_endpoint(endpoint_url: str | None) -> str:
    """Check the endpoint URL and return the text that messages add to an s3:// URL: " at host:port", or "" for AWS.

    Raises UserError for a wrong URL, which the message does not repeat, because it may hold credentials.
    """
    if endpoint_url is None:
        return ""
    parts = urlsplit(endpoint_url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError("endpoint_url is not an http:// or https:// URL; set it to, for example, http://10.0.0.1:9000")
    if "@" in parts.netloc or parts.query:
        raise UserError(
            "endpoint_url holds more than a host and a port; remove the rest, and keep credentials in AWS_* variables"
        )
    return f" at {parts.netloc}"


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
