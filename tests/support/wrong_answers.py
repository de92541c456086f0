"""Answers of the fault proxy that S3 would not give, although many have status 200.

redirected  307 to the same address, again and again
moved       301 PermanentRedirect without a region
balancer    404 with a page of HTML, as a load balancer answers that does not know its servers yet
page        200 with a page of HTML, as a proxy answers that wants a log-in; nothing is stored
skewed      403 RequestTimeTooSkewed
revoked     403 InvalidAccessKeyId
noetag      the answer has no ETag
nolength    the answer has no Content-Length: its body ends with the connection
errordoc    200 with an error document of S3 in place of the object
cut         200 with half of the body, and the header Content-Length of that half
endless     a listing whose pages repeat, each with a new continuation token
stuck       a listing whose pages repeat with the same continuation token
notoken     a listing that is truncated and has no continuation token
"""

from __future__ import annotations

import itertools
import re
from typing import NamedTuple

ERROR_DOCUMENT = (
    b'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>InternalError</Code>'
    b"<Message>We encountered an internal error. Please try again.</Message></Error>"
)
PAGE = b"<!DOCTYPE html>\n<html><head><title>Log in</title></head><body>Please log in. token=SECRET</body></html>\n"
LISTING_FAULTS = ("endless", "stuck", "notoken")
OBJECT_ANSWERS = ("noetag", "nolength", "errordoc", "cut")
OWN_ANSWERS = ("redirected", "moved", "balancer", "page", "skewed", "revoked")  # nothing reaches the real server
WRONG_ANSWERS = (*OWN_ANSWERS, *OBJECT_ANSWERS, *LISTING_FAULTS)
_number = itertools.count()


class WrongAnswer(NamedTuple):
    """Status, headers (without Content-Length) and body of an answer."""

    status: int
    headers: dict[str, str]
    body: bytes


def _error(status: int, code: str) -> WrongAnswer:
    """Return an error of S3, whose text holds a secret, as those of real services do."""
    text = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>key SECRET</Message></Error>'
    return WrongAnswer(status, {"Content-Type": "application/xml"}, text.encode())


def own_answer(fault: str, address: str) -> WrongAnswer:
    """Return an answer that the real server is not asked for; `fault` is its kind, of `OWN_ANSWERS`.

    `address` is the URL of the request.
    """
    if fault == "redirected":
        return WrongAnswer(307, {"Location": address}, b"")
    if fault == "moved":
        return _error(301, "PermanentRedirect")
    if fault == "skewed":
        return _error(403, "RequestTimeTooSkewed")
    if fault == "revoked":
        return _error(403, "InvalidAccessKeyId")
    status = 404 if fault == "balancer" else 200
    return WrongAnswer(status, {"Content-Type": "text/html; charset=utf-8"}, PAGE)


def changed_answer(fault: str, status: int, headers: dict[str, str], body: bytes) -> WrongAnswer:
    """Return the real server's answer, changed as `fault`, a kind of `OBJECT_ANSWERS` or `LISTING_FAULTS`, describes.

    `headers` are those of the real answer without Content-Length.
    """
    if fault == "noetag":
        headers = {name: value for name, value in headers.items() if name.lower() != "etag"}
    elif fault == "errordoc":
        status, body = 200, ERROR_DOCUMENT
    elif fault == "cut":
        body = body[: len(body) // 2]
    elif fault in LISTING_FAULTS:
        body = _without_an_end(fault, body)
    return WrongAnswer(status, headers, body)


def _without_an_end(fault: str, body: bytes) -> bytes:
    """Return the XML of a listing, which says that another page follows."""
    token = b"endless-%d" % (next(_number) if fault == "endless" else 0)
    next_page = b""
    if fault != "notoken":
        markers = (b"NextContinuationToken", b"NextKeyMarker", b"NextUploadIdMarker")
        next_page = b"".join(b"<%s>%s</%s>" % (name, token, name) for name in markers)
    for name in (b"NextContinuationToken", b"NextKeyMarker", b"NextUploadIdMarker"):
        body = re.sub(b"<%s ?/>|<%s>[^<]*</%s>" % (name, name, name), b"", body)
    return re.sub(b"<IsTruncated>[^<]*</IsTruncated>", b"<IsTruncated>true</IsTruncated>" + next_page, body)
