"""Store objects below s3://bucket/prefix through boto3, at AWS or at any S3-compatible service.

Guarantee: a download holds the bytes of one version of the object. After a broken body, a ranged GET with If-Match on
the ETag continues from the last good byte; if the object was replaced in the meantime, the download starts again from
byte 0. `write_new` is a PUT with If-None-Match: *, which fails if the key is taken. Each such PUT stores a random tag
in the object's metadata. If the answer is lost and the retry finds the key taken, the tag shows whether the first
attempt of this call created the object. Uploads carry Content-MD5, so the service refuses bytes that were changed in
transit.

How: boto3's own retries are off, because they do not cover bodies and would multiply with those of `retry.py`.
`failure_kinds.py` has the table of what is retried, `s3_answers.py` checks that an answer with status 200 is one of
S3 and reads its fields, and `s3_client.py` ends requests that take too long. Size and existence come from a GET of one
byte, because the answer to a HEAD does not show whether the bucket, the key or the permission is missing. Expired
credentials are read again from their source before each further attempt.

Cost: one request per object when nothing fails; `benchmarks/loader.py --s3` measures it in use.

Limits: the service must be strongly consistent and support conditional PUT (AWS since 2024, Ceph, MinIO).
"""

from __future__ import annotations

import contextlib
import io
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from electra_dist.errors import StoreAway, StoreError, StoreMissing, UserError
from electra_dist.store.atomic_files import replacing
from electra_dist.store.interface import Store, check_key, in_parallel
from electra_dist.store.retry import Backoff, RetryAccount, RetryPolicy

try:
    from electra_dist.store.s3_answers import (
        NEEDED_FIELDS,
        WRITER_TAG,
        ObjectInfo,
        check_answer,
        check_object,
        object_info,
        pages,
    )
    from electra_dist.store.s3_client import Answer, S3Client, check_endpoint, content_md5
    from electra_dist.store.s3_download import Download, Span
    from electra_dist.store.s3_errors import FAILURES, TRIES_MISSING, Again, EmptyRange, Taken, classify
except ModuleNotFoundError as error:
    if error.name not in ("boto3", "botocore", "urllib3"):
        raise
    raise UserError("s3:// needs boto3, which is not installed; pip install 'electra-dist[s3]'") from None

_MULTIPART_FROM = 64 << 20  # Files of at least this many bytes are uploaded in parts.
_PART = 16 << 20  # Least size of a part in bytes.
_MAX_PARTS = 9_000  # S3 allows 10,000.
_UPLOAD_THREADS = 4
_MOST_DELETED = 1_000  # Keys in one request that deletes several; the limit of S3.


