"""Upload large files to S3 in parts (multipart upload), and delete the parts of uploads that were never completed.

Guarantee: readers never see a part of a file; the object appears when S3 has combined all parts. If the answer to that
last request is lost, the random tag in the object's metadata shows whether it was carried out.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from electra_dist.errors import StoreMissing
from electra_dist.store.interface import in_parallel
from electra_dist.store.s3.answers import WRITER_TAG
from electra_dist.store.s3.client import content_md5
from electra_dist.store.s3.errors import FAILURES, Again
from electra_dist.store.s3.requests import S3Requests

PART_BYTES = 16 << 20  # Least size of a part.
_MAX_PARTS = 9_000  # S3 allows 10,000.
_UPLOAD_THREADS = 4


def upload_in_parts(requests: S3Requests, path: Path, key: str) -> None:
    """Upload a local file as an object, new or replaced, four parts at a time; each part is retried independently.

    If the upload fails, one attempt is made to delete its parts. Parts that remain, for example after a kill, cost
    storage until `discard_unfinished` deletes them.
    """
    tag = secrets.token_hex(16)
    create_arguments = {**requests.name_object(key), "Metadata": {WRITER_TAG: tag}}
    answer = requests.call(key, "create_multipart_upload", create_arguments)
    upload = {**requests.name_object(key), "UploadId": answer["UploadId"]}  # Names this upload in later requests.
    try:
        parts = _upload_parts(requests, path, key, upload)
        _complete(requests, key, upload, parts, tag)
    except BaseException:
        with contextlib.suppress(*FAILURES, Again):  # One attempt, so that the caller learns of the failure at once.
            requests.client.send("abort_multipart_upload", upload)
        raise


def discard_unfinished(requests: S3Requests, prefix: str, doomed: Callable[[str], bool]) -> int:
    """Abort unfinished multipart uploads of keys with this prefix if `doomed(key)` is True; return their number."""
    uploads = requests.list_all(
        "list_multipart_uploads",
        prefix,
        entries_field="Uploads",
        next_fields={"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"},
        name_of=lambda upload: (upload["Key"], upload["UploadId"]),
    )
    num_deleted = 0
    for upload in uploads:
        key = upload["Key"].removeprefix(requests.prefix)
        if doomed(key):
            abort_arguments = {**requests.name_object(key), "UploadId": upload["UploadId"]}
            with contextlib.suppress(StoreMissing):  # Another process has deleted it first.
                requests.call(key, "abort_multipart_upload", abort_arguments)
            num_deleted += 1
    return num_deleted


def _upload_parts(requests: S3Requests, path: Path, key: str, upload: dict[str, Any]) -> Sequence[dict[str, Any]]:
    """Upload a file in parts; return each part's number and ETag, in order. `upload` names the multipart upload."""
    size = path.stat().st_size
    part_size = max(PART_BYTES, _ceil_div(size, _MAX_PARTS))
    num_parts = _ceil_div(size, part_size)

    def upload_part(number: int) -> dict[str, Any]:
        with path.open("rb") as stream:
            stream.seek((number - 1) * part_size)
            data = stream.read(part_size)
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
