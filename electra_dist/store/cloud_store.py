"""Store objects below az://container/prefix or gs://bucket/prefix through obstore.

Guarantee: a download holds the bytes of one version of the object: all ranges after the first one are read with
If-Match on its ETag, and if the object was replaced in the meantime, the download starts again from byte 0.
`write_new` creates an object only if the key is free. It stores a random tag in the object's metadata; if the answer
is lost and the retry finds the key taken, the tag shows whether the first attempt of this call created the object. A
large file is uploaded in parts, and the object appears when the service has combined all of them.

How: obstore's own retries are off, because the store waits by `patience.py`. `failure_kinds.py` and the table below
say what an error means. Of its text, only code and HTTP status are used, because it may quote a signed URL.

Limits: obstore's threads do not survive a fork, so that a forked process cannot use a store after its parent has; it
is refused in one line. Parts of an upload that was killed cannot be listed: Azure deletes them after a week, Google
Cloud by a lifecycle rule of the bucket (AbortIncompleteMultipartUpload).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

from typing_extensions import override

from electra_dist.errors import StoreError, StoreMissing, UserError, missing_packages
from electra_dist.store.failure_kinds import (
    CHECK_SERVICE,
    NOT_FOUND,
    Failure,
    FailureKind,
    away,
    s3_failure,
    safe_code,
    transient,
)
from electra_dist.store.interface import RemoteStore, check_key, in_parallel
from electra_dist.store.patience import LEAST_BYTES_PER_S, Outage, Patience

Result = TypeVar("Result")

PART_BYTES = 8 << 20  # of a download and of an upload in parts
_MULTIPART_FROM = 64 << 20  # Objects of at least this many bytes are uploaded in parts.
_UPLOAD_THREADS = 4
_WRITER_TAG = "writer"  # Metadata key of the random tag that identifies the writer of an object.
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([^<]*)</Code>")
_LIST_PAGE = 1_000

_MISSING_CODES = {"", "BlobNotFound", "NoSuchKey", "ResourceNotFound"}  # "": an answer without a code
_SET_CREDENTIALS = {
    "az://": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, another credential that obstore reads "
    "from the environment, or give the node an identity",
    "gs://": "set GOOGLE_APPLICATION_CREDENTIALS, or give the node a service account",
}
_NO_CONTAINER = Failure(
    kind=FailureKind.USER, reason="no such container or bucket", advice="create it, or correct the URL"
)
_REFUSED = Failure(
    kind=FailureKind.USER,
    reason="access refused",
    advice="give these credentials the right to read and write this URL",
)
_NOT_ACCEPTED = Failure(
    kind=FailureKind.USER,
    reason="no credentials, or credentials that are not accepted",
    advice="{credentials}",
    kind_after_success=FailureKind.AWAY,
)
_UNREACHED = away("the service cannot be reached", "check the endpoint URL and the network")
_BROKEN = transient("broken connection or answer", CHECK_SERVICE)
_REPLACED = transient("the object was replaced during the download", CHECK_SERVICE)
# Error codes of Azure and of Google Cloud that S3 does not have -> what they mean; others mean the same as in S3.
_CODES = {
    "ContainerNotFound": _NO_CONTAINER,
    "NoSuchBucket": _NO_CONTAINER,
    "AuthenticationFailed": _NOT_ACCEPTED,
    "AuthorizationFailure": _NOT_ACCEPTED,
    "InvalidAuthenticationInfo": _NOT_ACCEPTED,
    "NoAuthenticationInformation": _NOT_ACCEPTED,
    "SignatureDoesNotMatch": _NOT_ACCEPTED,
    "AuthorizationPermissionMismatch": _REFUSED,
    "InsufficientAccountPermissions": _REFUSED,
    "PublicAccessNotPermitted": _REFUSED,
    "AccountIsDisabled": s3_failure("AccountDisabled", 403),
    "BlobArchived": s3_failure("InvalidObjectState", 409),
    "BlobBeingRehydrated": s3_failure("RestoreAlreadyInProgress", 409),
    "BlobImmutableDueToPolicy": s3_failure("ObjectUnderActiveHold", 409),
}


# Parts of the texts of obstore's errors that hold neither code nor status, in lower case -> what they mean.
_TEXTS_WITHOUT_ANSWER = {
    "error sending request": _UNREACHED,
    "token request": _UNREACHED,
    "must be specified": _NOT_ACCEPTED,
    "not provided": _NOT_ACCEPTED,
}
_CLASSES_WITHOUT_CREDENTIALS = (
    "PermissionDeniedError",
    "UnauthenticatedError",
    "UnknownConfigurationKeyError",
    "ValueError",
)


class _RangeAnswer(NamedTuple):
    """Bytes of a range of an object, and the size and version of the whole object."""

    data: bytes
    object_bytes: int
    etag: str | None


class CloudStore(RemoteStore):
    """Store of objects below az://container/prefix or gs://bucket/prefix. Thread-safe."""

    _lock = threading.Lock()
    _process: int | None = None  # id of the process that has used obstore first

    def __init__(self, url: str, endpoint_url: str | None, patience: Patience) -> None:
        """Check the URL; the first request is sent when the store is used.

        `endpoint_url` names another service than Azure's or Google's own (None), such as
        http://127.0.0.1:10000/devstoreaccount1; for Azure, it holds the account.
        """
        self._scheme = url[:5]
        bucket, _, prefix = url.removeprefix(self._scheme).partition("/")
        if not bucket or "@" in bucket or ":" in bucket:
            raise UserError(
                f"{self._scheme}...: not a container or bucket; give {self._scheme}NAME/PREFIX, without credentials"
            )
        self._bucket = bucket
        self._prefix = prefix.strip("/")
        if self._prefix:
            check_key(self._prefix)
        super().__init__(f"{self._scheme}{bucket}/{self._prefix}".rstrip("/"), endpoint_url, patience)
        self._client: Any = None
        self._answered = False  # Whether any request has succeeded.

    @override
    def size(self, key: str) -> int:
        return int(self._call(key, lambda client: _obstore().head(client, check_key(key)))["size"])

    @override
    def write(self, key: str, data: bytes) -> None:
        self._call(key, lambda client: _obstore().put(client, check_key(key), data, use_multipart=False))

    @override
    def write_new(self, key: str, data: bytes) -> bool:
        tag = secrets.token_hex(16)

        def create(client: Any) -> bool:
            obstore = _obstore()
            try:
                obstore.put(
                    client, check_key(key), data, mode="create", attributes={_WRITER_TAG: tag}, use_multipart=False
                )
            except (obstore.exceptions.AlreadyExistsError, obstore.exceptions.PreconditionError):
                # The object may be this call's own: an earlier attempt stored it, and only its answer was lost.
                return bool(obstore.get(client, key).attributes.get(_WRITER_TAG) == tag)
            return True

        return self._call(key, create)

    @override
    def upload(self, path: Path, key: str) -> None:
        """Upload a file, in parts if it has 64 MiB or more."""
        if path.stat().st_size < _MULTIPART_FROM:
            self.write(key, path.read_bytes())
        else:
            self._call(key, lambda client: _put_parts(client, check_key(key), path))

    @override
    def write_pieces(self, key: str, pieces: Sequence[bytes | memoryview]) -> None:
        """Upload the pieces as one object, in parts straight from memory if they have 64 MiB or more."""
        if sum(len(piece) for piece in pieces) < _MULTIPART_FROM:
            self.write(key, b"".join(pieces))
        else:
            self._call(key, lambda client: _put_parts(client, check_key(key), _slices(pieces)))

    @override
    def sizes(self, prefix: str = "") -> dict[str, int]:
        folder = prefix.rpartition("/")[0]  # obstore lists whole folders only

        def list_all(client: Any) -> dict[str, int]:
            pages = _obstore().list(client, prefix=folder or None, chunk_size=_LIST_PAGE)
            return {entry["path"]: entry["size"] for page in pages for entry in page}

        found = self._call("", list_all)
        return {key: found[key] for key in sorted(found) if key.startswith(prefix)}

    @override
    def delete(self, key: str) -> None:
        def delete(client: Any) -> None:
            with contextlib.suppress(FileNotFoundError):
                _obstore().delete(client, check_key(key))

        self._call(key, delete)

    @override
    def delete_all(self, keys: Sequence[str]) -> None:
        in_parallel(self.delete, keys)

    @override
    def discard_unfinished(self, prefix: str, doomed: Callable[[str], bool]) -> int:
        """Return 0: the parts of unfinished uploads cannot be listed."""
        return 0

    @override
    def download(self, key: str, sink: IO[bytes], *, must_exist: bool, start: int = 0, end: int | None = None) -> None:
        """Write an object, or its bytes [start, end), to `sink`, in requests of up to 8 MiB.

        If the object is replaced meanwhile, the download begins again with the new version.
        """
        check_key(key)
        furthest = 0
        etag = None
        with self.patience.outage() as outage:
            while True:
                first = start + sink.tell()
                last = first + PART_BYTES if end is None else min(first + PART_BYTES, end)
                try:
                    answer = self._get_range(key, first, last, etag)
                except Exception as error:  # noqa: BLE001  (what it means is looked up)
                    if etag is None and _is_beyond_the_end(error):
                        return
                    if etag is not None and _is_replaced(error):
                        etag = None
                        sink.seek(0)
                        sink.truncate()
                    self._wait_or_raise(key, error, outage, must_exist=must_exist)
                    continue
                self._answered = True
                etag = answer.etag
                sink.write(answer.data)
                if sink.tell() > furthest:
                    outage.progress(sink.tell() - furthest)
                    furthest = sink.tell()
                stop = answer.object_bytes if end is None else min(end, answer.object_bytes)
                if start + sink.tell() >= stop:
                    return

    def _get_range(self, key: str, first: int, last: int, etag: str | None) -> _RangeAnswer:
        """Read the bytes [first, last) of an object, or those up to its end, by one request.

        With an `etag`, obstore raises an error if the object has another version. Raises _EndedEarly if bytes are
        missing.
        """
        options: dict[str, Any] = {"range": (first, last)}
        if etag is not None:
            options["if_match"] = etag
        answer = _obstore().get(self._connect(), key, options=options)
        data = answer.bytes()
        size = int(answer.meta["size"])
        if len(data) != min(last, size) - first:
            raise _EndedEarly
        return _RangeAnswer(data, size, answer.meta["e_tag"])

    def _call(self, key: str, operation: Callable[[Any], Result]) -> Result:
        """Call an operation with obstore's client until it succeeds or fails for good; return its result.

        `key` names the object in messages.
        """
        with self.patience.outage() as outage:
            while True:
                try:
                    result = operation(self._connect())
                except Exception as error:  # noqa: BLE001  (what it means is looked up)
                    self._wait_or_raise(key, error, outage, must_exist=False)
                else:
                    self._answered = True
                    return result

    def _wait_or_raise(self, key: str, error: Exception, outage: Outage, *, must_exist: bool) -> None:
        """Pause before another try of what raised `error`; raise a StoreError of one line if none may succeed."""
        if isinstance(error, UserError):
            raise error
        where = f"{self.url}/{key}".rstrip("/")
        failure = _failure(error)
        if failure == NOT_FOUND and not must_exist:
            raise StoreMissing(f"{where}: no such object; check the URL, or build or restore the object") from None
        advice = failure.advice.format(credentials=_SET_CREDENTIALS[self._scheme])
        kind = failure.kind_for(answered=self._answered)
        if kind not in (FailureKind.TRANSIENT, FailureKind.AWAY):
            raise StoreError(f"{where}: {failure.reason}; {advice}") from None
        outage.wait_after_failure(where, dataclasses.replace(failure, kind=kind, advice=advice))

    def _connect(self) -> Any:
        """Return obstore's client of the container; refuse a process forked from one that has used obstore."""
        with CloudStore._lock:
            if CloudStore._process not in (None, os.getpid()):
                raise StoreError(
                    f"{self.url}: cannot be used in a process that was forked from one that has used such a URL; run "
                    f"this with one process, or through S3"
                )
            CloudStore._process = os.getpid()
            if self._client is None:
                self._client = self._new_client()
            return self._client

    def _new_client(self) -> Any:
        """Return obstore's client of this container or bucket, which does not retry: this class does."""
        _obstore(self.url)
        from obstore.store import AzureStore, GCSStore

        pace = self.patience.pace
        endpoint = self._endpoint_url
        options: dict[str, Any] = {
            "prefix": self._prefix or None,
            "retry_config": {"max_retries": 0},
            "client_options": {
                "allow_http": endpoint is not None and endpoint.startswith("http://"),
                "connect_timeout": timedelta(seconds=pace.connect_timeout_s),
                "timeout": timedelta(seconds=pace.rate_window_s + PART_BYTES / LEAST_BYTES_PER_S),
            },
        }
        if self._scheme == "az://":
            if endpoint:
                options["endpoint"] = endpoint
            return AzureStore(self._bucket, **options)
        if endpoint:
            options["base_url"] = endpoint
        return GCSStore(self._bucket, **options)


