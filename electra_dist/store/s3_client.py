"""Make the boto3 client of a store, send its requests in bounded time, and check the URL of its service."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import boto3
import botocore.client

from electra_dist.errors import UserError
from electra_dist.store.retry import RetryPolicy
from electra_dist.store.s3_errors import Again
from electra_dist.store.s3_pace import PacedBody, call_within, limit_of_request

Answer = dict[str, Any]  # what boto3 returns: the fields of an answer by name


def check_endpoint(endpoint_url: str | None) -> str:
    """Check the endpoint URL and return the text that messages add to an s3:// URL: " at host:port".

    The text is "" for None, which means AWS.

    Raises:
        UserError: The URL is malformed, or holds more than host and port; the message does not repeat it, because it
            may hold credentials.
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


def make_client(endpoint_url: str | None, policy: RetryPolicy) -> Any:
    """Return a new boto3 S3 client, which reads the credentials from their source (environment, profile, role).

    boto3's own retries are switched off, because `S3Store` repeats requests itself.

    The answers of its `get_object` have a further field, "Stream": the connection's answer of urllib3, whose `read1`
    returns the bytes that are there, whereas `Body` waits until as many bytes are there as were asked for.

    Args:
        endpoint_url: S3-compatible service; None for AWS.
        policy: Policy whose connect and read time-outs the client uses.
    """
    config = botocore.client.Config(
        retries={"total_max_attempts": 1, "mode": "standard"},
        connect_timeout=policy.connect_timeout_s,
        read_timeout=policy.read_timeout_s,
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
    return client


def _add_stream(http_response: Any, parsed: dict[str, Any], **_: Any) -> None:
    """Add urllib3's answer to the parsed answer of a GET, as the field "Stream"; boto3 calls this after each GET."""
    parsed["Stream"] = http_response.raw


class S3Client:
    """Client of an S3 service, whose requests end in bounded time. Thread-safe.

    It may be used after a fork: each process makes a boto3 client of its own at its first request, because it must not
    use the connections of its parent.
    """

    def __init__(self, endpoint_url: str | None, policy: RetryPolicy) -> None:
        """Remember the arguments; nothing is read or sent before the first request.

        Args:
            endpoint_url: S3-compatible service; None for AWS.
            policy: Time-outs and the least rate of its connections.
        """
        self._endpoint_url = endpoint_url
        self._policy = policy
        self._lock = threading.Lock()
        self._client_of: tuple[int, Any] | None = None  # boto3 client and the id of the process that it is for.

    def renew(self) -> None:
        """Drop the boto3 client, so that the next request makes a new one, which reads the credentials again."""
        self._client_of = None

    def send(self, operation: str, arguments: Mapping[str, Any], body: bytes | None = None) -> Answer:
        """Send one request and return its answer, of which only the body of a GET is still to be received.

        Args:
            operation: Name of boto3's method, for example "put_object".
            arguments: Its arguments, without the body.
            body: Bytes to upload; None if the operation has none.

        Raises:
            Again: The service took too long, or boto3 could not parse a date or a number of the answer.
            Exception: One of `s3_errors.FAILURES`.
        """
        limit_s = limit_of_request(self._policy, len(body or b""))
        if operation == "complete_multipart_upload":
            limit_s = self._policy.deadline_s  # The service may copy all parts before it answers.

        def request() -> Answer:
            """Send the request; each attempt reads the body from its beginning."""
            method = getattr(self._boto_client(), operation)
            upload = {} if body is None else {"Body": PacedBody(body, self._policy)}
            try:
                return method(**arguments, **upload)  # type: ignore[no-any-return]
            except ValueError:
                raise Again("an answer that boto3 cannot parse") from None

        return call_within(limit_s, request)

    def _boto_client(self) -> Any:
        """Return the boto3 client of this process, which is created at the first call."""
        process_id = os.getpid()
        with self._lock:
            if self._client_of is None or self._client_of[0] != process_id:
                self._client_of = (process_id, make_client(self._endpoint_url, self._policy))
            _, client = self._client_of
            return client
