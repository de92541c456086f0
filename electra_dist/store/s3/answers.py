"""Check that an answer with HTTP status 200 is an answer of S3 with the fields that its operation needs; read them.

Proxies, load balancers and services that are half down answer with status 200 and a page of HTML, an error document,
or a part of what was asked for. Such an answer counts as a failed attempt: `Again` is raised, and the request is
repeated. A listing also fails if it would never end.

Limits: whether the bytes of an object are right is not checked here. The readers of an object compare its digest, if
one is recorded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from electra_dist.errors import StoreError
from electra_dist.store.s3.errors import Again

_CHECK_PROXY = "check the endpoint URL, and the proxies and load balancers on the way to the service"
_MARKUP_TYPES = ("text/html", "application/xhtml", "application/xml", "text/xml")
_MARKUP_ENDINGS = (".html", ".htm", ".xhtml", ".xml")
_ERROR_DOCUMENT = re.compile(rb"\s*(?:<\?xml[^>]*\?>\s*)?<Error[\s>]")
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
# Operations -> fields of the answer without which the request counts as failed. A proxy's page for a PUT has no ETag.
NEEDED_FIELDS = {
    "get_object": ("ETag", "ContentLength"),
    "list_objects_v2": ("IsTruncated",),
    "list_multipart_uploads": ("IsTruncated",),
    "put_object": ("ETag",),
    "upload_part": ("ETag",),
    "create_multipart_upload": ("UploadId",),
    "complete_multipart_upload": ("ETag",),
}
WRITER_TAG = "writer"  # Metadata key of the random tag that identifies the writer of an object.
_EMPTY_PAGES = 100  # pages in a row that may be without an entry
_MOST_PAGES = 10_000  # pages of a listing; of a thousand entries each

ERROR_DOCUMENT_BYTES = 1024  # first bytes of an object by which an error document is recognized


class ContentRange(NamedTuple):
    """Range that a GET has returned: bytes [first, end) of an object of `size` bytes."""

    first: int
    end: int
    size: int


class ObjectInfo(NamedTuple):
    """Size of an object on S3, and the random tag by which its writer recognizes it (`S3Store.write_new`)."""

    size: int  # in bytes
    writer_tag: str | None  # None if the writer stored no tag


def check_answer(answer: dict[str, Any], fields: tuple[str, ...]) -> None:
    """Raise Again if an answer lacks one of `fields`, which S3 always sends for the operation.

    If `fields` is empty (deletions), raise Again for a page of HTML with status 200, because S3 would answer 204.
    """
    for field in fields:
        if field not in answer:
            raise Again(f"an answer without {field}", advice=_CHECK_PROXY)
    about = answer["ResponseMetadata"]
    is_page = about["HTTPStatusCode"] == 200 and about["HTTPHeaders"].get("content-type", "").startswith("text/html")
    if not fields and is_page:
        raise Again("a page of HTML instead of an answer of S3", advice=_CHECK_PROXY)


def check_object(answer: dict[str, Any], key: str) -> None:
    """Raise Again if the answer to a GET is HTML or XML, unless the key ends in .html, .htm, .xhtml or .xml."""
    is_markup = str(answer.get("ContentType", "")).startswith(_MARKUP_TYPES)
    if is_markup and not key.lower().endswith(_MARKUP_ENDINGS):
        raise Again("a page of HTML or XML instead of the object", advice=_CHECK_PROXY)


def is_error_document(first_bytes: bytes) -> bool:
    """Return whether an object's first bytes are those of an error document of S3, `<Error>` in XML."""
    return _ERROR_DOCUMENT.match(first_bytes) is not None


def object_info(answer: dict[str, Any]) -> ObjectInfo:
    """Return the size and the writer's tag of an object, from the answer to a GET of all or of a part of it."""
    part = content_range(answer)
    # Without a range, the answer is the whole object.
    size = answer["ContentLength"] if part is None else part.size
    return ObjectInfo(size=size, writer_tag=answer["Metadata"].get(WRITER_TAG))


def content_range(answer: dict[str, Any]) -> ContentRange | None:
    """Return which part of an object an answer holds, from its header Content-Range; None if that is not valid."""
    match = _CONTENT_RANGE.fullmatch(str(answer.get("ContentRange", "")))
    if match is None:
        return None
    first, last, size = (int(group) for group in match.groups())
    return ContentRange(first=first, end=last + 1, size=size)


def pages(
    request: Callable[[dict[str, Any], Callable[[dict[str, Any]], None]], dict[str, Any]],
    arguments: dict[str, Any],
    entries_field: str,
    next_fields: dict[str, str],
    name_of: Callable[[dict[str, Any]], tuple[str, ...]],
) -> Iterator[dict[str, Any]]:
    """Yield the entries of a listing of S3, page by page; raise Again if the listing does not advance.

    `request(arguments, check)` fetches a page, and repeats this if `check(page)` raises Again. `next_fields` maps an
    argument of the next request to the field of the page that holds its value. `name_of` returns what identifies an
    entry. After Again, the caller must begin the listing anew. More than 10,000 pages (ten million entries) raise
    StoreError.
    """

    def check_page(page: dict[str, Any]) -> None:
        if page["IsTruncated"] and any(not page.get(field) for field in next_fields.values()):
            raise Again("a page of a listing without a token for the next one", advice=_CHECK_PROXY)

    seen: set[tuple[str, ...]] = set()
    num_empty = 0
    for _ in range(_MOST_PAGES):
        page = request(arguments, check_page)
        entries = page.get(entries_field, [])
        if entries and seen.issuperset(name_of(entry) for entry in entries):
            raise Again("a listing that repeats a page", advice=_CHECK_PROXY)
        num_empty = 0 if entries else num_empty + 1
        if num_empty > _EMPTY_PAGES:
            raise Again("a listing of empty pages without an end", advice=_CHECK_PROXY)
        for entry in entries:
            if name_of(entry) not in seen:
                seen.add(name_of(entry))
                yield entry
        if not page["IsTruncated"]:
            return
        arguments = {**arguments, **{argument: page[field] for argument, field in next_fields.items()}}
    raise StoreError(
        f"{arguments['Bucket']}/{arguments['Prefix']}: the listing has more than {_MOST_PAGES:,} pages; name a longer "
        f"prefix"
    )
