"""The objects of the drill's runs on an S3 server or on Azurite, read and changed without the product.

obstore's threads do not survive the forks of this drill, so the client of Azurite is a few signed requests.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any, Protocol
from urllib.parse import quote
from xml.etree import ElementTree

import boto3
from support.azurite import ACCOUNT, signed_request
from support.s3_server import S3Server
from typing_extensions import override


class Objects(Protocol):
    """The objects of one bucket or container."""

    scheme: str

    def keys(self, prefix: str) -> list[str]:
        """Return the keys that begin with `prefix`, sorted."""

    def read(self, key: str) -> bytes: ...

    def copy(self, key: str, copied_key: str) -> None: ...

    def delete(self, keys: Sequence[str]) -> None: ...

    def unfinished(self, prefix: str) -> list[str]:
        """Return the keys of uploads in parts that are not finished, where the service lists them."""


def objects_of(bucket: str, server: S3Server) -> Objects:
    """Return the objects below the URL of a bucket or container; credentials are in os.environ."""
    scheme, _, name = bucket.partition("://")
    return AzureObjects(name, server) if scheme == "az" else S3Objects(name, server)


class S3Objects(Objects):
    """The objects of a bucket on an S3 server."""

    scheme = "s3"

    def __init__(self, bucket: str, server: S3Server) -> None:
        self._bucket, self._server = bucket, server

    @property
    def _client(self) -> Any:
        return _s3_client(self._server.endpoint_url, os.getpid())

    @override
    def keys(self, prefix: str) -> list[str]:
        page = self._client.list_objects_v2(Bucket=self._bucket, Prefix=prefix)
        assert not page["IsTruncated"]
        return [entry["Key"] for entry in page.get("Contents", [])]

    @override
    def read(self, key: str) -> bytes:
        return bytes(self._client.get_object(Bucket=self._bucket, Key=key)["Body"].read())

    @override
    def copy(self, key: str, copied_key: str) -> None:
        source = {"Bucket": self._bucket, "Key": key}
        self._client.copy_object(Bucket=self._bucket, Key=copied_key, CopySource=source)

    @override
    def delete(self, keys: Sequence[str]) -> None:
        if keys:
            named = {"Objects": [{"Key": key} for key in keys], "Quiet": True}
            self._client.delete_objects(Bucket=self._bucket, Delete=named)

    @override
    def unfinished(self, prefix: str) -> list[str]:
        uploads = self._client.list_multipart_uploads(Bucket=self._bucket, Prefix=prefix)
        return [upload["Key"] for upload in uploads.get("Uploads", [])]


class AzureObjects(Objects):
    """The objects of a container on Azurite."""

    scheme = "az"

    def __init__(self, container: str, server: S3Server) -> None:
        self._container, self._url = container, server.endpoint_url

    def _path(self, key: str) -> str:
        return f"{self._container}/{quote(key)}"

    @override
    def keys(self, prefix: str) -> list[str]:
        query = {"comp": "list", "prefix": prefix, "restype": "container"}
        tree = ElementTree.fromstring(signed_request(self._url, "GET", self._container, query))
        assert not tree.findtext("NextMarker")
        return sorted(str(name.text) for name in tree.iterfind("Blobs/Blob/Name"))

    @override
    def read(self, key: str) -> bytes:
        return signed_request(self._url, "GET", self._path(key))

    @override
    def copy(self, key: str, copied_key: str) -> None:
        source = f"{self._url.removesuffix(f'/{ACCOUNT}')}/{ACCOUNT}/{self._path(key)}"
        signed_request(self._url, "PUT", self._path(copied_key), headers={"x-ms-copy-source": source})

    @override
    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            signed_request(self._url, "DELETE", self._path(key))

    @override
    def unfinished(self, prefix: str) -> list[str]:
        return []  # Azure lists no uploads, and deletes their parts after a week.


@functools.cache
def _s3_client(endpoint_url: str, process_id: int) -> Any:
    """Return the boto3 client of this process, which a forked process must not share."""
    return boto3.session.Session().client("s3", endpoint_url=endpoint_url)
