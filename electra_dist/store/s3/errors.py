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

CHECK = "check the object and the storage service, then start again"  # default advice
FAILURES = (boto_errors.BotoCoreError, boto_errors.ClientError, ResponseParserError, urllib3.exceptions.HTTPError)

TRIES_MISSING = 5  # After so many answers "not found", an object that a manifest names counts as missing.


class Taken(Exception):
    """Error for a conditional request whose condition does not hold (HTTP status 412).

    For a write with If-None-Match: * the key is taken; for a read with If-Match the object was replaced.
    """


class EmptyRange(Exception):
    """Error (HTTP status 416) for a ranged request if the object is empty or ends before the range begins."""


class Again(Exception):
    """Failure of an S3 request that should be sent again."""

    def __init__(
        self,
        reason: str,
        *,
        missing: bool = False,
        renew: bool = False,
        is_away: bool = False,
        advice: str = CHECK,
    ) -> None:
        """Describe the failure; `reason` and `advice` are for the message if all attempts fail.

        `missing`: an object that should exist was not found; after `TRIES_MISSING` such answers it counts as missing.
        `renew`: the credentials must be read from their source again. `is_away`: the storage is away, so the user
        is told at once; otherwise the next attempt should succeed.
        """
        super().__init__(reason)
        self.reason = reason
        self.missing = missing
        self.renew = renew
        self.is_away = is_away
        self.advice = advice


def classify(error: Exception, where: str, bucket: str, *, answered: bool, must_exist: bool) -> Exception:
    """Return the exception to raise for a failed request: Again, StoreError, StoreMissing, Taken or EmptyRange.

    `error` is one of `FAILURES`; `where` is the URL and the endpoint, for a message. `answered`: the service has
    answered this store before, so URL and credentials are probably right. With `must_exist`, retry "not found".
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
    """Return Again for a failure that may pass, otherwise StoreError; `status` is 0 without an answer."""
    words = {"code": code, "status": status, "bucket": bucket}
    reason = failure.reason.format(**words)
    advice = failure.advice.format(**words)
    kind = failure.kind_for(answered=answered)
    if kind in (FailureKind.TRANSIENT, FailureKind.AWAY):
        is_away = kind is FailureKind.AWAY
        return Again(reason, renew=failure.renew_credentials, is_away=is_away, advice=advice)
    return StoreError(f"{where}: {reason}; {advice}")
