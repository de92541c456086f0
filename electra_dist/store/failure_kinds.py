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
    """What the caller must do after a storage failure: try again, wait, give up, or report a mistake of the user."""

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
        will probably be corrected soon, and it is waited for. If not, they are a mistake of the user.
        """
        if answered and self.kind_after_success is not None:
            return self.kind_after_success
        return self.kind


def transient(reason: str, advice: str) -> Failure:
    """Return a failure of kind TRANSIENT: the fault should be gone at the next try."""
    return Failure(kind=FailureKind.TRANSIENT, reason=reason, advice=advice)


def away(reason: str, advice: str, *, renew: bool = False) -> Failure:
    """Return a failure of kind AWAY: the storage may come back within minutes.

    With `renew`, the next try reads the credentials again.
    """
    return Failure(kind=FailureKind.AWAY, reason=reason, advice=advice, renew_credentials=renew)


def _user(reason: str, advice: str, *, then_away: bool = False, renew: bool = False) -> Failure:
    """Return a failure of kind USER: the user must correct something.

    With `then_away`, its kind is AWAY if the service has answered before. With `renew`, the next try reads the
    credentials again.
    """
    later = FailureKind.AWAY if then_away else None
    return Failure(
        kind=FailureKind.USER, reason=reason, advice=advice, kind_after_success=later, renew_credentials=renew
    )


def _permanent(reason: str, advice: str) -> Failure:
    return Failure(kind=FailureKind.PERMANENT, reason=reason, advice=advice)


_FREE_SPACE = "free space there, or choose another path"
_CHECK_SHARE = "check the mount and its server"
_CHECK_DISK = "check the disk"

# Error number of the operating system -> what it means for a file that a run reads or writes.
OS_FAILURES: Mapping[int, Failure] = {
    # Another try is likely to succeed.
    errno.EINTR: transient("interrupted", "start again"),
    errno.EAGAIN: transient("busy", "start again"),
    # Full.
    errno.ENOSPC: away("disk full", _FREE_SPACE),
    errno.EDQUOT: away("disk full (quota)", _FREE_SPACE),
    errno.ENOMEM: away("no memory left", "end other processes of this node"),
    errno.ENFILE: away("too many open files on this node", "raise the limit fs.file-max"),
    # Read-only: what a kernel does to a file system with errors, and a server during a fail-over.
    errno.EROFS: away("read-only file system", "mount it for writing, or choose another path"),
    # Not responding.
    errno.EIO: away("input/output error", _CHECK_DISK),
    errno.EREMOTEIO: away("remote input/output error", _CHECK_SHARE),
    errno.ESTALE: away("stale file handle of a network share", _CHECK_SHARE),
    errno.ETIMEDOUT: away("no answer in time", _CHECK_SHARE),
    errno.EHOSTDOWN: away("the server is down", _CHECK_SHARE),
    errno.EHOSTUNREACH: away("the server cannot be reached", _CHECK_SHARE),
    errno.ENETDOWN: away("the network is down", _CHECK_SHARE),
    errno.ENETUNREACH: away("the network cannot be reached", _CHECK_SHARE),
    errno.ENETRESET: away("the network dropped the connection", _CHECK_SHARE),
    errno.ECONNREFUSED: away("the server refuses connections", _CHECK_SHARE),
    errno.ECONNRESET: away("the server closed the connection", _CHECK_SHARE),
    errno.ECONNABORTED: away("the connection was aborted", _CHECK_SHARE),
    errno.ENOTCONN: away("the share is not connected", _CHECK_SHARE),
    errno.ESHUTDOWN: away("the share was shut down", _CHECK_SHARE),
    errno.EPIPE: away("the connection is broken", _CHECK_SHARE),
    errno.ENODEV: away("the device is gone", _CHECK_DISK),
    errno.ENXIO: away("the device is gone", _CHECK_DISK),
    errno.ENOMEDIUM: away("the device is gone", _CHECK_DISK),
    errno.EBUSY: away("in use by another process", _CHECK_SHARE),
    errno.ENOLCK: away("no lock to be had", "check the share's lock service"),
    # The user's.
    errno.ENOENT: _user("no such file or folder", "check the path"),
    errno.ENOTDIR: _user("is not a folder", "choose another path"),
    errno.EISDIR: _user("is a folder, not a file", "give the path of a file"),
    errno.EACCES: _user("permission denied", "give this user the right to it"),
    errno.EPERM: _user("operation not permitted", "choose another path"),
    errno.ENAMETOOLONG: _user("name too long", "choose a shorter path"),
    errno.ELOOP: _user("symbolic links form a loop", "remove the loop"),
    errno.EFBIG: _user("file too large", "raise the limit with `ulimit -f`"),
    errno.EMFILE: _user("too many open files", "raise the limit with `ulimit -n`"),
}


CHECK_SERVICE = "check the object and the storage service, then start again"
NOT_FOUND = transient("no such object", "restore the object or build its folder again")
_RENEW = "renew them, then start again"
_SET_CREDENTIALS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or give the node a role"
_CORRECT_ENDPOINT = "check the endpoint URL and the network"
CHECK_PROXY = "check the endpoint URL, and the proxies and load balancers on the way to the service"

_BUSY = transient("{status} {code}", CHECK_SERVICE)
_EXPIRED = away("the credentials have expired", _RENEW, renew=True)
_NOT_ACCEPTED = _user(
    "credentials not accepted ({code})",
    "correct AWS_* in the environment or the profile in ~/.aws",
    then_away=True,
    renew=True,
)
_REFUSED = _user("access refused", "give these credentials the right to read and write this URL")
_NO_BUCKET = _user("no such bucket", "create bucket {bucket} or correct the URL")
_OTHER_REGION = _user(
    "the bucket is in another region", "set AWS_REGION to the bucket's region, or correct the endpoint URL"
)
_REDIRECTED = transient("redirected to another address ({status})", CHECK_PROXY)
# A clock that jumped is set right by the time service.
_CLOCK = _user("this machine's clock is wrong", "set it (chrony, ntpd), then start again", then_away=True)
_FULL = away("the storage is full or over its quota ({code})", "free space there, or have the quota raised")
_ACCOUNT = _user(
    "the account of these credentials is suspended or has a problem ({code})",
    "settle it with the provider of the service",
)
_ARCHIVED = _user(
    "the object is in cold storage ({code})",
    "restore it to a class that can be read (`aws s3api restore-object`), then start again",
)
_RESTORING = away("the object is being restored from cold storage", "wait for the restore")
_KEPT = _user(
    "the object may not be changed or deleted yet ({code})", "use a bucket without a retention rule or a hold"
)
_NO_KEY = _user(
    "the encryption key of the object or of bucket {bucket} cannot be used ({code})",
    "check the key, and the right of these credentials to use it",
)
_TOO_LARGE = _user(
    "an upload of this size is refused ({status})",
    "raise the limit of the proxy or load balancer in front of the service",
)
# A proxy or a firewall that let earlier requests pass.
_NOT_OF_S3 = _user(
    "an answer {status} without an error code of S3",
    f"{CHECK_PROXY}, and whether these credentials have the right to this URL",
    then_away=True,
)
_NO_OPERATION = _user(
    "the service lacks an operation that is needed (conditional PUT?)",
    "use a service that has it, such as AWS, Ceph or MinIO in a current version",
)
# Their source may be unreachable for a moment.
_NO_CREDENTIALS = _user("no credentials", _SET_CREDENTIALS, then_away=True, renew=True)
_UNREACHED = away("the service cannot be reached", _CORRECT_ENDPOINT)
_BROKEN = transient("broken connection or answer ({code})", CHECK_SERVICE)
_NO_BUNDLE = _user(
    "the file of accepted certificate authorities cannot be read", "correct AWS_CA_BUNDLE, or remove it"
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
    404: transient("an answer 404 that is not of S3 ({code})", CHECK_PROXY),
    407: _user("the HTTP proxy wants credentials", "correct HTTPS_PROXY"),
    408: _BUSY,
    409: _BUSY,
    413: _TOO_LARGE,
    425: _BUSY,
    429: _BUSY,
    501: _NO_OPERATION,
    507: _FULL,
}

_UNRESOLVED = away(
    "the name of the service cannot be resolved", "check the endpoint URL and the DNS server of this node"
)

# Name of an exception that boto3 wraps into a general one -> what it means.
ROOT_CAUSES: Mapping[str, Failure] = {
    "SSLCertVerificationError": _user(
        "the certificate of the service is not accepted ({code})",
        "set AWS_CA_BUNDLE to a file with the certificate of its authority, or correct the endpoint URL",
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
    "SSLError": away("no encrypted connection can be made", "check whether the service speaks https at this address"),
    "EndpointConnectionError": _UNREACHED,
    "ConnectTimeoutError": _UNREACHED,
    "ProxyConnectionError": _UNREACHED,
    "ParamValidationError": _user("bucket {bucket} or the key is not a valid S3 name", "correct the URL"),
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
    return _user("refused with {status} {code}", "check URL, endpoint and credentials")


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
    unknown = _permanent("boto3 failed with {code}", "check the AWS configuration of this node")
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
    """Look up what an OSError means by its error number; a number that is not listed counts as permanent."""
    row = OS_FAILURES.get(error.errno or 0)
    if row is not None:
        return row
    return _permanent(error.strerror or type(error).__name__, _CHECK_DISK)


def kind_of_error(error: BaseException) -> FailureKind:
    """Return whether to retry, wait or stop after any error of a store or of a file of the run.

    An error that is not from storage, such as a bug of the program, is permanent.
    """
    if isinstance(error, StoreAway):
        return FailureKind.AWAY
    # The config is read by a lower layer, which raises UserError with the operating system's error as its cause.
    os_error = error.__cause__ if isinstance(error, UserError) else error
    if isinstance(os_error, OSError):
        return os_failure(os_error).kind
    return FailureKind.USER if isinstance(error, UserError) else FailureKind.PERMANENT


def is_worth_waiting_for(error: BaseException) -> bool:
    """Return whether the operation that raised an error may succeed when it is repeated, now or within minutes."""
    return kind_of_error(error) in (FailureKind.TRANSIENT, FailureKind.AWAY)
