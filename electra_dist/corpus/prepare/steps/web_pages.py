"""Read pages from HTML files and from WARC files (WET included) of a crawl.

Guarantee: a file that is damaged or cut off ends the reading with an error. Records that hold no page of the crawl
(requests, metadata) are passed over; pages that cannot be used are yielded with the reason.

How: warcio reads the records. An HTML page that is not UTF-8 is decoded with the encoding that trafilatura detects.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any, NamedTuple

from trafilatura.utils import decode_file
from warcio.archiveiterator import ArchiveIterator
from warcio.exceptions import ArchiveLoadFailed

from electra_dist.corpus.inputs.decompression import decompressed, read_whole
from electra_dist.corpus.inputs.file_kinds import kind_of
from electra_dist.corpus.inputs.find_inputs import InputFile
from electra_dist.corpus.inputs.formats import DAMAGED_FILE_ERRORS
from electra_dist.corpus.text_readers import local_path
from electra_dist.errors import UserError
from electra_dist.store.regular_files import open_regular

PAGE_FORMATS = ("warc", "wet", "html")
_HTML_TYPES = ("text/html", "application/xhtml+xml")


class Page(NamedTuple):
    """One page: HTML, or the plain text that the crawl holds; `dropped` says why the page is unusable, else None."""

    text: str
    is_html: bool
    url: str | None
    dropped: str | None = None


def read_pages(file: InputFile) -> Iterator[Page]:
    """Yield the pages of an HTML, WARC or WET file in order; raise UserError if it is damaged or cut off."""
    kind = kind_of(file.name, with_pages=True)
    assert kind is not None and kind.format in PAGE_FORMATS
    try:
        with local_path(file) as path, open_regular(path) as raw:
            stream = decompressed(raw, kind.compression)
            if kind.format == "html":
                yield _decoded(read_whole(stream), is_html=True, url=None)
                return
            for record in _records(stream):
                page = _page_of_record(record)
                if page is not None:
                    yield page
    except (*DAMAGED_FILE_ERRORS, ArchiveLoadFailed) as error:
        raise UserError(
            f"{file.location}: cannot be read to its end ({error}); replace the file or leave it out"
        ) from None


def _records(stream: io.BufferedIOBase) -> Iterator[Any]:
    """Yield the records of a decompressed WARC file; raise OSError for a damaged record on which warcio fails."""
    records = iter(ArchiveIterator(_CheckedStream(stream)))
    while True:
        try:
            record = next(records)
        except StopIteration:
            return
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise OSError(f"a WARC record is damaged: {error}") from None
        if record.length is None:
            raise OSError("a WARC record has no Content-Length")
        yield record


def _page_of_record(record: Any) -> Page | None:
    """Return the page of a WARC record; None for a record that is no page, such as a request."""
    url = record.rec_headers.get_header("WARC-Target-URI")
    if record.rec_type == "conversion":
        return _decoded(_whole_body(record), is_html=False, url=url)
    if record.rec_type != "response":
        return None
    body = _whole_body(record)
    headers = record.http_headers
    content_type = (headers.get_header("Content-Type") or "") if headers else ""
    if headers is None or content_type.partition(";")[0].strip().lower() not in _HTML_TYPES:
        return Page("", is_html=True, url=url, dropped="not_html")
    if not headers.get_statuscode().startswith("2"):
        return Page("", is_html=True, url=url, dropped="http_status")
    return _decoded(body, is_html=True, url=url)


def _whole_body(record: Any) -> bytes:
    """Return a WARC record's body, freed of HTTP encodings such as gzip; raise EOFError if the body is cut off."""
    body = read_whole(record.content_stream())
    if record.raw_stream.limit > 0:  # bytes of the record that the file does not have
        raise EOFError(f"the last WARC record is cut off: {record.raw_stream.limit} bytes are missing")
    return body


def _decoded(data: bytes, *, is_html: bool, url: str | None) -> Page:
    """Decode a page. Without text, the `dropped` of the returned page is "undecodable" or "empty"."""
    if not data.strip():
        return Page("", is_html, url, "empty")
    try:
        return Page(data.decode("utf-8-sig"), is_html, url)
    except UnicodeDecodeError:
        if not is_html:
            return Page("", is_html, url, "undecodable")
    text = decode_file(data)
    return Page(text, is_html, url, None if text and text.strip() else "undecodable")


class _CheckedStream(io.RawIOBase):
    """Decompressed file as a stream for warcio, which needs only the methods `read` and `tell`."""

    def __init__(self, stream: io.BufferedIOBase) -> None:
        self._stream = stream
        self._position = 0

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size)
        self._position += len(data)
        return data

    def tell(self) -> int:
        """Return the number of decompressed bytes that were read."""
        return self._position
