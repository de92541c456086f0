"""Make the boto3 client of a store, send its requests in bounded time, and check the URL of its service.

Guarantee: a connection over which less than `LEAST_BYTES_PER_S` arrive or leave during `rate_window_s` counts as
failed, and so does a request without a complete answer after the time that its bytes take at that rate, plus one
window. The time-outs of sockets do not ensure this: they start again with every byte.

How: bodies are measured while they are read (`RateMeter`) or sent (`PacedBody`). For everything else (names that are
not resolved, headers, listings, credentials) `call_within` sends the request in a thread of its own and stops waiting
for it.

Limits: a request that is given up on goes on in its thread until its connection breaks. Its upload has ended by then,
because its body is measured, so that it cannot replace what a later request writes.
"""

from __future__ import annotations

import base64
import concurrent.futures
import hashlib
import io
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

import boto3
import botocore.client
from botocore.exceptions import ClientError
from typing_extensions import override

from electra_dist.errors import UserError
from electra_dist.store.patience import LEAST_BYTES_PER_S, Pace, Patience
from electra_dist.store.s3.errors import Again

Answer = dict[str, Any]  # what boto3 returns: the fields of an answer by name
_Result = TypeVar("_Result")
_ADVICE = "check the network to the service, then start again"
_SLICE_S = 1.0  # A wait for an answer is cut into slices.
_COMPLETION_S = 600.0  # The service may copy all parts of an upload before it answers.


def content_md5(data: bytes) -> str:
    """Return the MD5 of `data` in base64, the value of the header Content-MD5 with which S3 checks an upload."""
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


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
    digest = hashlib.md5(params["body"], usedforsecurity=False).digest()
    params["headers"]["Content-MD5"] = base64.b64encode(digest).decode()


def _add_stream(http_response: Any, parsed: dict[str, Any], **_: Any) -> None:
    parsed["Stream"] = http_response.raw


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
            raise Again(f"slower than {LEAST_BYTES_PER_S:,} bytes/s", advice=_ADVICE)
        self._num_bytes = 0
        self._elapsed_s = 0.0


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
        """Move to a byte and begin a new measurement, because boto3 also reads the body to compute its digest."""
        self._meter = RateMeter(self._window_s)
        self._block_bytes = 0
        self._block_read = time.monotonic()
        return super().seek(offset, whence)


def call_within(limit_s: float, request: Callable[[], _Result], patience: Patience) -> _Result:
    """Call `request` in a thread, and return its result or raise its exception; raise Again after `limit_s` seconds.

    A request that is over the limit goes on in its thread, and its result is dropped. If an earlier try of the request
    has failed, the wait for storage goes on meanwhile (`Patience.beat`).
    """
    future: concurrent.futures.Future[_Result] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(request())
        except BaseException as error:  # noqa: BLE001 - the caller's thread raises it
            future.set_exception(error)

    threading.Thread(target=run, name="s3-request", daemon=True).start()
    end = time.monotonic() + limit_s
    while not future.done():
        remaining_s = end - time.monotonic()
        if remaining_s <= 0:
            raise Again(f"no complete answer in {limit_s:.0f} s", advice=_ADVICE)
        if patience.beat():
            raise Again("the run ends")
        concurrent.futures.wait([future], min(remaining_s, _SLICE_S))
    return future.result()


class S3Client:
    """Client of an S3 service, whose requests end in bounded time. Thread-safe.

    It may be used after a fork: each process makes a boto3 client of its own at its first request, because it must not
    use the connections of its parent.
    """

    def __init__(self, endpoint_url: str | None, patience: Patience) -> None:
        self._endpoint_url = endpoint_url
        self._patience = patience
        self._pace = patience.pace
        self._lock = threading.Lock()
        self._client_of: tuple[int, Any] | None = None  # boto3 client and the id of the process that it is for.

    def renew(self) -> None:
        """Drop the boto3 client, so that the next request makes a new one, which reads the credentials again."""
        self._client_of = None

    def send(self, operation: str, arguments: Mapping[str, Any], body: bytes | None = None) -> Answer:
        """Call boto3's method `operation` and return its answer. The caller must still read the body of a GET.

        Raises Again if the service took too long or boto3 could not parse the answer. Other failures raise one of
        `errors.FAILURES`.
        """
        limit_s = self._pace.rate_window_s + len(body or b"") / LEAST_BYTES_PER_S  # the answer is small
        if operation == "complete_multipart_upload":
            limit_s = _COMPLETION_S

        def request() -> Answer:
            method = getattr(self._boto_client(), operation)
            upload = {} if body is None else {"Body": PacedBody(body, self._pace.rate_window_s)}
            try:
                return method(**arguments, **upload)
            except (ValueError, TypeError, AttributeError, LookupError):
                # Dates and numbers of another form, and error documents whose fields are lists, trees or missing.
                raise Again("an answer that boto3 cannot parse") from None

        return call_within(limit_s, request, self._patience)

    def _boto_client(self) -> Any:
        process_id = os.getpid()
        with self._lock:
            if self._client_of is None or self._client_of[0] != process_id:
                self._client_of = (process_id, make_client(self._endpoint_url, self._pace))
            _, client = self._client_of
            return client
