"""What a failed S3 request means: try again, ask for the credentials again, or tell the user and stop.

Guarantee: only an error's class, code and HTTP status are read. The service's own text never reaches a message or an
exception chain, because it may quote a key, a token or a signed URL.

Where it stops: a status of 400 to 499 that is not in the tables is final; one of 500 and above is retried.
"""

from __future__ import annotations

import botocore.exceptions as boto_errors
import urllib3.exceptions
from botocore.parsers import ResponseParserError

from electra_dist.errors import StoreError, StoreMissing
from electra_dist.store.retry import CHECK

FAILURES = (boto_errors.BotoCoreError, boto_errors.ClientError, ResponseParserError, urllib3.exceptions.HTTPError)

_TRIES_MISSING = 5  # "not found" for an object that a manifest promises
_TRIES_CREDENTIALS = 4
_TRIES_UNREACHED = 8  # about ten seconds: a service that has never answered is more likely mistyped than down

_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"}
_WRONG_CREDENTIALS = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "UnrecognizedClientException"}
_REFUSED = {"AccessDenied", "403", "Forbidden", "AllAccessDisabled", "AccountProblem"}
_OTHER_REGION = {"PermanentRedirect", "301", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"}
_REPEATABLE = {"RequestTimeout", "Throttling", "BadDigest", "ConditionalRequestConflict", "OperationAborted"}
_NO_CREDENTIALS = (
    boto_errors.NoCredentialsError,
    boto_errors.PartialCredentialsError,
    boto_errors.CredentialRetrievalError,
    boto_errors.ProfileNotFound,
    boto_errors.SSOError,
)
_UNREACHED = (
    boto_errors.EndpointConnectionError,
    boto_errors.ConnectTimeoutError,
    boto_errors.ProxyConnectionError,
    boto_errors.SSLError,
)


class Taken(Exception):
    """412: the key is taken, or the object is no longer the version asked for."""


class EmptyRange(Exception):
    """416: no byte in the range asked for."""


class Again(Exception):
    """A failure that deserves another attempt."""

    def __init__(self, reason: str, *, tries: int | None = None, renew: bool = False, advice: str = CHECK) -> None:
        self.reason = reason  # in a few words, for the error if all attempts fail
        self.tries = tries  # failures in a row to bear; None: as the policy says
        self.renew = renew  # read the credentials from their source before the next attempt
        self.advice = advice  # the user's next step if all attempts fail


def classify(error: Exception, where: str, bucket: str, *, answered: bool, must_exist: bool) -> Exception:
    """The exception that `error` should be to the caller.

    Args:
        where: URL and endpoint, for a message.
        answered: the service has answered before.
        must_exist: the object is known to exist.

    Returns:
        Again: try again. StoreError (StoreMissing): nothing to try; one line with the next step. Taken, EmptyRange:
        answers, rather than failures, to a conditional or ranged request.
    """
    if isinstance(error, boto_errors.ClientError):
        return _judge_answer(error, where, bucket, must_exist=must_exist)
    if isinstance(error, _NO_CREDENTIALS):
        advice = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or give the node a role"
        if not answered:
            return StoreError(f"{where}: no credentials; {advice}")
        return Again("no credentials", tries=_TRIES_CREDENTIALS, renew=True, advice=advice)
    if isinstance(error, _UNREACHED):
        tries = None if answered else _TRIES_UNREACHED
        return Again("the service cannot be reached", tries=tries, advice="check the endpoint URL and the network")
    if isinstance(error, boto_errors.ParamValidationError):
        return StoreError(f"{where}: not a valid bucket or key name; mend the URL")
    if isinstance(error, (boto_errors.HTTPClientError, urllib3.exceptions.HTTPError, ResponseParserError)):
        return Again(f"broken connection or answer ({type(error).__name__})")
    if isinstance(error, boto_errors.IncompleteReadError):
        return Again("the body ended early")
    return StoreError(f"{where}: {type(error).__name__}; check the AWS configuration of this node")


def _judge_answer(error: boto_errors.ClientError, where: str, bucket: str, *, must_exist: bool) -> Exception:
    code = str(error.response.get("Error", {}).get("Code", ""))
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    if code == "NoSuchBucket":
        return StoreError(f"{where}: no such bucket; create bucket {bucket} or mend the URL")
    if code == "PreconditionFailed" or status == 412:
        return Taken()
    if code == "InvalidRange" or status == 416:
        return EmptyRange()
    if status == 404:
        if must_exist:
            return Again("no such object", tries=_TRIES_MISSING, advice="restore the object or build its folder again")
        return StoreMissing(f"{where}: no such object; check the URL, or build what should be there")
    if code in _EXPIRED:
        return Again("the credentials have expired", tries=_TRIES_CREDENTIALS, renew=True, advice="renew them")
    if code in _WRONG_CREDENTIALS:
        return StoreError(f"{where}: credentials not accepted ({code}); correct AWS_* or the profile")
    if code in _OTHER_REGION or status == 301:
        return StoreError(f"{where}: the bucket is in another region; set AWS_REGION to it")
    if code == "RequestTimeTooSkewed":
        return StoreError(f"{where}: this machine's clock is wrong; set it (chrony, ntpd)")
    if code in _REFUSED or status == 403:
        return StoreError(f"{where}: access refused; give these credentials the right to it")
    if code == "NotImplemented" or status == 501:
        return StoreError(f"{where}: the service lacks an operation that is needed (conditional PUT?)")
    if status >= 500 or status in (408, 409, 429) or code in _REPEATABLE:
        return Again(f"{status} {code}")
    return StoreError(f"{where}: refused with {status} {code}; check URL, endpoint and credentials")
