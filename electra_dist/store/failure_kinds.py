"""Decide what follows from a failure of storage: another try, a wait, the end of the run, or an error for the user.

Guarantee: this file has the only table of storage failures. Every caller that must decide about one asks the functions
below, so that equal failures have equal consequences wherever they are met.

How: one row for each error number of the operating system, for each error code of an S3 service, and for each
exception of boto3. An error number without a row is permanent. The code of an S3 answer decides before its HTTP
status, because services use one status, above all 403, for a full quota, a rate limit, an archived object and a
missing right. A code without a row is judged by a word in it (`S3_CODE_WORDS`), then by its status: transient from 500
on, below that a mistake of the user. An answer without a code comes from a proxy or a firewall, not from S3.

Limits: an operating system reports a network file system that went away in many ways, and a hard mount (NFS) reports
nothing: its calls block until the server is back, which no table can shorten. A service that says only in the text of
its answer that a quota is full (Backblaze B2: 403 AccessDenied) is taken for one that refuses access.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from electra_dist.errors import StoreAway, UserError


class FailureKind(Enum):
    """What the caller should do after a storage failure: try again, wait, give up or tell the user."""

    TRANSIENT = "transient"  # another try at once, or after a short pause, is likely to succeed
    AWAY = "away"  # full, read-only or not responding: it may come back within minutes, so waiting is worth it
    PERMANENT = "permanent"  # neither a retry nor a wait helps, and no mistake of the user is known
    USER = "user"  # the user must correct a path, a permission, a limit or a configuration


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Meaning of one storage error: what the caller should do, and the two halves of the message to the user."""

    kind: FailureKind
    reason: str  # what is wrong, in a few words without the path
    advice: str  # the user's next step, as an imperative
    kind_after_success: FailureKind | None = None  # kind if the service has answered before; None: as `kind`
    renew_credentials: bool = False  # whether the next try must read the credentials from their source again

    def kind_for(self, *, answered: bool) -> FailureKind:
        """Return whether to retry, wait or stop after a failed S3 request.

        `answered` says whether the service has answered this store before. If so, wrong credentials or a wrong clock
        will probably be corrected soon. If not, they are a mistake of the user.
        """
        if answered and self.kind_after_success is not None:
            return self.kind_after_success
        return self.kind


_FREE_SPACE = "free space there, or choose another path"
_CHECK_SHARE = "check the mount and its server"
_CHECK_DISK = "check the disk"

