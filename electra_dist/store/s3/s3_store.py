"""Store objects below s3://bucket/prefix through boto3, at AWS or at any S3-compatible service.

Guarantee: a download holds the bytes of one version of the object. After a broken body, a ranged GET with If-Match on
the ETag continues from the last good byte; if the object was replaced in the meantime, the download starts again from
byte 0. `write_new` is a PUT with If-None-Match: *, which fails if the key is taken. Each such PUT stores a random tag
in the object's metadata. If the answer is lost and the retry finds the key taken, the tag shows whether the first
attempt of this call created the object. Uploads carry Content-MD5, so the service refuses bytes that were changed in
transit. A large file is uploaded in parts, and the object appears when S3 has combined all of them; if the answer to
that last request is lost, the tag shows whether it was carried out.

How: `requests.py` sends each request and repeats it if it fails: one request per object when nothing fails, and one
for each part of a large upload. Size and existence come from a GET of one byte.

Limits: the service must be strongly consistent and support conditional PUT (AWS since 2024, Ceph, MinIO).
"""

from __future__ import annotations

import contextlib
import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import IO, Any

from typing_extensions import override

from electra_dist.errors import StoreAway, StoreError, StoreMissing
from electra_dist.store.interface import RemoteStore, in_parallel
from electra_dist.store.patience import Patience
from electra_dist.store.s3.answers import FAILURES, WRITER_TAG, Again, Taken
from electra_dist.store.s3.requests import S3Requests, content_md5

PART_BYTES = 16 << 20  # Least size of a part.
_MAX_PARTS = 9_000  # S3 allows 10,000.
_UPLOAD_THREADS = 4
_MULTIPART_FROM = 64 << 20  # Files of at least this many bytes are uploaded in parts.
_MOST_DELETED = 1_000  # Keys in one request that deletes several; the limit of S3.


class S3Store(RemoteStore):
    """Store of objects below s3://bucket/prefix. Thread-safe, also after a fork (see `S3Requests`)."""

    def __init__(self, url: str, endpoint_url: str | None, patience: Patience) -> None:
        """Check both URLs without a request; raise UserError if one is malformed. `endpoint_url` None means AWS."""
        self._requests = S3Requests(url, endpoint_url, patience)
        super().__init__(self._requests.url, endpoint_url, patience)
        self._deletes_several = True  # False once the service has refused a request that deletes several objects.

    @override
    def download(self, key: str, sink: IO[bytes], *, must_exist: bool, start: int = 0, end: int | None = None) -> None:
        self._requests.download(key, sink, must_exist=must_exist, start=start, end=end)

    @override
    def size(self, key: str) -> int:
        return self._requests.object_info(key).size

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
        """Upload a file; from 64 MiB on, it is sent in several parts."""
        size = path.stat().st_size
        if size < _MULTIPART_FROM:
            self.write(key, path.read_bytes())
            return

        def read(start: int, length: int) -> bytes:
            with path.open("rb") as stream:
                stream.seek(start)
                return stream.read(length)

        _upload_in_parts(self._requests, key, size, read)

    @override
    def write_pieces(self, key: str, pieces: Sequence[bytes | memoryview]) -> None:
        """Upload the pieces as one object; from 64 MiB on, it is sent in several parts, straight from memory."""
        ends = list(accumulate(len(piece) for piece in pieces))  # of each piece, counted from the first byte
        size = ends[-1] if ends else 0
        if size < _MULTIPART_FROM:
            self.write(key, b"".join(pieces))
            return

        def read(start: int, length: int) -> bytes:
            """Return up to `length` bytes from `start` on, joined from all pieces that have some of them."""
            end = min(start + length, size)
            parts = []
            for number in range(bisect_right(ends, start), bisect_left(ends, end) + 1):
                first = ends[number] - len(pieces[number])
                parts.append(pieces[number][max(start - first, 0) : end - first])
            return b"".join(parts)

        _upload_in_parts(self._requests, key, size, read)

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
        """Delete up to 1,000 objects by one request; return the deleted keys, none if the service refuses it."""
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
        """Abort the unfinished multipart uploads to `doomed` keys that begin with `prefix`; return their number."""
        uploads = self._requests.list_all(
            "list_multipart_uploads",
            prefix,
            entries_field="Uploads",
            next_fields={"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"},
            name_of=lambda upload: (upload["Key"], upload["UploadId"]),
        )
        num_deleted = 0
        for upload in uploads:
            key = upload["Key"].removeprefix(self._requests.prefix)
            if doomed(key):
                abort_arguments = {**self._requests.name_object(key), "UploadId": upload["UploadId"]}
                with contextlib.suppress(StoreMissing):  # Another process has deleted it first.
                    self._requests.call(key, "abort_multipart_upload", abort_arguments)
                num_deleted += 1
        return num_deleted


def _upload_in_parts(requests: S3Requests, key: str, size: int, read: Callable[[int, int], bytes]) -> None:
    """Upload an object, new or replaced, four parts at a time; each part is retried independently.

    `read(start, length)` returns bytes of the object's content, fewer at its end. If the upload fails, one attempt is
    made to delete its parts. Parts that remain, for example after a kill, cost storage until `discard_unfinished`
    deletes them.
    """
    tag = secrets.token_hex(16)
    create_arguments = {**requests.name_object(key), "Metadata": {WRITER_TAG: tag}}
    answer = requests.call(key, "create_multipart_upload", create_arguments)
    upload = {**requests.name_object(key), "UploadId": answer["UploadId"]}  # Names this upload in later requests.
    try:
        parts = _upload_parts(requests, key, upload, size, read)
        _complete(requests, key, upload, parts, tag)
    except BaseException:
        with contextlib.suppress(*FAILURES, Again):  # One attempt, so that the caller learns of the failure at once.
            requests.send("abort_multipart_upload", upload)
        raise


def _upload_parts(
    requests: S3Requests, key: str, upload: dict[str, Any], size: int, read: Callable[[int, int], bytes]
) -> Sequence[dict[str, Any]]:
    """Upload the parts; return each part's number and ETag, in order. `upload` names the multipart upload."""
    part_size = max(PART_BYTES, _ceil_div(size, _MAX_PARTS))
    num_parts = _ceil_div(size, part_size)

    def upload_part(number: int) -> dict[str, Any]:
        data = read((number - 1) * part_size, part_size)
        part_arguments = {**upload, "PartNumber": number, "ContentMD5": content_md5(data)}
        answer = requests.call(key, "upload_part", part_arguments, data)
        return {"PartNumber": number, "ETag": answer["ETag"]}

    return in_parallel(upload_part, range(1, num_parts + 1), _UPLOAD_THREADS)


def _complete(
    requests: S3Requests, key: str, upload: dict[str, Any], parts: Sequence[dict[str, Any]], tag: str
) -> None:
    """Let S3 combine the parts into one object. If the answer is lost, an object with this `tag` shows success."""
    complete_arguments = {**upload, "MultipartUpload": {"Parts": parts}}
    try:
        requests.call(key, "complete_multipart_upload", complete_arguments)
    except StoreMissing:
        # "No such upload": an earlier attempt may have completed it, and only its answer was lost.
        if requests.object_info(key).writer_tag != tag:
            raise


def _ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)  # `//` rounds down, so the negative of the negative quotient is rounded up.
