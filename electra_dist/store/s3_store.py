"""Store objects below s3://bucket/prefix through boto3, at AWS or at any S3-compatible service.

Guarantee: a download holds the bytes of one version of the object. After a broken body, a ranged GET with If-Match on
the ETag continues from the last good byte; if the object was replaced in the meantime, the download starts again from
byte 0. `write_new` is a PUT with If-None-Match: *. If the answer to that PUT is lost and a retry finds the key taken,
a random tag in the object's metadata shows whether the object is the writer's own. Uploads carry Content-MD5, so the
service refuses bytes that were changed in transit.

How: boto3's own retries are off, because they do not cover bodies and would multiply with those of `retry.py`.
`s3_errors.py` decides what is retried. Size and existence come from a GET of one byte, because the answer to a HEAD
does not show whether the bucket, the key or the permission is missing. Expired credentials are read again from their
source a few times before the operation gives up.

Cost: one request per object when nothing fails; `benchmarks/loader.py --s3` measures it in use.

Limits: the service must be strongly consistent and support conditional PUT (AWS since 2024, Ceph, MinIO).
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from electra_dist.errors import StoreMissing, UserError
from electra_dist.store.atomic_files import replacing
from electra_dist.store.interface import Store, check_key
from electra_dist.store.retry import Backoff, RetryAccount, RetryPolicy

try:
    import boto3
    import botocore.client

    from electra_dist.store.s3_download import Download, Span
    from electra_dist.store.s3_errors import FAILURES, Again, EmptyRange, Taken, classify
except ModuleNotFoundError as error:
    if error.name not in ("boto3", "botocore", "urllib3"):
        raise
    raise UserError("s3:// needs boto3, which is not installed; pip install 'electra-dist[s3]'") from None

_Answer = TypeVar("_Answer")
_MULTIPART_FROM = 64 << 20  # Files of at least this many bytes are uploaded in parts.
_PART = 16 << 20  # Least size of a part in bytes.
_MAX_PARTS = 9_000  # S3 allows 10,000.
_UPLOAD_THREADS = 4
_WRITER_TAG = "writer"  # Metadata key of the random tag that identifies the writer of an object.


class _ObjectInfo(NamedTuple):
    """Size of an object on S3, and the random tag by which its writer recognizes it."""

    size: int  # in bytes
    writer_tag: str | None


class S3Store(Store):
    """Store of objects below s3://bucket/prefix. Thread-safe.

    It may be used after a fork: each process makes a boto3 client of its own at its first request.
    """

    def __init__(self, url: str, endpoint_url: str | None, policy: RetryPolicy) -> None:
        """Parse and check the URLs; nothing is requested yet.

        Raises:
            UserError: A URL is malformed or holds credentials.
        """
        bucket, _, prefix = url.removeprefix("s3://").partition("/")
        if "@" in bucket or ":" in bucket:
            raise UserError(
                "s3:// URL with a colon or @ in its bucket: keep credentials out of URLs; set them as AWS_* variables"
            )
        prefix = prefix.strip("/")
        if not bucket:
            raise UserError(f"{url}: the URL has no bucket; give s3://bucket/prefix")
        if prefix:
            check_key(prefix)
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._endpoint_url = endpoint_url
        self._endpoint_text = _check_endpoint(endpoint_url)
        self._policy = policy
        self._account = RetryAccount(policy)
        self._answered = False  # Whether the service has answered any request of this store.
        self._client_lock = threading.Lock()
        self._client_of: tuple[int, Any] | None = None  # (process id, client)

    @property
    def retries(self) -> int:  # type: ignore[override]
        """Return the number of requests that were repeated since the store was opened."""
        return self._account.retries

    @property
    def retry_wait_s(self) -> float:  # type: ignore[override]
        """Return the seconds slept before repeated requests since the store was opened."""
        return self._account.wait_s

    def local_path(self, key: str) -> None:
        """Check the key and return None: an object on S3 has no local path."""
        check_key(key)

    def read(self, key: str, *, must_exist: bool = False) -> bytes:
        """Download all bytes of an object into memory."""
        sink = io.BytesIO()
        self._download(key, sink, must_exist)
        return sink.getvalue()

    def read_range(self, key: str, start: int, length: int, *, must_exist: bool = False) -> memoryview:
        """Download the bytes [start, start + length) of an object, fewer if it ends earlier, into new memory."""
        sink = io.BytesIO()
        if length:
            self._download(key, sink, must_exist, Span(start, start + length))
        return sink.getbuffer()

    def exists(self, key: str) -> bool:
        """Return whether there is an object with this key; costs one GET of one byte."""
        try:
            self._probe(key)
        except StoreMissing:
            return False
        return True

    def size(self, key: str) -> int:
        """Return the size of an object in bytes, or raise StoreMissing; costs one GET of one byte."""
        return self._probe(key).size

    def fetch(self, key: str, destination: Path, *, must_exist: bool = False) -> None:
        """Download an object to a local file, which appears only when it is complete and synced."""
        with replacing(destination) as out:
            self._download(key, out, must_exist)

    def write(self, key: str, data: bytes) -> None:
        """Create or replace an object with one PUT."""
        put = {**self._object(key), "Body": data, "ContentMD5": _md5(data)}
        self._call(key, lambda s3: s3.put_object(**put))

    def write_new(self, key: str, data: bytes) -> bool:
        """Create an object with a conditional PUT; return False if another writer has created it."""
        tag = secrets.token_hex(16)
        put = {**self._object(key), "Body": data, "ContentMD5": _md5(data), "Metadata": {_WRITER_TAG: tag}}
        try:
            self._call(key, lambda s3: s3.put_object(**put, IfNoneMatch="*"))
        except Taken:
            # The object may be this call's own: an earlier attempt stored it, and only its answer was lost.
            return self._probe(key).writer_tag == tag
        return True

    def upload(self, path: Path, key: str) -> None:
        """Create or replace an object from a local file.

        A file of 64 MiB or more is uploaded in parts, four at a time, each retried independently. If the process is
        killed, the parts stay on S3, invisible to `list`, until `discard_unfinished` deletes them.
        """
        size = path.stat().st_size
        if size < _MULTIPART_FROM:
            self.write(key, path.read_bytes())
            return
        tag = secrets.token_hex(16)
        begin = {**self._object(key), "Metadata": {_WRITER_TAG: tag}}
        upload_id = self._call(key, lambda s3: s3.create_multipart_upload(**begin))["UploadId"]
        upload = {**self._object(key), "UploadId": upload_id}
        try:
            parts = self._upload_parts(path, size, key, upload)
            self._complete_upload(key, upload, parts, tag)
        except BaseException:
            with contextlib.suppress(*FAILURES):  # Parts that remain cost storage, not correctness.
                self._client().abort_multipart_upload(**upload)
            raise

    def list(self, prefix: str = "") -> list[str]:
        """Return the sorted keys that begin with `prefix`; costs one request for each thousand keys."""
        keys: list[str] = []
        page: dict[str, Any] = {"Bucket": self._bucket, "Prefix": self._prefix + prefix}
        has_more = True
        while has_more:
            answer = self._call("", lambda s3: s3.list_objects_v2(**page))
            keys_of_page = [entry["Key"].removeprefix(self._prefix) for entry in answer.get("Contents", [])]
            keys += [key for key in keys_of_page if not key.endswith("/")]  # Web consoles create "folder" objects.
            has_more = answer["IsTruncated"]
            if has_more:
                page["ContinuationToken"] = answer["NextContinuationToken"]
        return sorted(keys)

    def delete(self, key: str) -> None:
        """Delete an object; a key without an object is no error."""
        self._call(key, lambda s3: s3.delete_object(**self._object(key)))

    def discard_unfinished(self, prefix: str, doomed: Callable[[str], bool]) -> int:
        """Delete the parts of multipart uploads that were never completed; return the number of these uploads.

        Args:
            prefix: Only uploads of keys that begin with this string are considered.
            doomed: Called with the key of each unfinished upload; its parts are deleted if it returns True.
        """
        page: dict[str, Any] = {"Bucket": self._bucket, "Prefix": self._prefix + prefix}
        num_deleted = 0
        while True:
            answer = self._call("", lambda s3: s3.list_multipart_uploads(**page))
            for upload in answer.get("Uploads", []):
                key = upload["Key"].removeprefix(self._prefix)
                if doomed(key):
                    self._abort_upload(key, upload["UploadId"])
                    num_deleted += 1
            if not answer.get("IsTruncated"):
                return num_deleted
            page.update(KeyMarker=answer["NextKeyMarker"], UploadIdMarker=answer["NextUploadIdMarker"])

    def _abort_upload(self, key: str, upload_id: str) -> None:
        """Delete the parts of an unfinished multipart upload; an upload that no longer exists is no error."""
        upload = {**self._object(key), "UploadId": upload_id}
        with contextlib.suppress(StoreMissing):  # Another process has deleted it first.
            self._call(key, lambda s3: s3.abort_multipart_upload(**upload))

    def _upload_parts(self, path: Path, size: int, key: str, upload: dict[str, Any]) -> Sequence[dict[str, Any]]:
        """Upload a file of `size` bytes in parts, in parallel; return number and ETag of each part, in order.

        The parts are larger than `_PART` if the file would otherwise have more than `_MAX_PARTS` parts.
        """
        part_size = max(_PART, _ceil_div(size, _MAX_PARTS))
        num_parts = _ceil_div(size, part_size)

        def upload_part(number: int) -> dict[str, Any]:
            """Upload part `number`, counted from 1; return its number and ETag."""
            with path.open("rb") as stream:
                stream.seek((number - 1) * part_size)
                data = stream.read(part_size)
            put = {**upload, "PartNumber": number, "Body": data, "ContentMD5": _md5(data)}
            return {"PartNumber": number, "ETag": self._call(key, lambda s3: s3.upload_part(**put))["ETag"]}

        with ThreadPoolExecutor(_UPLOAD_THREADS) as pool:
            return list(pool.map(upload_part, range(1, num_parts + 1)))

    def _complete_upload(self, key: str, upload: dict[str, Any], parts: Sequence[dict[str, Any]], tag: str) -> None:
        """Complete a multipart upload: S3 combines its parts into one object, which becomes visible under `key`.

        Args:
            upload: Bucket, key and id of the upload.
            parts: Number and ETag of each part.
            tag: Random tag of this writer in the object's metadata. If the answer to an earlier attempt was lost, it
                shows whether that attempt completed the upload.
        """
        try:
            self._call(key, lambda s3: s3.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts}))
        except StoreMissing:
            # "No such upload": an earlier attempt may have completed it, and only its answer was lost.
            if self._probe(key).writer_tag != tag:
                raise

    def _probe(self, key: str) -> _ObjectInfo:
        """Return the size of an object and its writer's tag, by a GET of one byte.

        Raises:
            StoreMissing: There is no such object.
        """
        try:
            answer = self._call(key, lambda s3: s3.get_object(**self._object(key), Range="bytes=0-0"))
        except EmptyRange:  # The object is empty.
            answer = self._call(key, lambda s3: s3.get_object(**self._object(key)))
        answer["Body"].close()
        total = answer.get("ContentRange", "").rpartition("/")[2]  # "bytes 0-0/1234"
        return _ObjectInfo(int(total or answer["ContentLength"]), answer["Metadata"].get(_WRITER_TAG))

    def _download(self, key: str, sink: IO[bytes], must_exist: bool, span: Span | None = None) -> None:
        """Write an object, or a span of it, to an empty, seekable file, resuming after every fault.

        Raises:
            StoreMissing: There is no such object.
            StoreExhausted: All retries failed.
        """
        backoff = self._account.begin(self._describe(key))
        download = Download(sink, backoff.progress, span)
        while not download.complete:
            try:
                with self._classified(key, must_exist):
                    download.receive(self._client().get_object(**self._object(key), **download.conditions()))
            except EmptyRange:
                if download.ends_before_span:
                    break
                _begin_again(download, backoff)
            except Taken:
                _begin_again(download, backoff)
            except Again as failure:
                self._wait(failure, backoff)
        self._account.succeeded()

    def _call(self, key: str, request: Callable[[Any], _Answer]) -> _Answer:
        """Return the answer to a request, which is repeated while its failures are worth another attempt.

        Args:
            key: Key of the object, for messages; "" for the store itself.
            request: Receives the boto3 client and sends the request.
        """
        backoff = self._account.begin(self._describe(key))
        while True:
            try:
                with self._classified(key):
                    answer = request(self._client())
            except Again as failure:
                self._wait(failure, backoff)
            else:
                self._account.succeeded()
                return answer

    @contextlib.contextmanager
    def _classified(self, key: str, must_exist: bool = False) -> Iterator[None]:
        """Replace boto3's exception, if the request in the `with` block fails, by the one that `classify` returns."""
        try:
            yield
        except FAILURES as error:
            # `from None`: boto's text and traceback may quote a signed request.
            raise classify(
                error, self._describe(key), self._bucket, answered=self._answered, must_exist=must_exist
            ) from None
        self._answered = True

    def _wait(self, failure: Again, backoff: Backoff) -> None:
        """Sleep before the next attempt of a failed request.

        If `failure.renew` is set, the client is dropped, so that the next one reads the credentials again.
        """
        if failure.renew:
            self._client_of = None
        backoff.wait_after_failure(failure.reason, failure.tries, failure.advice)

    def _client(self) -> Any:
        """Return the boto3 client of this process, which is made at the first call. Thread-safe."""
        with self._client_lock:
            if self._client_of is None or self._client_of[0] != os.getpid():
                self._client_of = (os.getpid(), _make_client(self._endpoint_url, self._policy))
            return self._client_of[1]

    def _object(self, key: str) -> dict[str, str]:
        """Return the arguments that name an object in a request."""
        return {"Bucket": self._bucket, "Key": self._prefix + check_key(key)}

    def _describe(self, key: str) -> str:
        """Return the URL of an object, with the endpoint if it is not AWS's, for messages."""
        return f"{self.url}/{key}".rstrip("/") + self._endpoint_text


