"""What follows from an error answer of an S3 service: its code decides, its status only if no code is known."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from botocore.exceptions import ClientError
from botocore.parsers import create_parser
from botocore.retries.standard import ThrottledRetryableChecker, TransientRetryableChecker
from support import fault_server
from support.fault_server import FaultPlan

from electra_dist.errors import StorageLost, StoreError, StoreMissing
from electra_dist.store.failure_kinds import FailureKind, is_worth_waiting_for, kind_of_error, s3_failure
from electra_dist.store.interface import Store
from electra_dist.store.patience import Pace
from electra_dist.store.s3.answers import Again, classify

PAGE = b"<html>\r\n<head><title>403 Forbidden</title></head>\r\n<body><hr><center>nginx</center></body>\r\n</html>"
XHTML = b'<html xmlns="http://www.w3.org/1999/xhtml"><body><p>Blocked by the firewall</p></body></html>'
IMPATIENT = Pace(tries=3, first_pause_s=0.001, longest_pause_s=0.01)


def document(code: str) -> bytes:
    """Return an error document as S3 services send it."""
    return f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>text</Message></Error>'.encode()


def outcome(status: int, body: bytes, *, answered: bool = True) -> str:
    """Return what boto3's reading of an answer is classified as: "wait: ..." or the message for the user."""
    parsed = create_parser("rest-xml").parse({"status_code": status, "headers": {}, "body": body}, None)
    error = ClientError(parsed, "PutObject")
    result = classify(error, where="s3://b/k", bucket="b", answered=answered, must_exist=False)
    if isinstance(result, Again):
        return f"wait: {result.failure.reason}; {result.failure.advice}"
    assert isinstance(result, StoreError) and not is_worth_waiting_for(result)
    assert "\n" not in str(result)
    return str(result)


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (403, "QuotaExceeded"),  # Ceph, VersityGW
        (429, "QuotaExceeded"),  # Scality
        (403, "ObjectQuotaExceeded"),  # NooBaa
        (507, "XMinioStorageFull"),
        (400, "XMinioAdminBucketQuotaExceeded"),
        (403, "InsufficientQuota"),
        (507, "InsufficientStorage"),
        (403, "InsufficientStorageSpace"),
        (400, "EntityTooLarge"),  # OpenStack Swift
        (403, "BucketSizeQuotaExceeded"),  # no known service: the word decides
        (403, "StorageLimitExceeded"),
    ],
)
def test_a_full_bucket_is_waited_for_like_a_full_disk(status: int, code: str) -> None:
    text = f"wait: the storage is full or over its quota ({code}); free space there, or have the quota raised"
    assert outcome(status, document(code)) == outcome(status, document(code), answered=False) == text
    assert s3_failure(code, status).kind is FailureKind.AWAY


