"""Store objects below s3://bucket/prefix through boto3, at AWS or at any S3-compatible service.

Guarantee: a download holds the bytes of one version of the object. After a broken body, a ranged GET with If-Match on
the ETag continues from the last good byte; if the object was replaced in the meantime, the download starts again from
byte 0. `write_new` is a PUT with If-None-Match: *, which fails if the key is taken. Each such PUT stores a random tag
in the object's metadata. If the answer is lost and the retry finds the key taken, the tag shows whether the first
attempt of this call created the object. Uploads carry Content-MD5, so the service refuses bytes that were changed in
transit.

How: `requests.py` sends each request and repeats it if it fails: one request per object when nothing fails, and one
for each part of a large upload. Size and existence come from a GET of one byte.

Limits: the service must be strongly consistent and support conditional PUT (AWS since 2024, Ceph, MinIO).
"""

from __future__ import annotations

import io
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

from typing_extensions import override

from electra_dist.errors import StoreAway, StoreError, StoreMissing, UserError
from electra_dist.store.atomic_files import replacing
from electra_dist.store.interface import Store, check_key, in_parallel
from electra_dist.store.patience import Patience

try:
    from electra_dist.store.s3 import multipart_upload
    from electra_dist.store.s3.answers import WRITER_TAG
    from electra_dist.store.s3.client import content_md5
    from electra_dist.store.s3.download import Span
    from electra_dist.store.s3.errors import Taken
    from electra_dist.store.s3.requests import S3Requests
except ModuleNotFoundError as error:
    if error.name not in ("boto3", "botocore", "urllib3"):
        raise
    raise UserError("s3:// needs boto3, which is not installed; pip install 'electra-dist[s3]'") from None

_MULTIPART_FROM = 64 << 20  # Files of at least this many bytes are uploaded in parts.
_MOST_DELETED = 1_000  # Keys in one request that deletes several; the limit of S3.


class S3Store(Store):
    """Store of objects below s3://bucket/prefix. Thread-safe, also after a fork (see `S3Client`)."""

    def __init__(self, url: str, endpoint_url: str | None, patience: Patience) -> None:
        """Check the URLs, as `S3Requests` does; the first request is sent when the store is used."""
        self._requests = S3Requests(url, endpoint_url, patience)
        self.url = self._requests.url
        self._endpoint_url = endpoint_url
        self.patience = patience
        self.reread_pauses_s = patience.pace.reread_pauses_s
        self._deletes_several = True  # False once the service has refused a request that deletes several objects.

    def __reduce__(self) -> tuple[type[S3Store], tuple[str, str | None, Patience]]:
        """Pickle only the URLs and the limits: another process opens the store anew and counts retries from 0."""
        return S3Store, (self.url, self._endpoint_url, self.patience)

    @override
    def local_path(self, key: str) -> None:
        """Check the key and return None, because an object on S3 has no local path."""
        check_key(key)

    @override
    def read(self, key: str, *, must_exist: bool = False) -> bytes:
        sink = io.BytesIO()
        self._requests.download(key, sink, must_exist=must_exist)
        return sink.getvalue()

    @override
    def read_range(self, key: str, start: int, length: int, *, must_exist: bool = False) -> memoryview:
        sink = io.BytesIO()
        if length:
            self._requests.download(key, sink, must_exist=must_exist, span=Span(start=start, end=start + length))
        return sink.getbuffer()

    @override
    def exists(self, key: str) -> bool:
        try:
            self._requests.object_info(key)
        except StoreMissing:
            return False
        return True

    @override
    def size(self, key: str) -> int:
        return self._requests.object_info(key).size

    @override
    def fetch(self, key: str, destination: Path, *, must_exist: bool = False) -> None:
        with replacing(destination) as out:
            self._requests.download(key, out, must_exist=must_exist)

    @override
    def write(self, key: str, data: bytes) -> None:
        put = {**self._requests.name_object(key), "ContentMD5": content_md5(data)}
        self._requests.call(key, "put_object", put, data)

    @override
    def write_new(self, key: str, data: bytes) -> bool:
        tag = secrets.token_hex(16)
        put = {
            **self._requests.name_object(key),
            "ContentMD5": content_md5(data),
            "Metadata": {WRITER_TAG: tag},
            "IfNoneMatch": "*",
        }
        try:
            self._requests.call(key, "put_object", put, data)
        except Taken:
            # The object may be this call's own: an earlier attempt stored it, and only its answer was lost.
            return self._requests.object_info(key).writer_tag == tag
        return True

    @override
    def upload(self, path: Path, key: str) -> None:
        """Upload a file of 64 MiB or more in parts (`multipart_upload.py`)."""
        if path.stat().st_size < _MULTIPART_FROM:
            self.write(key, path.read_bytes())
        else:
            multipart_upload.upload_in_parts(self._requests, path, key)

    @override
    def sizes(self, prefix: str = "") -> dict[str, int]:
        entries = self._requests.list_all(
            "list_objects_v2",
            prefix,
            entries_field="Contents",
            next_fields={"ContinuationToken": "NextContinuationToken"},
            name_of=lambda entry: (entry["Key"],),
        )
        found = {entry["Key"].removeprefix(self._requests.prefix): entry["Size"] for entry in entries}
        # Web consoles create an empty object for a folder, whose key ends with a slash.
        return {key: found[key] for key in sorted(found) if not key.endswith("/")}

    @override
    def delete(self, key: str) -> None:
        self._requests.call(key, "delete_object", self._requests.name_object(key))

    @override
    def delete_all(self, keys: Sequence[str]) -> None:
        """Delete up to 1,000 objects with each DeleteObjects request; delete any that remain by single requests.

        If the service refuses DeleteObjects, this call and all later ones delete each key by a separate request.
        """
        for start in range(0, len(keys), _MOST_DELETED):
            batch = keys[start : start + _MOST_DELETED]
            deleted_keys: set[str] = set()
            if len(batch) > 1 and self._deletes_several:
                deleted_keys = self._delete_batch(batch)
            remaining_keys = [key for key in batch if key not in deleted_keys]
            in_parallel(self.delete, remaining_keys)

    def _delete_batch(self, keys: Sequence[str]) -> set[str]:
        """Delete up to 1,000 objects by one request, and return the deleted keys; none if the service refuses it."""
        full_keys = {self._requests.name_object(key)["Key"]: key for key in keys}
        arguments = {"Bucket": self._requests.bucket, "Delete": {"Objects": [{"Key": key} for key in full_keys]}}
        try:
            answer = self._requests.call("", "delete_objects", arguments)
        except StoreAway:
            raise
        except StoreError:
            self._deletes_several = False
            return set()
        return {full_keys[entry["Key"]] for entry in answer.get("Deleted", []) if entry.get("Key") in full_keys}

    @override
    def discard_unfinished(self, prefix: str, doomed: Callable[[str], bool]) -> int:
        return multipart_upload.discard_unfinished(self._requests, prefix, doomed)