def _begin_again(download: Download, backoff: Backoff) -> None:
    """Reset a download to byte 0, because the object was replaced in the meantime, and wait before the next GET."""
    download.restart()
    backoff.wait_after_failure("the object was replaced during the download")


def _ceil_div(number: int, divisor: int) -> int:
    """Return number / divisor, rounded up."""
    return -(-number // divisor)


def _md5(data: bytes) -> str:
    """Return the MD5 of `data` in base64, the value of the header Content-MD5."""
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


def _check_endpoint(endpoint_url: str | None) -> str:
    """Check the endpoint URL; return " at host:port", which messages add to a URL, or "" for an endpoint of None.

    Raises:
        UserError: The URL is malformed, or holds more than host and port; the message does not repeat it, because it
            may hold credentials.
    """
    if endpoint_url is None:
        return ""
    parts = urlsplit(endpoint_url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError("endpoint_url: not an http:// or https:// URL; give for example http://10.0.0.1:9000")
    if "@" in parts.netloc or parts.query:
        raise UserError(
            "endpoint_url: holds more than a host and a port; remove the rest, and keep credentials in AWS_* variables"
        )
    return f" at {parts.netloc}"


def _make_client(endpoint_url: str | None, policy: RetryPolicy) -> Any:
    """Return a new boto3 S3 client without retries of its own; it reads the credentials from their source."""
    config = botocore.client.Config(
        retries={"total_max_attempts": 1, "mode": "standard"},
        connect_timeout=policy.connect_timeout_s,
        read_timeout=policy.read_timeout_s,
        max_pool_connections=64,
        tcp_keepalive=True,
        # Older services refuse CRC32 trailers and checks. Content-MD5 and the readers' digests replace them.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"addressing_style": "path" if endpoint_url else "auto"},
    )
    return boto3.session.Session().client("s3", endpoint_url=endpoint_url, config=config)