def test_an_upload_into_a_full_bucket_gives_up_with_an_error_that_the_run_waits_for(
    faulty: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(fault_server.ANSWERS, "slowdown", (403, "QuotaExceeded", ""))
    store = faulty(FaultPlan(rate=1.0, faults=("slowdown",), in_a_row=10**9), IMPATIENT)
    with pytest.raises(StorageLost, match=r"/prefix/x at .*full or over its quota \(QuotaExceeded\)") as caught:
        store.write("x", b"1")
    assert kind_of_error(caught.value) is FailureKind.AWAY


@pytest.mark.parametrize("status", [400, 403, 429, 503])
def test_every_code_that_boto3_repeats_is_repeated_whatever_its_status(status: int) -> None:
    codes = [*ThrottledRetryableChecker._THROTTLED_ERROR_CODES, *TransientRetryableChecker._TRANSIENT_ERROR_CODES]
    more = ["userRateLimitExceeded", "rateLimitExceeded", "QpsLimitExceeded", "UploadTrafficRateLimitExceeded"]
    more += ["SlowDownWrite", "TooMuchConcurrency", "KMS.ThrottlingException", "ServiceUnavailable", "InternalError"]
    assert [code for code in (*codes, *more) if s3_failure(code, status).kind is not FailureKind.TRANSIENT] == []


@pytest.mark.parametrize(
    ("status", "code", "line"),
    [
        (403, "InvalidObjectState", "the object is in cold storage (InvalidObjectState); restore it"),
        (403, "ObjectNotInActiveTierError", "the object is in cold storage"),
        (403, "AccountProblem", "the account of these credentials is suspended or has a problem (AccountProblem)"),
        (403, "UserSuspended", "the account of these credentials is suspended"),
        (403, "AllAccessDisabled", "the account of these credentials is suspended"),
        (400, "KMS.DisabledException", "the encryption key of the object or of bucket b cannot be used"),
        (403, "CloudKmsDisabledKey", "the encryption key of the object or of bucket b cannot be used"),
        (400, "XMinioKMSKeyNotFoundException", "the encryption key of the object or of bucket b cannot be used"),
        (403, "RetentionPolicyNotMet", "the object may not be changed or deleted yet"),
        (403, "AccessDenied", "access refused; give these credentials the right"),
        (403, "CodeOfNobody", "refused with 403 CodeOfNobody"),
        (501, "NotImplemented", "the service lacks an operation"),
        (405, "MethodNotAllowed", "the service lacks an operation"),
        (301, "PermanentRedirect", "the bucket is in another region"),
        (400, "AuthorizationHeaderMalformed", "the bucket is in another region"),
        (400, "IllegalLocationConstraintException", "the bucket is in another region"),
        (404, "NoSuchBucket", "no such bucket; create bucket b"),
    ],
)
@pytest.mark.parametrize("answered", [False, True])
def test_what_only_the_user_can_correct_is_named_with_its_own_line(
    status: int, code: str, line: str, answered: bool
) -> None:
    assert outcome(status, document(code), answered=answered).startswith(f"s3://b/k: {line}")


@pytest.mark.parametrize(
    ("status", "body", "before_success", "after_success"),
    [
        (403, document("RequestTimeTooSkewed"), "s3://b/k: this machine's clock", "wait: this machine's clock"),
        (400, document("ExpiredToken"), "wait: the credentials have expired", "wait: the credentials have expired"),
        (403, document("InvalidAccessKeyId"), "s3://b/k: credentials not", "wait: credentials not accepted"),
        (401, document("Unauthorized"), "s3://b/k: credentials not", "wait: credentials not accepted"),
        (401, b"", "s3://b/k: credentials not", "wait: credentials not accepted"),
        (
            409,
            document("RestoreAlreadyInProgress"),
            "wait: the object is being rest",
            "wait: the object is being rest",
        ),
        (307, document("TemporaryRedirect"), "wait: redirected to another", "wait: redirected to another"),
        # No code of S3: a proxy, a firewall, or an answer without a body.
        (403, PAGE, "s3://b/k: an answer 403 without an error code", "wait: an answer 403 without an error code"),
        (403, XHTML, "s3://b/k: an answer 403 without an error code", "wait: an answer 403 without an error code"),
        (403, b"", "s3://b/k: an answer 403 without an error code", "wait: an answer 403 without an error code"),
        (400, PAGE, "s3://b/k: an answer 400 without an error code", "wait: an answer 400 without an error code"),
        (404, PAGE, "wait: an answer 404 that is not of S3", "wait: an answer 404 that is not of S3"),
        (413, PAGE, "s3://b/k: an upload of this size is refused", "s3://b/k: an upload of this size is refused"),
        (502, PAGE, "wait: 502", "wait: 502"),
        (503, b"", "wait: 503", "wait: 503"),
        (507, b"", "wait: the storage is full", "wait: the storage is full"),
    ],
)
def test_what_worked_before_is_waited_for_and_what_never_worked_is_refused(
    status: int, body: bytes, before_success: str, after_success: str
) -> None:
    assert outcome(status, body, answered=False).startswith(before_success)
    assert outcome(status, body, answered=True).startswith(after_success)


@pytest.mark.parametrize(
    "body",
    [
        b"<Error><Code><a>1</a></Code></Error>",
        b"<Error><Code>A</Code><Code>B</Code></Error>",
        b"<a><Error>x</Error></a>",
    ],
)
def test_an_error_document_of_another_form_is_no_traceback(
    body: bytes, faulty: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "support.fault_server._Handler._forward",
        lambda handler, data: (403, {"Content-Type": "application/xml"}, body),
    )
    store = faulty(FaultPlan(rate=0.0), IMPATIENT)
    with pytest.raises(StoreError) as caught:
        store.read("x")
    assert not isinstance(caught.value, StoreMissing) and "\n" not in str(caught.value)
