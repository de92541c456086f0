"""Open the store that a URL names: a local folder, or a prefix on S3, Azure Blob Storage or Google Cloud Storage."""

from __future__ import annotations

from pathlib import Path

from electra_dist.errors import UserError
from electra_dist.store.interface import Store
from electra_dist.store.local_store import LocalStore
from electra_dist.store.patience import Patience, command_patience

REMOTE_SCHEMES = ("s3://", "az://", "gs://")  # of stores that are no folder


def open_store(url: str, endpoint_url: str | None = None, patience: Patience | None = None) -> Store:
    """Return the store at a local path (~ is expanded), file://, s3://, az:// or gs://; read nothing yet.

    A missing folder or bucket is noticed at the first use. `endpoint_url` names an S3-compatible service, such as
    http://10.0.0.1:9000; None is AWS. `patience` says how long operations wait for storage that is full or does not
    respond; None means three minutes, as in a command. Raises UserError for a malformed URL.
    """
    if patience is None:
        patience = command_patience()
    if url.startswith("s3://"):
        from electra_dist.store.s3.s3_store import S3Store  # its import of boto3 takes long

        return S3Store(url, endpoint_url, patience)
    if url.startswith(REMOTE_SCHEMES):
        from electra_dist.store.cloud_store import CloudStore

        return CloudStore(url, endpoint_url, patience)
    scheme, separator, rest = url.partition("://")
    if not separator:
        path = url
    elif scheme == "file":
        path = rest
    else:
        raise UserError(f"{scheme}://...: unknown kind of storage; give a local path, s3://, az:// or gs://")
    if not path:
        raise UserError(f"empty storage path {url!r}; give a local path or s3://bucket/prefix")
    return LocalStore(without_tilde(path), patience)


def without_tilde(path: str | Path) -> Path:
    """Replace a leading ~ or ~USER of a path by that user's home folder; raise UserError if there is none."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(
            f"{path}: there is no such user, or this user has no home folder; write the whole path, or set HOME"
        ) from None