class S3Store(Store):
    """Store of objects below s3://bucket/prefix. Thread-safe.

    It may be used after a fork: each process makes a boto3 client of its own at its first request.
    """

    def __init__(self, url: str, endpoint_url: str | None, policy: RetryPolicy) -> None:
        """Parse and check the URLs; the first request is sent when the store is used.

        Args:
            url: s3://bucket or s3://bucket/prefix.
            endpoint_url: S3-compatible service, for example http://10.0.0.1:9000; None for AWS.
            policy: Limits on the retries of this store's requests.

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
        self._endpoint_text = check_endpoint(endpoint_url)
        self._client = S3Client(endpoint_url, policy)
        self._endpoint_url = endpoint_url
        self.reread_pauses_s = policy.reread_pauses_s
        self._policy = policy
        self._account = RetryAccount(policy)
        self._deletes_several = True  # False once the service has refused a request that deletes several objects.
        self._answered = False  # Whether the service has answered any request of this store.

    def __reduce__(self) -> tuple[type[S3Store], tuple[str, str | None, RetryPolicy]]:
        """Return the class and the arguments from which another process creates this store, with counters at 0."""
        return S3Store, (self.url, self._endpoint_url, self._policy)

    @property
    def retries(self) -> int:  # type: ignore[override]
        """Return how many times this store has repeated a failed request since it was opened."""
        return self._account.retries

    @property
    def retry_wait_s(self) -> float:  # type: ignore[override]
        """Return how long this store has slept before it repeated failed requests, in seconds.

        The waits of several threads are added up.
        """
        return self._account.wait_s

    def local_path(self, key: str) -> None:
        """Check the key and return None, because an object on S3 has no local path.

        Raises:
            StoreError: The key is not a valid relative path.
        """
        check_key(key)

    def read(self, key: str, *, must_exist: bool = False) -> bytes:
        """Download all bytes of an object into memory, or raise StoreMissing.

        Args:
            key: Key of the object.
            must_exist: The caller knows that the object exists, so the answer "not found" is retried.
        """
        sink = io.BytesIO()
        self._download(key, sink, must_exist)
        return sink.getvalue()

    def read_range(self, key: str, start: int, length: int, *, must_exist: bool = False) -> memoryview:
        """Download the bytes [start, start + length) of an object into new memory; fewer if the object ends earlier.

        If there is no object, StoreMissing is raised at once; with `must_exist` after a few more tries.
        """
        sink = io.BytesIO()
        if length:
            self._download(key, sink, must_exist, Span(start=start, end=start + length))
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
        """Download an object to a local file, which appears only when it is complete and synced to the disk.

        Args:
            key: Key of the object.
            destination: Path of the local file.
            must_exist: The caller knows that the object exists, so the answer "not found" is retried.

        Raises:
            StoreMissing: There is no object with this key.
            StoreExhausted: All retries failed.
        """
        with replacing(destination) as out:
            self._download(key, out, must_exist)

    def write(self, key: str, data: bytes) -> None:
        """Create or replace an object with one PUT; the service refuses bytes that were changed on the way (MD5)."""
        self._call(key, "put_object", {**self._object(key), "ContentMD5": content_md5(data)}, data)

    def write_new(self, key: str, data: bytes) -> bool:
        """Create an object with a conditional PUT; return False if there is an object of another writer already.

        The PUT has the header If-None-Match: *, so the service refuses it if the key is taken. If the answer to a
        successful PUT is lost, the repeated PUT is refused; a random tag in the object's metadata then shows that the
        object is this call's own, and the call returns True.
        """
        tag = secrets.token_hex(16)
        put = {**self._object(key), "ContentMD5": content_md5(data), "Metadata": {WRITER_TAG: tag}, "IfNoneMatch": "*"}
        try:
            self._call(key, "put_object", put, data)
        except Taken:
            # The object may be this call's own: an earlier attempt stored it, and only its answer was lost.
            return self._probe(key).writer_tag == tag
        return True

    def upload(self, path: Path, key: str) -> None:
        """Create or replace an object with the content of a local file; readers never see a part of it.

        A file of 64 MiB or more is uploaded in parts, four at a time, each retried independently. If the process is
        killed, the parts stay on S3, where they cost storage and `list` does not show them, until
        `discard_unfinished` deletes them.
        """
        size = path.stat().st_size
        if size < _MULTIPART_FROM:
            self.write(key, path.read_bytes())
            return
        tag = secrets.token_hex(16)
        begin = {**self._object(key), "Metadata": {WRITER_TAG: tag}}
        answer = self._call(key, "create_multipart_upload", begin)
        upload = {**self._object(key), "UploadId": answer["UploadId"]}  # Names this upload in later requests.
        try:
            parts = self._upload_parts(path, size, key, upload)
            self._complete_upload(key, upload, parts, tag)
        except BaseException:
            # Delete the parts with one attempt; parts that remain cost storage, but no reader ever sees them, and
            # `discard_unfinished` deletes them later.
            with contextlib.suppress(*FAILURES, Again):
                self._client.send("abort_multipart_upload", upload)
            raise

    def list(self, prefix: str = "") -> list[str]:
        """Return the sorted keys that begin with `prefix`; costs one request for each thousand keys."""
        entries = self._list_all(
            "list_objects_v2",
            prefix,
            entries_field="Contents",
            next_fields={"ContinuationToken": "NextContinuationToken"},
            name_of=lambda entry: (entry["Key"],),
        )
        keys = [entry["Key"].removeprefix(self._prefix) for entry in entries]
        # Web consoles create an empty object for a folder, whose key ends with a slash.
        return sorted(key for key in keys if not key.endswith("/"))

    def delete(self, key: str) -> None:
        """Delete an object with one request; a key without an object is no error."""
        self._call(key, "delete_object", self._object(key))

    def delete_all(self, keys: Sequence[str]) -> None:
        """Delete several objects, up to a thousand with one request (DeleteObjects); a key without one is no error.

        A key that the service's answer does not list as deleted gets a request of its own. If the service refuses
        DeleteObjects, every key gets a request of its own, also in later calls.

        Raises:
            StoreError: an object cannot be deleted.
        """
        for start in range(0, len(keys), _MOST_DELETED):
            batch = keys[start : start + _MOST_DELETED]
            deleted_keys: set[str] = set()
            if len(batch) > 1 and self._deletes_several:
                deleted_keys = self._delete_batch(batch)
            remaining_keys = [key for key in batch if key not in deleted_keys]
            in_parallel(self.delete, remaining_keys)

    def _delete_batch(self, keys: Sequence[str]) -> set[str]:
        """Delete up to a thousand objects with one request, and return the keys that the answer lists as deleted.

        If the service refuses the request, the result is empty, and `_deletes_several` becomes False.

        Raises:
            StoreAway: The service does not respond, or all retries failed.
        """
        full_keys = {self._object(key)["Key"]: key for key in keys}
        arguments = {"Bucket": self._bucket, "Delete": {"Objects": [{"Key": key} for key in full_keys]}}
        try:
            answer = self._call("", "delete_objects", arguments)
        except StoreAway:
            raise
        except StoreError:
            self._deletes_several = False
            return set()
        return {full_keys[entry["Key"]] for entry in answer.get("Deleted", []) if entry.get("Key") in full_keys}

    def discard_unfinished(self, prefix: str, doomed: Callable[[str], bool]) -> int:
        """Delete the parts of multipart uploads that were never completed; return the number of these uploads.

        Args:
            prefix: Only uploads of keys that begin with this string are considered.
            doomed: Called with the key of each unfinished upload; its parts are deleted if it returns True. It must
                return False for a key that a living process may still be uploading.
        """
        uploads = self._list_all(
            "list_multipart_uploads",
            prefix,
            entries_field="Uploads",
            next_fields={"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"},
            name_of=lambda upload: (upload["Key"], upload["UploadId"]),
        )
        num_deleted = 0
        for upload in uploads:
            key = upload["Key"].removeprefix(self._prefix)
            if doomed(key):
                self._abort_upload(key, upload["UploadId"])
                num_deleted += 1
        return num_deleted

    def _list_all(
        self,
        operation: str,
        prefix: str,
        entries_field: str,
        next_fields: dict[str, str],
        name_of: Callable[[dict[str, Any]], tuple[str, ...]],
    ) -> Sequence[dict[str, Any]]:
        """Return all entries of a listing; a listing that does not advance begins again.

        Args:
            operation: Name of boto3's method.
            prefix: Prefix of the keys, below that of the store.
            entries_field: Field of a page that holds its entries.
            next_fields: Arguments of the request for the next page -> fields of the page that hold their values.
            name_of: Returns what distinguishes an entry from all others.

        Raises:
            StoreExhausted: The listing never ends, or all retries failed.
        """

        def request(arguments: dict[str, Any], check: Callable[[Answer], None]) -> Answer:
            """Return a page of the listing that passes the check."""
            return self._call("", operation, arguments, check=check)

        first_page = {"Bucket": self._bucket, "Prefix": self._prefix + prefix}
        backoff = self._account.begin(self._describe(""))
        while True:
            try:
                return list(pages(request, first_page, entries_field, next_fields, name_of))
            except Again as failure:
                self._wait("", failure, backoff)

    def _abort_upload(self, key: str, upload_id: str) -> None:
        """Delete the parts of an unfinished multipart upload; an upload that no longer exists is no error."""
        upload = {**self._object(key), "UploadId": upload_id}
        with contextlib.suppress(StoreMissing):  # Another process has deleted it first.
            self._call(key, "abort_multipart_upload", upload)

    def _upload_parts(self, path: Path, size: int, key: str, upload: dict[str, Any]) -> Sequence[dict[str, Any]]:
        """Upload a file in parts, several at a time; return the number and the ETag of each part, in order.

        A part has `_PART` bytes, or more if the file would otherwise have more than `_MAX_PARTS` parts.

        Args:
            path: The file to upload.
            size: Its size in bytes.
            key: Key of the object, for messages.
            upload: Arguments that name the multipart upload in a request: bucket, key and upload id.
        """
        part_size = max(_PART, _ceil_div(size, _MAX_PARTS))
        num_parts = _ceil_div(size, part_size)

        def upload_part(number: int) -> dict[str, Any]:
            """Upload part `number`, counted from 1; return its number and ETag as `_complete_upload` needs them."""
            with path.open("rb") as stream:
                stream.seek((number - 1) * part_size)
                data = stream.read(part_size)
            put = {**upload, "PartNumber": number, "ContentMD5": content_md5(data)}
            answer = self._call(key, "upload_part", put, data)
            return {"PartNumber": number, "ETag": answer["ETag"]}

        with ThreadPoolExecutor(_UPLOAD_THREADS) as pool:
            return list(pool.map(upload_part, range(1, num_parts + 1)))

    def _complete_upload(self, key: str, upload: dict[str, Any], parts: Sequence[dict[str, Any]], tag: str) -> None:
        """Complete a multipart upload: S3 combines its parts into one object, which becomes visible under `key`.

        Args:
            key: Key of the object, for messages.
            upload: Arguments that name the multipart upload in a request: bucket, key and upload id.
            parts: Number and ETag of each part.
            tag: Random tag that this upload stores in the object's metadata. If the service answers "no such upload",
                the tag shows whether an earlier attempt, whose answer was lost, has completed the upload.

        Raises:
            StoreMissing: The upload no longer exists and was not completed; another process has discarded it.
        """
        complete = {**upload, "MultipartUpload": {"Parts": parts}}
        try:
            self._call(key, "complete_multipart_upload", complete)
        except StoreMissing:
            # "No such upload": an earlier attempt may have completed it, and only its answer was lost.
            if self._probe(key).writer_tag != tag:
                raise

    def _probe(self, key: str) -> ObjectInfo:
        """Return the size of an object and the random tag that its writer stored in the metadata.

        This costs a GET of one byte. A HEAD request is not used, because its answer does not show whether the bucket,
        the key or the permission is missing.

        Raises:
            StoreMissing: There is no such object.
        """
        get = self._object(key)
        try:
            answer = self._call(
                key, "get_object", {**get, "Range": "bytes=0-0"}, check=lambda answer: check_object(answer, key)
            )
        except EmptyRange:
            # An empty object has no byte 0; without a range its GET succeeds.
            answer = self._call(key, "get_object", get, check=lambda answer: check_object(answer, key))
        answer["Body"].close()
        return object_info(answer)

    def _download(self, key: str, sink: IO[bytes], must_exist: bool, span: Span | None = None) -> None:
        """Download an object, or a span of its bytes, to a file; after a fault, continue from the last good byte.

        Args:
            key: Key of the object.
            sink: Empty, seekable file.
            must_exist: The object is known to exist, so the answer "not found" is retried.
            span: The range of bytes to download; None for all of the object.

        Raises:
            StoreMissing: There is no such object.
            StoreExhausted: All retries failed.
        """
        backoff = self._account.begin(self._describe(key))
        download = Download(key, sink, self._policy, backoff.progress, span)
        while not download.complete:
            try:
                with self._classified(key, must_exist):
                    answer = self._client.send("get_object", {**self._object(key), **download.conditions()})
                    download.receive(answer)
            except EmptyRange:
                if download.ends_before_span:
                    break
                _begin_again(download, backoff)
            except Taken:  # Another version of the object.
                _begin_again(download, backoff)
            except Again as failure:
                self._wait(key, failure, backoff)
        self._account.succeeded()

    def _call(
        self,
        key: str,
        operation: str,
        arguments: Mapping[str, Any],
        body: bytes | None = None,
        check: Callable[[Answer], None] = lambda answer: None,
    ) -> Answer:
        """Send a request until it succeeds or fails for good, and return the answer.

        A failure is repeated if `classify` returns Again for it, until a limit of the RetryPolicy is reached.

        Args:
            key: Key of the object, for messages; "" for the store itself.
            operation: Name of boto3's method, for example "put_object".
            arguments: Its arguments, without the body.
            body: Bytes to upload; None if the operation has none.
            check: Receives the answer, and raises Again if the request must be repeated.

        Raises:
            StoreError: The failure is final, or all retries failed (StoreExhausted).
            Taken: The service refused a conditional request (HTTP 412).
            EmptyRange: The service has no byte in the range that was asked for (HTTP 416).
        """
        backoff = self._account.begin(self._describe(key))
        while True:
            try:
                with self._classified(key):
                    answer = self._client.send(operation, arguments, body)
                    check_answer(answer, NEEDED_FIELDS.get(operation, ()))
                    check(answer)
            except Again as failure:
                self._wait(key, failure, backoff)
            else:
                self._account.succeeded()
                return answer

    @contextlib.contextmanager
    def _classified(self, key: str, must_exist: bool = False) -> Iterator[None]:
        """Convert an exception of boto3 in the `with` block to the one that `classify` returns for it.

        That is Again (repeat the request), Taken, EmptyRange, or a StoreError for the user. A block that succeeds is
        recorded in `_answered`.

        Args:
            key: Key of the object, for messages; "" for the store itself.
            must_exist: The object is known to exist, so the answer "not found" is to be repeated.
        """
        try:
            yield
        except FAILURES as error:
            failure = classify(
                error,
                where=self._describe(key),
                bucket=self._bucket,
                answered=self._answered,
                must_exist=must_exist,
            )
            raise failure from None  # The text and traceback of boto3 may quote a signed request.
        self._answered = True

    def _wait(self, key: str, failure: Again, backoff: Backoff) -> None:
        """Sleep before the next attempt of a failed request.

        If `failure.renew` is set, the next attempt reads the credentials again.

        Raises:
            StoreMissing: The service has answered `TRIES_MISSING` times that the object does not exist.
            StoreExhausted: A limit of the RetryPolicy is reached.
        """
        if failure.renew:
            self._client.renew()
        if failure.unanswered:
            backoff.announce(failure.reason, failure.advice)
        if failure.missing and backoff.failures_of(failure.reason) + 1 >= TRIES_MISSING:
            raise StoreMissing(f"{self._describe(key)}: {failure.reason}, {TRIES_MISSING} times; {failure.advice}")
        backoff.wait_after_failure(failure.reason, failure.advice)

    def _object(self, key: str) -> dict[str, str]:
        """Return the arguments of a boto3 request that name an object: its bucket and its full key.

        Raises:
            StoreError: The key is not a valid relative path.
        """
        return {"Bucket": self._bucket, "Key": self._prefix + check_key(key)}

    def _describe(self, key: str) -> str:
        """Return the URL of an object for messages, for example "s3://b/x at 10.0.0.1:9000".

        The endpoint (" at HOST:PORT") is left out for AWS.

        Args:
            key: Key of the object; "" for the store itself.
        """
        return f"{self.url}/{key}".rstrip("/") + self._endpoint_text


def _begin_again(download: Download, backoff: Backoff) -> None:
    """Discard what was received of an object that was replaced during its download, and wait before the next GET.

    The replacement counts as a failure; too many of them raise StoreExhausted.
    """
    download.restart()
    backoff.wait_after_failure("the object was replaced during the download")


def _ceil_div(number: int, divisor: int) -> int:
    """Return number / divisor, rounded up, for integers of any size."""
    return -(-number // divisor)  # `//` rounds down, so the negative of the negative quotient is rounded up.