# Error number of the operating system -> what it means for a file that a run reads or writes.
OS_FAILURES: Mapping[int, Failure] = {
    # Another try is likely to succeed.
    errno.EINTR: Failure(kind=FailureKind.TRANSIENT, reason="interrupted", advice="start again"),
    errno.EAGAIN: Failure(kind=FailureKind.TRANSIENT, reason="busy", advice="start again"),
    # Full.
    errno.ENOSPC: Failure(kind=FailureKind.AWAY, reason="disk full", advice=_FREE_SPACE),
    errno.EDQUOT: Failure(kind=FailureKind.AWAY, reason="disk full (quota)", advice=_FREE_SPACE),
    errno.ENOMEM: Failure(kind=FailureKind.AWAY, reason="no memory left", advice="end other processes of this node"),
    errno.ENFILE: Failure(
        kind=FailureKind.AWAY, reason="too many open files on this node", advice="raise the limit fs.file-max"
    ),
    # Read-only: what a kernel does to a file system with errors, and a server during a fail-over.
    errno.EROFS: Failure(
        kind=FailureKind.AWAY, reason="read-only file system", advice="mount it for writing, or choose another path"
    ),
    # Not responding.
    errno.EIO: Failure(kind=FailureKind.AWAY, reason="input/output error", advice=_CHECK_DISK),
    errno.EREMOTEIO: Failure(kind=FailureKind.AWAY, reason="remote input/output error", advice=_CHECK_SHARE),
    errno.ESTALE: Failure(kind=FailureKind.AWAY, reason="stale file handle of a network share", advice=_CHECK_SHARE),
    errno.ETIMEDOUT: Failure(kind=FailureKind.AWAY, reason="no answer in time", advice=_CHECK_SHARE),
    errno.EHOSTDOWN: Failure(kind=FailureKind.AWAY, reason="the server is down", advice=_CHECK_SHARE),
    errno.EHOSTUNREACH: Failure(kind=FailureKind.AWAY, reason="the server cannot be reached", advice=_CHECK_SHARE),
    errno.ENETDOWN: Failure(kind=FailureKind.AWAY, reason="the network is down", advice=_CHECK_SHARE),
    errno.ENETUNREACH: Failure(kind=FailureKind.AWAY, reason="the network cannot be reached", advice=_CHECK_SHARE),
    errno.ENETRESET: Failure(kind=FailureKind.AWAY, reason="the network dropped the connection", advice=_CHECK_SHARE),
    errno.ECONNREFUSED: Failure(kind=FailureKind.AWAY, reason="the server refuses connections", advice=_CHECK_SHARE),
    errno.ECONNRESET: Failure(kind=FailureKind.AWAY, reason="the server closed the connection", advice=_CHECK_SHARE),
    errno.ECONNABORTED: Failure(kind=FailureKind.AWAY, reason="the connection was aborted", advice=_CHECK_SHARE),
    errno.ENOTCONN: Failure(kind=FailureKind.AWAY, reason="the share is not connected", advice=_CHECK_SHARE),
    errno.ESHUTDOWN: Failure(kind=FailureKind.AWAY, reason="the share was shut down", advice=_CHECK_SHARE),
    errno.EPIPE: Failure(kind=FailureKind.AWAY, reason="the connection is broken", advice=_CHECK_SHARE),
    errno.ENODEV: Failure(kind=FailureKind.AWAY, reason="the device is gone", advice=_CHECK_DISK),
    errno.ENXIO: Failure(kind=FailureKind.AWAY, reason="the device is gone", advice=_CHECK_DISK),
    errno.ENOMEDIUM: Failure(kind=FailureKind.AWAY, reason="the device is gone", advice=_CHECK_DISK),
    errno.EBUSY: Failure(kind=FailureKind.AWAY, reason="in use by another process", advice=_CHECK_SHARE),
    errno.ENOLCK: Failure(kind=FailureKind.AWAY, reason="no lock to be had", advice="check the share's lock service"),
    # The user's.
    errno.ENOENT: Failure(kind=FailureKind.USER, reason="no such file or folder", advice="check the path"),
    errno.ENOTDIR: Failure(kind=FailureKind.USER, reason="is not a folder", advice="choose another path"),
    errno.EISDIR: Failure(kind=FailureKind.USER, reason="is a folder, not a file", advice="give the path of a file"),
    errno.EACCES: Failure(kind=FailureKind.USER, reason="permission denied", advice="give this user the right to it"),
    errno.EPERM: Failure(kind=FailureKind.USER, reason="operation not permitted", advice="choose another path"),
    errno.ENAMETOOLONG: Failure(kind=FailureKind.USER, reason="name too long", advice="choose a shorter path"),
    errno.ELOOP: Failure(kind=FailureKind.USER, reason="symbolic links form a loop", advice="remove the loop"),
    errno.EFBIG: Failure(kind=FailureKind.USER, reason="file too large", advice="raise the limit with `ulimit -f`"),
    errno.EMFILE: Failure(
        kind=FailureKind.USER, reason="too many open files", advice="raise the limit with `ulimit -n`"
    ),
}


_CHECK_SERVICE = "check the object and the storage service, then start again"
_RENEW = "renew them, then start again"
_SET_CREDENTIALS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or give the node a role"
_CORRECT_ENDPOINT = "check the endpoint URL and the network"
_CHECK_PROXY = "check the endpoint URL, and the proxies and load balancers on the way to the service"

