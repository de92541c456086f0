"""Read the documents of one file by its format, undecoded.

| format | a document is |
| --- | --- |
| txt | the lines up to a blank line |
| md | the whole file |
| jsonl, json | a JSON object |
| csv, tsv, parquet, arrow | the cell of a row in the column of the texts |
| wet | a `conversion` record of a WARC file (Common Crawl text) |

Archives are read by `archives.py`.
"""

from __future__ import annotations

import io
import lzma
import re
import tarfile
import zipfile
import zlib
from collections.abc import Iterator

import pyarrow
import zstandard

from electra_dist.corpus.inputs.decompression import MOST_DOCUMENT_BYTES, READ_BYTES, lines_of, read_whole
from electra_dist.corpus.inputs.json_values import read_json
from electra_dist.corpus.inputs.table_files import read_arrow, read_csv, read_parquet
from electra_dist.corpus.inputs.text_decoding import RawDocument

# Errors that the readers of the formats raise for a file that is damaged or cut off.
DAMAGED_FILE_ERRORS = (
    EOFError,
    OSError,
    zlib.error,
    lzma.LZMAError,
    zstandard.ZstdError,
    pyarrow.ArrowException,
    tarfile.TarError,
    zipfile.BadZipFile,
)
_MOST_HEADER_BYTES = 1 << 16  # of all headers of a WARC record
_MOST_LENGTH_DIGITS = 15  # of Content-Length; Python converts no number of more than 4,300
_BLANK_LINE = re.compile(rb"\n[ \t\r\v\f]*\n")


def read_format(
    file_format: str, stream: io.BufferedIOBase, text_field: str, *, with_fields: bool = False
) -> Iterator[RawDocument]:
    """Yield the undecoded documents of one decompressed file; a CSV or TSV file closes the stream at its end.

    `file_format` is a value of `FORMATS`, but no archive. `text_field` is the column of a table that holds the text
    (NoTextColumn if it is missing), and `with_fields` keeps the other cells, too, or the address (`url`) of a WET
    record. A JSON record is yielded whole, because `decode` finds its text. Raises one of `DAMAGED_FILE_ERRORS` for a
    file that is damaged or cut off.
    """
    if file_format == "jsonl":
        for line in lines_of(stream):
            yield RawDocument(line, is_json=True)
    elif file_format == "json":
        for value in read_json(stream):
            yield RawDocument(value, is_json=True)
    elif file_format in ("csv", "tsv"):
        yield from read_csv(stream, text_field, with_fields=with_fields, is_tsv=file_format == "tsv")
    elif file_format == "parquet":
        yield from read_parquet(stream, text_field, with_fields=with_fields)  # type: ignore[arg-type]
    elif file_format == "arrow":
        yield from read_arrow(stream, text_field, with_fields=with_fields)  # type: ignore[arg-type]
    elif file_format == "wet":
        yield from _read_wet(stream, with_fields=with_fields)
    elif file_format == "md":
        yield from _read_whole(stream)
    else:
        yield from _read_txt(stream)


def _read_whole(stream: io.BufferedIOBase) -> Iterator[RawDocument]:
    """Yield the whole file as one document, stripped of ASCII white space; yield nothing if no text is left."""
    text = read_whole(stream).strip()
    if text:
        yield RawDocument(text, is_json=False)


def _read_txt(stream: io.BufferedIOBase) -> Iterator[RawDocument]:
    """Yield the blocks of text between blank lines, stripped of white space.

    The file is read piece by piece. The text after the last blank line of a piece is an unfinished document, to which
    the next piece is joined. A piece is at least as large as the unfinished text, so that the time stays linear even
    for a huge document.
    """
    unfinished = b""
    while block := stream.read(max(READ_BYTES, len(unfinished))):
        *documents, unfinished = _BLANK_LINE.split(unfinished + block)
        if len(unfinished) > MOST_DOCUMENT_BYTES:
            raise OSError(f"more than {MOST_DOCUMENT_BYTES >> 20} MiB of text without a blank line")
        for document in documents:
            text = document.strip()
            if text:
                yield RawDocument(text, is_json=False)
    text = unfinished.strip()
    if text:
        yield RawDocument(text, is_json=False)


def _read_wet(stream: io.BufferedIOBase, *, with_fields: bool) -> Iterator[RawDocument]:
    """Yield the bodies of the `conversion` records of a WARC stream; these hold the plain text of web pages.

    Source: ISO 28500. A record is a version line such as `WARC/1.0`, headers, an empty line and a body of
    Content-Length bytes. Two empty lines follow it.
    """
    while version_line := stream.readline(_MOST_HEADER_BYTES):
        if not version_line.strip():
            continue  # an empty line after the record before
        if not version_line.startswith(b"WARC/"):
            raise OSError(f"expected the line `WARC/...` at the start of a record, found {version_line[:40]!r}")
        headers = _read_warc_headers(stream)
        length_header = headers.get(b"content-length", b"")
        if not length_header.isdigit() or len(length_header) > _MOST_LENGTH_DIGITS:
            raise OSError(
                f"a WARC record has Content-Length {length_header[:40]!r} where a number of bytes is expected"
            )
        body_length = int(length_header)
        if body_length > MOST_DOCUMENT_BYTES:
            raise OSError(f"a WARC record of more than {MOST_DOCUMENT_BYTES >> 20} MiB")
        body = stream.read(body_length)
        if len(body) < body_length:
            raise EOFError(f"the last WARC record is cut off: it has {len(body)} of {body_length} bytes")
        if headers.get(b"warc-type") == b"conversion":
            url = headers.get(b"warc-target-uri", b"").decode("utf-8", "replace")
            yield RawDocument(body, is_json=False, fields={"url": url} if with_fields else None)


def _read_warc_headers(stream: io.BufferedIOBase) -> dict[bytes, bytes]:
    """Read the headers of a WARC record and the empty line after them; return {b"warc-type": b"conversion", ...}."""
    headers: dict[bytes, bytes] = {}
    num_bytes_left = _MOST_HEADER_BYTES
    while line := stream.readline(num_bytes_left + 1):
        num_bytes_left -= len(line)
        if num_bytes_left < 0:
            raise OSError(f"the headers of a WARC record have more than {_MOST_HEADER_BYTES} bytes")
        if not line.strip():
            return headers
        name, _, value = line.partition(b":")
        headers[name.strip().lower()] = value.strip()
    raise EOFError("the last WARC record is cut off within its headers")
