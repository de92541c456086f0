"""s3://bucket/prefix through boto3, at AWS or any endpoint: downloads that resume, commits that one racer wins.

Guarantee: a download is the bytes of one version of the object. A broken body is continued from the last good byte by
a ranged GET with If-Match on the ETag; if the object was replaced meanwhile, the download starts again from zero.
`write_new` is PUT with If-None-Match: *; a racer whose own answer was lost on the way recognises its object by a
random tag in the object's metadata. Uploads carry Content-MD5, so the service refuses bytes that were damaged on the
way. What is retried and what fails at once: `s3_errors.py`; how patiently: `retry.py`.

How: boto3's retries are off (they do not cover bodies, and would multiply with ours). Size and existence are asked by
a GET of one byte, because the answer to a HEAD cannot say which of bucket, key or right is missing. Expired
credentials are read again from their source, a few times, before they are believed.

Cost: one request per object when nothing fails; `benchmarks/first_batch.py --s3` measures it in use.

Where it stops: the service must be strongly consistent and know conditional PUT (AWS since 2024, Ceph, MinIO).
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
from typing import IO, Any, TypeVar
from urllib.parse import urlsplit

from electra_dist.errors import StoreMissing, UserError
from electra_dist.store.files import replacing
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
_MULTIPART_FROM = 64 << 20
_PART = 16 << 20
_MAX_PARTS = 9_000  # S3 allows 10,000
_UPLOAD_THREADS = 4


class S3Store(Store):
    """Objects below s3://bucket/prefix. Fork-safe: each process makes its own client on first use."""

    def __init__(self, url: str, endpoint_url: str | None, policy: RetryPolicy) -> None:
        bucket, _, prefix = url.removeprefix("s3://").partition("/")
        if "@" in bucket or ":" in bucket:
            raise UserError("s3:// URL with a colon or @ in it: keep credentials out of URLs, use AWS_* variables")
        prefix = prefix.strip("/")
        if not bucket:
            raise UserError(f"{url}: no bucket; give s3://bucket/prefix")
        if prefix:
            check_key(prefix)
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._endpoint_url = endpoint_url
        self._endpoint_text = _check_endpoint(endpoint_url)
        self._policy = policy
        self._account = RetryAccount(policy)
        self._answered = False
        self._client_lock = threading.Lock()
        self._client_of: tuple[int, Any] | None = None  # process id, client

    @property
    def retries(self) -> int:  # type: ignore[override]
        """Requests repeated since the store was opened."""
        return self._account.retries

    @property
    def retry_wait_s(self) -> float:  # type: ignore[override]
        """Seconds slept before them."""
        return self._account.wait_s

    def local_path(self, key: str) -> None:
        """See `Store`."""
        check_key(key)

    def read(self, key: str, *, must_exist: bool = False) -> bytes:
        """See `Store`."""
        sink = io.BytesIO()
        self._download(key, sink, must_exist)
        return sink.getvalue()

    def read_range(self, key: str, start: int, length: int, *, must_exist: bool = False) -> memoryview:
        """See `Store`."""
        sink = io.BytesIO()
        if length:
            self._download(key, sink, must_exist, Span(start, start + length))
        return sink.getbuffer()

    def exists(self, key: str) -> bool:
        """See `Store`."""
        try:
            self._probe(key)
        except StoreMissing:
            return False
        return True

    def size(self, key: str) -> int:
        """See `Store`."""
        return self._probe(key)[0]

    def fetch(self, key: str, destination: Path, *, must_exist: bool = False) -> None:
        """See `Store`."""
        with replacing(destination) as out:
            self._download(key, out, must_exist)

    def write(self, key: str, data: bytes) -> None:
        """See `Store`."""
        put = {**self._names(key), "Body": data, "ContentMD5": _md5(data)}
        self._call(key, lambda s3: s3.put_object(**put))

    def write_new(self, key: str, data: bytes) -> bool:
        """See `Store`."""
        tag = secrets.token_hex(16)
        put = {**self._names(key), "Body": data, "ContentMD5": _md5(data), "Metadata": {"writer": tag}}
        try:
            self._call(key, lambda s3: s3.put_object(**put, IfNoneMatch="*"))
        except Taken:
            return self._probe(key)[1] == tag  # ours after all: the object was stored, its answer lost
        return True

    def upload(self, path: Path, key: str) -> None:
        """See `Store`. Large files go up in parts, four at a time, each retried by itself.

        The parts of an upload that was killed stay, unseen, until `discard_unfinished` removes them.
        """
        size = path.stat().st_size
        if size < _MULTIPART_FROM:
            self.write(key, path.read_bytes())
            return
        tag = secrets.token_hex(16)
        begin = {**self._names(key), "Metadata": {"writer": tag}}
        upload_id = self._call(key, lambda s3: s3.create_multipart_upload(**begin))["UploadId"]
        names = {**self._names(key), "UploadId": upload_id}
        try:
            parts = {"Parts": self._upload_parts(path, size, key, names)}
            try:
                self._call(key, lambda s3: s3.complete_multipart_upload(**names, MultipartUpload=parts))
            except StoreMissing:  # no such upload: did an earlier attempt complete it, and its answer was lost?
                if self._probe(key)[1] != tag:
                    raise
        except BaseException:
            with contextlib.suppress(*FAILURES):  # left-over parts cost storage, not correctness
                self._client().abort_multipart_upload(**names)
            raise

    def list(self, prefix: str = "") -> list[str]:
        """See `Store`."""
        keys: list[str] = []
        page: dict[str, Any] = {"Bucket": self._bucket, "Prefix": self._prefix + prefix}
        more = True
        while more:
            answer = self._call("", lambda s3: s3.list_objects_v2(**page))
            found = [entry["Key"].removeprefix(self._prefix) for entry in answer.get("Contents", [])]
            keys += [key for key in found if not key.endswith("/")]  # "folders" that consoles make
            more = answer["IsTruncated"]
            if more:
                page["ContinuationToken"] = answer["NextContinuationToken"]
        return sorted(keys)

    def delete(self, key: str) -> None:
        """See `Store`."""
        self._call(key, lambda s3: s3.delete_object(**self._names(key)))

    def discard_unfinished(self, prefix: str, doomed: Callable[[str], bool]) -> int:
        """See `Store`. Parts of uploads that were never completed."""
        asked: dict[str, Any] = {"Bucket": self._bucket, "Prefix": self._prefix + prefix}
        found = 0
        while True:
            answer = self._call("", lambda s3: s3.list_multipart_uploads(**asked))
            for upload in answer.get("Uploads", []):
                key = upload["Key"].removeprefix(self._prefix)
                if doomed(key):
                    self._abort_upload(key, upload["UploadId"])
                    found += 1
            if not answer.get("IsTruncated"):
                return found
            asked.update(KeyMarker=answer["NextKeyMarker"], UploadIdMarker=answer["NextUploadIdMarker"])

    def _abort_upload(self, key: str, upload_id: str) -> None:
        names = {**self._names(key), "UploadId": upload_id}
        with contextlib.suppress(StoreMissing):  # somebody else was quicker
            self._call(key, lambda s3: s3.abort_multipart_upload(**names))

    def _upload_parts(self, path: Path, size: int, key: str, names: dict[str, Any]) -> Sequence[dict[str, Any]]:
        part_size = max(_PART, -(-size // _MAX_PARTS))

        def upload_part(number: int) -> dict[str, Any]:
            with path.open("rb") as stream:
                stream.seek((number - 1) * part_size)
                data = stream.read(part_size)
            send = {**names, "PartNumber": number, "Body": data, "ContentMD5": _md5(data)}
            return {"PartNumber": number, "ETag": self._call(key, lambda s3: s3.upload_part(**send))["ETag"]}

        with ThreadPoolExecutor(_UPLOAD_THREADS) as pool:
            return list(pool.map(upload_part, range(1, -(-size // part_size) + 1)))

    def _probe(self, key: str) -> tuple[int, str | None]:
        """Size and writer's tag of an object, by reading one byte of it."""
        try:
            answer = self._call(key, lambda s3: s3.get_object(**self._names(key), Range="bytes=0-0"))
        except EmptyRange:
            answer = self._call(key, lambda s3: s3.get_object(**self._names(key)))
        answer["Body"].close()
        total = answer.get("ContentRange", "").rpartition("/")[2]
        return int(total or answer["ContentLength"]), answer["Metadata"].get("writer")

    def _download(self, key: str, sink: IO[bytes], must_exist: bool, span: Span | None = None) -> None:
        """Write the object, or a span of it, to an empty, seekable `sink`, resuming after every fault."""
        backoff = self._account.begin(self._where(key))
        download = Download(sink, backoff.progress, span)
        while not download.complete:
            try:
                with self._judged(key, must_exist):
                    download.receive(self._client().get_object(**self._names(key), **download.conditions()))
            except (Taken, EmptyRange) as answer:
                if isinstance(answer, EmptyRange) and download.ends_before_span:
                    break
                download.restart()
                backoff.failed("the object was replaced during the download")
            except Again as again:
                self._wait(again, backoff)
        self._account.succeeded()

    def _call(self, key: str, request: Callable[[Any], _Answer]) -> _Answer:
        """`request` with retries."""
        backoff = self._account.begin(self._where(key))
        while True:
            try:
                with self._judged(key):
                    answer = request(self._client())
            except Again as again:
                self._wait(again, backoff)
            else:
                self._account.succeeded()
                return answer

    @contextlib.contextmanager
    def _judged(self, key: str, must_exist: bool = False) -> Iterator[None]:
        try:
            yield
        except FAILURES as error:
            # `from None`: boto's text and traceback may quote a signed request.
            raise classify(
                error, self._where(key), self._bucket, answered=self._answered, must_exist=must_exist
            ) from None
        self._answered = True

    def _wait(self, again: Again, backoff: Backoff) -> None:
        if again.renew:
            self._client_of = None
        backoff.failed(again.reason, again.tries, again.advice)

    def _client(self) -> Any:
        with self._client_lock:
            if self._client_of is None or self._client_of[0] != os.getpid():
                self._client_of = (os.getpid(), _make_client(self._endpoint_url, self._policy))
            return self._client_of[1]

    def _names(self, key: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + check_key(key)}

    def _where(self, key: str) -> str:
        return f"{self.url}/{key}".rstrip("/") + self._endpoint_text


def _md5(data: bytes) -> str:
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


def _check_endpoint(endpoint_url: str | None) -> str:
    """` at host:port` for messages, without anything secret that the URL may hold."""
    if endpoint_url is None:
        return ""
    parts = urlsplit(endpoint_url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError("endpoint_url: not an http:// or https:// URL; give for example http://10.0.0.1:9000")
    if "@" in parts.netloc or parts.query:
        raise UserError("endpoint_url: holds more than a host and a port; keep credentials in AWS_* variables")
    return f" at {parts.netloc}"


def _make_client(endpoint_url: str | None, policy: RetryPolicy) -> Any:
    config = botocore.client.Config(
        retries={"total_max_attempts": 1, "mode": "standard"},
        connect_timeout=policy.connect_timeout_s,
        read_timeout=policy.read_timeout_s,
        max_pool_connections=64,
        tcp_keepalive=True,
        # CRC32 trailers and checks are refused by older services; Content-MD5 and our digests do their work.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"addressing_style": "path" if endpoint_url else "auto"},
    )
    return boto3.session.Session().client("s3", endpoint_url=endpoint_url, config=config)