_BUSY = Failure(kind=FailureKind.TRANSIENT, reason="{status} {code}", advice=_CHECK_SERVICE)
_EXPIRED = Failure(kind=FailureKind.AWAY, reason="the credentials have expired", advice=_RENEW, renew_credentials=True)
_NOT_ACCEPTED = Failure(
    kind=FailureKind.USER,
    kind_after_success=FailureKind.AWAY,
    reason="credentials not accepted ({code})",
    advice="correct AWS_* in the environment or the profile in ~/.aws",
    renew_credentials=True,
)
_REFUSED = Failure(
    kind=FailureKind.USER,
    reason="access refused",
    advice="give these credentials the right to read and write this URL",
)
_NO_BUCKET = Failure(
    kind=FailureKind.USER, reason="no such bucket", advice="create bucket {bucket} or correct the URL"
)
_OTHER_REGION = Failure(
    kind=FailureKind.USER,
    reason="the bucket is in another region",
    advice="set AWS_REGION to the bucket's region, or correct the endpoint URL",
)
_REDIRECTED = Failure(
    kind=FailureKind.TRANSIENT, reason="redirected to another address ({status})", advice=_CHECK_PROXY
)
_CLOCK = Failure(
    kind=FailureKind.USER,
    kind_after_success=FailureKind.AWAY,  # A clock that jumped is set right by the time service.
    reason="this machine's clock is wrong",
    advice="set it (chrony, ntpd), then start again",
)
_FULL = Failure(
    kind=FailureKind.AWAY,
    reason="the storage is full or over its quota ({code})",
    advice="free space there, or have the quota raised",
)
_ACCOUNT = Failure(
    kind=FailureKind.USER,
    reason="the account of these credentials is suspended or has a problem ({code})",
    advice="settle it with the provider of the service",
)
_ARCHIVED = Failure(
    kind=FailureKind.USER,
    reason="the object is in cold storage ({code})",
    advice="restore it to a class that can be read (`aws s3api restore-object`), then start again",
)
_RESTORING = Failure(
    kind=FailureKind.AWAY, reason="the object is being restored from cold storage", advice="wait for the restore"
)
_KEPT = Failure(
    kind=FailureKind.USER,
    reason="the object may not be changed or deleted yet ({code})",
    advice="use a bucket without a retention rule or a hold",
)
_NO_KEY = Failure(
    kind=FailureKind.USER,
    reason="the encryption key of the object or of bucket {bucket} cannot be used ({code})",
    advice="check the key, and the right of these credentials to use it",
)
_TOO_LARGE = Failure(
    kind=FailureKind.USER,
    reason="an upload of this size is refused ({status})",
    advice="raise the limit of the proxy or load balancer in front of the service",
)
_NOT_OF_S3 = Failure(
    kind=FailureKind.USER,
    kind_after_success=FailureKind.AWAY,  # A proxy or a firewall that let earlier requests pass.
    reason="an answer {status} without an error code of S3",
    advice=f"{_CHECK_PROXY}, and whether these credentials have the right to this URL",
)
_NO_OPERATION = Failure(
    kind=FailureKind.USER,
    reason="the service lacks an operation that is needed (conditional PUT?)",
    advice="use a service that has it, such as AWS, Ceph or MinIO in a current version",
)
_NO_CREDENTIALS = Failure(
    kind=FailureKind.USER,
    kind_after_success=FailureKind.AWAY,  # Their source may be unreachable for a moment.
    reason="no credentials",
    advice=_SET_CREDENTIALS,
    renew_credentials=True,
)
_UNREACHED = Failure(kind=FailureKind.AWAY, reason="the service cannot be reached", advice=_CORRECT_ENDPOINT)
_BROKEN = Failure(kind=FailureKind.TRANSIENT, reason="broken connection or answer ({code})", advice=_CHECK_SERVICE)
_NO_BUNDLE = Failure(
    kind=FailureKind.USER,
    reason="the file of accepted certificate authorities cannot be read",
    advice="correct AWS_CA_BUNDLE, or remove it",
)

_UNKNOWN_CODE = "unknown code"

# Error codes with which an S3 service reports that an object or an upload does not exist.
S3_MISSING = frozenset({"NoSuchKey", "NoSuchUpload", "NoSuchVersion"})

_ROWS_OF_S3_CODES: tuple[tuple[Failure, str], ...] = (
    (_EXPIRED, "ExpiredToken ExpiredTokenException TokenRefreshRequired RequestExpired"),
    (_NOT_ACCEPTED, "InvalidAccessKeyId SignatureDoesNotMatch InvalidToken UnrecognizedClientException"),
    (_NOT_ACCEPTED, "InvalidClientTokenId InvalidIdentityToken InvalidSecurity Unauthorized AuthenticationRequired"),
    (_CLOCK, "RequestTimeTooSkewed RequestInTheFuture ExpiredRequest"),
    (_REFUSED, "AccessDenied AccessForbidden Forbidden"),
    (_ACCOUNT, "AccountProblem AllAccessDisabled NotSignedUp AccountDisabled UserProjectAccountProblem"),
    (_ACCOUNT, "UserSuspended UserDisable"),  # Ceph; Alibaba
    # Ceph and many others; NooBaa; MinIO; Google; Huawei.
    (_FULL, "QuotaExceeded ObjectQuotaExceeded XMinioStorageFull XMinioAdminBucketQuotaExceeded"),
    (_FULL, "InsufficientQuota InsufficientStorage InsufficientStorageSpace"),
    # No upload is as large as S3 allows (5 GiB); OpenStack Swift answers so if a quota is full.
    (_FULL, "EntityTooLarge"),
    (_ARCHIVED, "InvalidObjectState ObjectNotInActiveTierError"),
    (_RESTORING, "RestoreAlreadyInProgress"),
    (_KEPT, "ObjectUnderActiveHold RetentionPolicyNotMet"),
    (_NO_BUCKET, "NoSuchBucket"),
    (_OTHER_REGION, "PermanentRedirect AuthorizationHeaderMalformed IllegalLocationConstraintException"),
    (_OTHER_REGION, "InvalidRegion IncorrectEndpoint"),
    (_REDIRECTED, "TemporaryRedirect Redirect"),
    (_NO_OPERATION, "NotImplemented XNotImplemented MethodNotAllowed"),
    (_BUSY, "SlowDown SlowDownRead SlowDownWrite ServiceUnavailable InternalError Busy TooMuchConcurrency"),
    (_BUSY, "RequestTimeout RequestTimeoutException RequestTimedOut PriorRequestNotComplete RequestThrottled"),
    (_BUSY, "LimitExceededException ProvisionedThroughputExceededException TransactionInProgressException"),
    (_BUSY, "BadDigest IncompleteBody XAmzContentSHA256Mismatch CrcMismatch ClientDisconnect UploadBrokenConnection"),
    (_BUSY, "ConditionalRequestConflict OperationAborted IDPCommunicationError"),
    (_BUSY, "KMS.KMSInternalException KMSInternalException DependencyTimeoutException"),
)

