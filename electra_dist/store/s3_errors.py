"""Classify a failed S3 request: try again, read the credentials again, or stop with an error for the user.

Guarantee: only the class, code and HTTP status of an error are used. The service's own text never reaches a message or
an exception chain, because it may quote a key, a token or a signed URL.

Limits: an HTTP status of 400 to 499 that this module does not list ends the operation; one of 500 and above is
retried.
"""

from __future__ import annotations

import botocore.exceptions as boto_errors
import urllib3.exceptions
from botocore.parsers import ResponseParserError

from electra_dist.errors import StoreError, StoreMissing
from electra_dist.store.retry import CHECK

FAILURES = (boto_errors.BotoCoreError, boto_errors.ClientError, ResponseParserError, urllib3.exceptions.HTTPError)

# Failures after which a request is given up, where that is fewer than RetryPolicy allows:
_TRIES_MISSING = 5  # "Not found" for an object that a manifest names.
_TRIES_CREDENTIALS = 4  # Credentials that are missing or expired; they are read again before each attempt.
_TRIES_UNREACHED = 8  # About ten seconds: the URL of a service that has never answered is probably mistyped.

# Error codes in the answers of S3 services, by what follows from them.
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"}
_WRONG_CREDENTIALS = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "UnrecognizedClientException"}
_REFUSED = {"AccessDenied", "403", "Forbidden", "AllAccessDisabled", "AccountProblem"}
_OTHER_REGION = {"PermanentRedirect", "301", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"}
_REPEATABLE = {"RequestTimeout", "Throttling", "BadDigest", "ConditionalRequestConflict", "OperationAborted"}
# Exceptions that boto3 raises before a request is sent.
_NO_CREDENTIALS = (
    boto_errors.NoCredentialsError,
    boto_errors.PartialCredentialsError,
    boto_errors.CredentialRetrievalError,
    boto_errors.ProfileNotFound,
    boto_errors.SSOError,
)
# Exceptions that boto3 raises if no connection can be made.
_UNREACHED = (
    boto_errors.EndpointConnectionError,
    boto_errors.ConnectTimeoutError,
    boto_errors.ProxyConnectionError,
    boto_errors.SSLError,
)


class Taken(Exception):
    """Answer to a conditional request whose condition does not hold (HTTP status 412).

    For a write with If-None-Match: * the key is taken; for a read with If-Match the object was replaced.
    """


class EmptyRange(Exception):
    """Answer to a ranged request with no byte in the range (HTTP status 416): the object ends before the range begins.

    An empty object has no byte in any range.
    """


class Again(Exception):
    """Failure of a request that should be tried again.

    It has the number of failures to tolerate, and what to advise the user if all attempts fail.
    """

    def __init__(self, reason: str, *, tries: int | None = None, renew: bool = False, advice: str = CHECK) -> None:
        """Describe the failure.

        Args:
            reason: The failure in a few words, for the error if all attempts fail.
            tries: Number of failures with this reason after which to give up; None for the limit of the RetryPolicy.
            renew: Whether the credentials must be read again from their source before the next attempt.
            advice: The user's next step if all attempts fail.
        """
        self.reason = reason
        self.tries = tries
        self.renew = renew
        self.advice = advice


def classify(error: Exception, where: str, bucket: str, *, answered: bool, must_exist: bool) -> Exception:
    """Return the exception that the caller of a failed request should raise.

    Args:
        error: One of `FAILURES`.
        where: URL of the object and the endpoint, for a message.
        bucket: Name of the bucket, for a message.
        answered: Whether the service has answered an earlier request of this store. If not, the URL or the credentials
            are probably wrong, so fewer retries are allowed.
        must_exist: Whether the object is known to exist, so that "not found" is tried again.

    Returns:
        Again if the request should be repeated. StoreError or StoreMissing, with a message of one line, if repeating
        is useless. Taken (HTTP 412) or EmptyRange (HTTP 416) if the condition or the range of the request is not met.
    """
    if isinstance(error, boto_errors.ClientError):
        return _classify_answer(error, where, bucket, must_exist=must_exist)
    if isinstance(error, _NO_CREDENTIALS):
        advice = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or give the node a role"
        if not answered:
            return StoreError(f"{where}: no credentials; {advice}")
        # The credentials worked before: their source may be unreachable for a moment.
        return Again("no credentials", tries=_TRIES_CREDENTIALS, renew=True, advice=advice)
    if isinstance(error, _UNREACHED):
        tries = None if answered else _TRIES_UNREACHED
        return Again("the service cannot be reached", tries=tries, advice="check the endpoint URL and the network")
    if isinstance(error, boto_errors.ParamValidationError):
        return StoreError(f"{where}: bucket {bucket} or the key is not a valid S3 name; correct the URL")
    if isinstance(error, (boto_errors.HTTPClientError, urllib3.exceptions.HTTPError, ResponseParserError)):
        return Again(f"broken connection or answer ({type(error).__name__})")
    if isinstance(error, boto_errors.IncompleteReadError):
        return Again("the body ended early")
    return StoreError(f"{where}: boto3 failed with {type(error).__name__}; check the AWS configuration of this node")


def _classify_answer(error: boto_errors.ClientError, where: str, bucket: str, *, must_exist: bool) -> Exception:
    """Return the exception for an error that the service itself answered with, by its code and HTTP status.

    Args:
        error: boto3's exception, which holds the answer.
        where: URL of the object and the endpoint, for a message.
        bucket: Name of the bucket, for a message.
        must_exist: Whether the object is known to exist, so that "not found" is tried again.

    Returns:
        Again if the request should be repeated; Taken (HTTP 412) or EmptyRange (HTTP 416) if the condition or the
        range of the request is not met; otherwise StoreError or StoreMissing with a message of one line.
    """
    code = str(error.response.get("Error", {}).get("Code", ""))
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    if code == "NoSuchBucket":
        return StoreError(f"{where}: no such bucket; create bucket {bucket} or correct the URL")
    if code == "PreconditionFailed" or status == 412:
        return Taken()
    if code == "InvalidRange" or status == 416:
        return EmptyRange()
    if status == 404:
        if must_exist:
            return Again("no such object", tries=_TRIES_MISSING, advice="restore the object or build its folder again")
        return StoreMissing(f"{where}: no such object; check the URL, or build or restore the object")
    if code in _EXPIRED:
        return Again(
            "the credentials have expired", tries=_TRIES_CREDENTIALS, renew=True, advice="renew them, then start again"
        )
    if code in _WRONG_CREDENTIALS:
        return StoreError(
            f"{where}: credentials not accepted ({code}); correct AWS_* in the environment or the profile in ~/.aws"
        )
    if code in _OTHER_REGION or status == 301:
        return StoreError(f"{where}: the bucket is in another region; set AWS_REGION to the bucket's region")
    if code == "RequestTimeTooSkewed":
        return StoreError(f"{where}: this machine's clock is wrong; set it (chrony, ntpd), then start again")
    if code in _REFUSED or status == 403:
        return StoreError(f"{where}: access refused; give these credentials the right to read and write this URL")
    if code == "NotImplemented" or status == 501:
        return StoreError(
            f"{where}: the service lacks an operation that is needed (conditional PUT?); use a service that has it, "
            f"such as AWS, Ceph or MinIO in a current version"
        )
    is_temporary = status >= 500 or status in (408, 409, 429)  # 408 timeout, 409 conflict, 429 too many requests
    if is_temporary or code in _REPEATABLE:
        return Again(f"{status} {code}")
    return StoreError(f"{where}: refused with {status} {code}; check URL, endpoint and credentials")
