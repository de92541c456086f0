"""Make the boto3 client of a store, and check the URL of its service. Needs boto3."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import boto3
import botocore.client

from electra_dist.errors import UserError
from electra_dist.store.retry import RetryPolicy


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
    return boto3.session.Session().client("s3", endpoint_url=endpoint_url, config=config)