class _EndedEarly(Exception):
    """Error for a body that has fewer bytes than its range."""


def _obstore(url: str = "") -> Any:
    """Import and return obstore, which is an optional dependency; the error without it begins with `url`."""
    try:
        import obstore
        import obstore.exceptions
    except ImportError:
        raise missing_packages(url, "clouds") from None
    return obstore


def _put_parts(client: Any, key: str, content: Path | Iterator[bytes]) -> None:
    _obstore().put(client, key, content, use_multipart=True, chunk_size=PART_BYTES, max_concurrency=_UPLOAD_THREADS)


def _slices(pieces: Sequence[bytes | memoryview]) -> Iterator[bytes]:
    """Yield the bytes of all pieces in slices of at most 8 MiB, so that no large piece is copied as a whole."""
    for piece in pieces:
        for start in range(0, len(piece), PART_BYTES):
            yield bytes(piece[start : start + PART_BYTES])


def _failure(error: Exception) -> Failure:
    """Look up what an exception of obstore means: by the code in its text, else by its status, else by its class."""
    text = str(error)
    found_code = _CODE.search(text)
    code = found_code[1] if found_code else ""
    if code in _CODES:
        return _CODES[code]
    if isinstance(error, FileNotFoundError) and code in _MISSING_CODES:
        return NOT_FOUND
    if _is_replaced(error):
        return _REPLACED
    status = _STATUS.search(text)
    if status:
        # A status, with or without a code, means the same as in an answer of S3.
        words = {"code": safe_code(code), "status": int(status[1]), "bucket": ""}
        found = s3_failure(safe_code(code), int(status[1]))
        return dataclasses.replace(found, reason=found.reason.format(**words), advice=found.advice.format(**words))
    # Without an answer of the service, no request was sent, or it has failed on the way.
    if type(error).__name__ in _CLASSES_WITHOUT_CREDENTIALS:
        return _NOT_ACCEPTED
    for part, failure in _TEXTS_WITHOUT_ANSWER.items():
        if part in text.lower():
            return failure
    return _BROKEN  # an _EndedEarly, too


def _is_replaced(error: Exception) -> bool:
    return type(error).__name__ == "PreconditionError"


def _is_beyond_the_end(error: Exception) -> bool:
    """Return whether an error says that an object is empty or ends before a range."""
    text = str(error)
    return "StartTooLarge" in text or "<Code>InvalidRange</Code>" in text or "status code: 416" in text