# Error code in the answer of an S3 service -> what it means. Its texts may name {code}, {status} and {bucket}.
S3_CODES: Mapping[str, Failure] = {code: row for row, codes in _ROWS_OF_S3_CODES for code in codes.split()}

# Word in an error code that has no row -> what it means. Services name their own quotas, rates and keys.
S3_CODE_WORDS: tuple[tuple[re.Pattern[str], Failure], ...] = (
    (re.compile("ratelimit|throttl|toomanyrequests|(request|qps|bandwidth)s?limit", re.IGNORECASE), _BUSY),
    (re.compile("quota|storage(full|cap|limit)|insufficient(storage|capacity)|diskfull", re.IGNORECASE), _FULL),
    (re.compile("kms", re.IGNORECASE), _NO_KEY),
)

# HTTP status of an answer whose error code says nothing -> what it means.
HTTP_STATUSES: Mapping[int, Failure] = {
    301: _OTHER_REGION,
    302: _REDIRECTED,
    303: _REDIRECTED,
    307: _REDIRECTED,
    308: _REDIRECTED,
    401: _NOT_ACCEPTED,
    402: _ACCOUNT,
    # S3 answers with one of S3_MISSING. Any other 404 is that of a load balancer or a proxy.
    404: Failure(kind=FailureKind.TRANSIENT, reason="an answer 404 that is not of S3 ({code})", advice=_CHECK_PROXY),
    407: Failure(kind=FailureKind.USER, reason="the HTTP proxy wants credentials", advice="correct HTTPS_PROXY"),
    408: _BUSY,
    409: _BUSY,
    413: _TOO_LARGE,
    425: _BUSY,
    429: _BUSY,
    501: _NO_OPERATION,
    507: _FULL,
}

_UNRESOLVED = Failure(
    kind=FailureKind.AWAY,
    reason="the name of the service cannot be resolved",
    advice="check the endpoint URL and the DNS server of this node",
)

# Name of an exception that boto3 wraps into a general one -> what it means.
ROOT_CAUSES: Mapping[str, Failure] = {
    "SSLCertVerificationError": Failure(
        kind=FailureKind.USER,
        reason="the certificate of the service is not accepted ({code})",
        advice="set AWS_CA_BUNDLE to a file with the certificate of its authority, or correct the endpoint URL",
    ),
    "gaierror": _UNRESOLVED,
    "NameResolutionError": _UNRESOLVED,
}

# Name of an exception of boto3 or urllib3, or of one of its base classes -> what it means.
BOTO_ERRORS: Mapping[str, Failure] = {
    "NoCredentialsError": _NO_CREDENTIALS,
    "PartialCredentialsError": _NO_CREDENTIALS,
    "CredentialRetrievalError": _NO_CREDENTIALS,
    "TokenRetrievalError": _NO_CREDENTIALS,
    "ProfileNotFound": _NO_CREDENTIALS,
    "SSOError": _NO_CREDENTIALS,
    "SSLError": Failure(
        kind=FailureKind.AWAY,
        reason="no encrypted connection can be made",
        advice="check whether the service speaks https at this address",
    ),
    "EndpointConnectionError": _UNREACHED,
    "ConnectTimeoutError": _UNREACHED,
    "ProxyConnectionError": _UNREACHED,
    "ParamValidationError": Failure(
        kind=FailureKind.USER, reason="bucket {bucket} or the key is not a valid S3 name", advice="correct the URL"
    ),
    "HTTPClientError": _BROKEN,
    "HTTPError": _BROKEN,
    "ResponseParserError": _BROKEN,
    "IncompleteReadError": _BROKEN,
}


