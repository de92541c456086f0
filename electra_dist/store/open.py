"""Open the store that a URL names: a local path or s3://bucket/prefix, which needs the extra `s3` (boto3)."""

from __future__ import annotations

from pathlib import Path

from electra_dist.errors import UserError
from electra_dist.store.interface import Store
from electra_dist.store.local import LocalStore
from electra_dist.store.retry import RetryPolicy


def open_store(url: str, endpoint_url: str | None = None, *, retry: RetryPolicy | None = None) -> Store:
    """The store at a local path or at s3://bucket/prefix. Nothing is touched until the first use.

    Args:
        endpoint_url: S3 service other than AWS's, for example http://10.0.0.1:9000.
        retry: how patient to be with S3.

    Raises:
        UserError: another scheme, a malformed URL, or S3 without boto3.
    """
    if url.startswith("s3://"):
        from electra_dist.store.s3 import S3Store  # boto3 is an optional extra

        return S3Store(url, endpoint_url, retry or RetryPolicy())
    scheme, separator, rest = url.partition("://")
    if separator and scheme != "file":
        raise UserError(f"{scheme}://...: unknown kind of storage; give a local path or s3://bucket/prefix")
    if not (path := rest if separator else url):
        raise UserError("empty storage path; give a local path or s3://bucket/prefix")
    return LocalStore(Path(path).expanduser())
