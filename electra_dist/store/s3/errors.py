"""Turn a failed S3 request into what its caller must do: try again, begin again, or stop with an error for the user.

Guarantee: only the class, code and HTTP status of an error are used. The service's own text never reaches a message or
an exception chain, because it may quote a key, a token or a signed URL.

How: `failure_kinds.py` has the table of what each failure means.
"""

from __future__ import annotations

import botocore.exceptions as boto_errors
import urllib3.exceptions
from botocore.parsers import ResponseParserError

from electra_dist.errors import StoreError, StoreMissing
from electra_dist.store.failure_kinds import (
    S3_MISSING,
    Failure,
    FailureKind,
    boto_failure,
    chain_of_causes,
    s3_failure,
    safe_code,
)
from electra_dist.store.retry import CHECK

FAILURES = (boto_errors.BotoCoreError, boto_errors.ClientError, ResponseParserError, urllib3.exceptions.HTTPError)

TRIES_MISSING = 5  # Answers "not found" for an object that a manifest names, after which the object is missing.


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

    def __init__(
        self,
        reason: str,
        *,
        missing: bool = False,
        renew: bool = False,
        unanswered: bool = False,
        advice: str = CHECK,
    ) -> None:
        """Describe the failure.

        Args:
            reason: The failure in a few words, for the error if all attempts fail.
            missing: Whether the service says that an object does not exist that should. It is believed after
                `TRIES_MISSING` answers.
            renew: Whether the credentials must be read again from their source before the next attempt.
            unanswered: Whether the service has never answered, so that the user should learn soon what is tried.
            advice: The user's next step if all attempts fail.
        """
        super().__init__(reason)
        self.reason = reason
        self.missing = missing
        self.renew = renew
        self.unanswered = unanswered
        self.advice = advice


def classify(error: Exception, where: str, bucket: str, *, answered: bool, must_exist: bool) -> Exception:
    """Return the exception that the caller of a failed request should raise.

    Args:
        error: One of `FAILURES`.
        where: URL of the object and the endpoint, for a message.
        bucket: Name of the bucket, for a message.
        answered: Whether the service has answered an earlier request of this store. If not, the URL or the credentials
            are probably wrong.
        must_exist: Whether the object is known to exist, so that "not found" is tried again.

    Returns:
        Again if the request should be repeated. StoreError or StoreMissing, with a message of one line, if repeating
        is useless. Taken (HTTP 412) or EmptyRange (HTTP 416) if the condition or the range of the request is not met.
    """
    if isinstance(error, boto_errors.ClientError):
        return _classify_answer(error, where, bucket, answered=answered, must_exist=must_exist)
    for cause in chain_of_causes(error):
        if isinstance(cause, Again):  # Raised while boto3 read the body of an upload: it went out too slowly.
            return cause
    failure, code = boto_failure(error)
    return _to_exception(failure, where, bucket, code=code, status=0, answered=answered)


def _classify_answer(
    error: boto_errors.ClientError, where: str, bucket: str, *, answered: bool, must_exist: bool
) -> Exception:
    """Return the exception for an error that the service itself answered with, by its code and HTTP status.

    Args:
        error: The error that boto3 made of the answer.
        where: URL of the object and the endpoint, for a message.
        bucket: Name of the bucket, for a message.
        answered: Whether the service has answered an earlier request of this store.
        must_exist: Whether the object is known to exist, so that "not found" is tried again.

    Returns:
        Again if the request should be repeated; Taken (HTTP 412) or EmptyRange (HTTP 416) if the condition or the
        range of the request is not met; otherwise StoreError or StoreMissing with a message of one line.
    """
    code = safe_code(str(error.response.get("Error", {}).get("Code", "")))
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    if code == "PreconditionFailed" or status == 412:
        return Taken()
    if code == "InvalidRange" or status == 416:
        return EmptyRange()
    if code in S3_MISSING:
        if must_exist:
            return Again("no such object", missing=True, advice="restore the object or build its folder again")
        return StoreMissing(f"{where}: no such object; check the URL, or build or restore the object")
    failure = s3_failure(code, status)
    return _to_exception(failure, where, bucket, code=code, status=status, answered=answered)


def _to_exception(failure: Failure, where: str, bucket: str, *, code: str, status: int, answered: bool) -> Exception:
    """Return Again for a failure that may pass, otherwise StoreError.

    Args:
        failure: Row of the table of failures; its texts may name {code}, {status} and {bucket}.
        where: URL of the object and the endpoint, for a message.
        bucket: Name of the bucket.
        code: Error code of the service, or name of the exception's class.
        status: HTTP status of the answer; 0 without an answer.
        answered: Whether the service has answered an earlier request of this store.
    """
    words = {"code": code, "status": status, "bucket": bucket}
    reason = failure.reason.format(**words)
    advice = failure.advice.format(**words)
    if failure.kind_for(answered=answered) in (FailureKind.TRANSIENT, FailureKind.AWAY):
        return Again(reason, renew=failure.renew_credentials, unanswered=not answered, advice=advice)
    return StoreError(f"{where}: {reason}; {advice}")