def s3_failure(code: str, status: int) -> Failure:
    """Look up what an error answer of S3 means: by its error code (from `safe_code`), else by its HTTP status."""
    if code in S3_CODES:
        return S3_CODES[code]
    row = next((row for word, row in S3_CODE_WORDS if word.search(code)), HTTP_STATUSES.get(status))
    if row is not None:
        return row
    if status >= 500:
        return _BUSY
    if code == _UNKNOWN_CODE or code.isdigit():
        return _NOT_OF_S3
    return Failure(
        kind=FailureKind.USER,
        reason="refused with {status} {code}",
        advice="check URL, endpoint and credentials",
    )


# Names of exceptions for which boto3 raises SSLError, because it cannot read the file in AWS_CA_BUNDLE.
_BUNDLE_CAUSES = frozenset({"FileNotFoundError", "IsADirectoryError", "PermissionError"})


def boto_failure(error: BaseException) -> tuple[Failure, str]:
    """Look up what an exception of boto3 means; also return the word to write for {code} in the message.

    boto3 wraps some errors into general ones: a refused certificate becomes a failed connection. Wrapped exceptions
    that `ROOT_CAUSES` lists are therefore looked up first. The word is the name of the exception's class, or what
    OpenSSL says about a certificate.
    """
    for cause in chain_of_causes(error):
        row = ROOT_CAUSES.get(type(cause).__name__)
        if row is not None:
            return row, getattr(cause, "verify_message", "") or type(cause).__name__
        if type(error).__name__ == "SSLError" and type(cause).__name__ in _BUNDLE_CAUSES:
            return _NO_BUNDLE, type(cause).__name__
    for base in type(error).__mro__:
        row = BOTO_ERRORS.get(base.__name__)
        if row is not None:
            return row, type(error).__name__
    unknown = Failure(
        kind=FailureKind.PERMANENT,
        reason="boto3 failed with {code}",
        advice="check the AWS configuration of this node",
    )
    return unknown, type(error).__name__


def safe_code(text: str) -> str:
    """Return an error code of S3 if it is a word of at most 40 letters, digits and dots, otherwise "unknown code".

    The code is shown to the user, and another text could hold a secret.
    """
    return text if re.fullmatch(r"[A-Za-z0-9.]{1,40}", text) else _UNKNOWN_CODE


def chain_of_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and the exceptions wrapped in it, outermost first, at most eight in all.

    boto3 keeps the wrapped exception in `kwargs["error"]`, urllib3 in `reason` or as the first argument.
    """
    current: BaseException | None = error
    for _ in range(8):
        if current is None:
            return
        yield current
        wrapped = [
            getattr(current, "kwargs", {}).get("error"),
            getattr(current, "reason", None),
            *current.args[:1],
            current.__cause__,
        ]
        current = next((inner for inner in wrapped if isinstance(inner, BaseException)), None)


def os_failure(error: OSError) -> Failure:
    """Look up the error number of an OSError in `OS_FAILURES`; a number that is not listed counts as permanent."""
    row = OS_FAILURES.get(error.errno or 0)
    if row is not None:
        return row
    return Failure(kind=FailureKind.PERMANENT, reason=error.strerror or type(error).__name__, advice=_CHECK_DISK)


def kind_of_os_error(error: OSError) -> FailureKind:
    """Return whether to retry, wait or stop after an OSError about a file or a folder."""
    return os_failure(error).kind


def kind_of_error(error: BaseException) -> FailureKind:
    """Return whether to retry, wait or stop after any error of a store or of a file of the run.

    An error that is not from storage, such as a bug of the program, is permanent.
    """
    if isinstance(error, StoreAway):
        return FailureKind.AWAY
    if isinstance(error, UserError):
        # The config is read by a lower layer, which raises UserError with the operating system's error as its cause.
        cause = error.__cause__
        return kind_of_os_error(cause) if isinstance(cause, OSError) else FailureKind.USER
    if isinstance(error, OSError):
        return kind_of_os_error(error)
    return FailureKind.PERMANENT


def is_worth_waiting_for(error: BaseException) -> bool:
    """Return whether the operation that raised an error may succeed when it is repeated, now or within minutes."""
    return kind_of_error(error) in (FailureKind.TRANSIENT, FailureKind.AWAY)
