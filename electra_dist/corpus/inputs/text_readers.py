"""Read raw documents from files, in a fixed order and without losing a byte.

| format | a document is |
| --- | --- |
| txt | the lines up to a blank line |
| md | the whole file |
| jsonl, json | a JSON object |
| csv, tsv, parquet, arrow | the cell of a row in the column of the texts |
| wet | a `conversion` record of a WARC file (Common Crawl text) |
| tar, zip | what it is in the members with texts (`archives.py`); a text member is one document |

Guarantee: the same input files give the same documents in the same order, wherever the files are. Files are ordered
by their name below the input path. A damaged file (cut-off compression, broken parquet) ends the stream with an error
that names the file: a corpus is never silently smaller than its inputs. What is left out is counted (`Counts`).

How: a reader yields undecoded bytes (`RawDocument`); worker processes decode them (`text_decoding.py`). A file at a
URL is first downloaded to a temporary file, and failed requests are repeated.

Limits: a document is held in memory as a whole. Text is UTF-8, or UTF-16 with a byte order mark at the beginning of
the file; encodings are not guessed. A file at a URL needs its size
on the local disk while it is read.
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import io
import lzma
import os
import re
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow
import zstandard

from electra_dist.corpus.counts import MAX_NAMES, Counts
from electra_dist.corpus.inputs.archives import ARCHIVES, ArchiveReader, TextMember
from electra_dist.corpus.inputs.file_kinds import (
    MOST_DOCUMENT_BYTES,
    READ_BYTES,
    decompressed,
    ending_of,
    kind_of,
    lines_of,
    read_whole,
    stream_of,
)
from electra_dist.corpus.inputs.find_inputs import InputFile
from electra_dist.corpus.inputs.json_values import read_json
from electra_dist.corpus.inputs.table_files import NoTextColumn, read_arrow, read_csv, read_parquet
from electra_dist.corpus.inputs.text_decoding import RawDocument, SkippedDocument, Undecodable, decode
from electra_dist.errors import UserError
from electra_dist.store.atomic_files import open_regular
from electra_dist.store.interface import Store
from electra_dist.store.open_store import REMOTE_SCHEMES, open_store
from electra_dist.store.url_files import fetch_url

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
_TEXT_FORMATS = ("txt", "md", "json", "jsonl", "csv", "tsv")
_BLANK_LINE = re.compile(rb"\n[ \t\r\v\f]*\n")


class DocumentStream:
    """Iterable over the undecoded documents of input files, in order, which also counts what is read and left out.

    Iterate over an instance once, in one thread.
    """

    def __init__(
        self,
        files: Sequence[InputFile],
        text_field: str = "text",
        endpoint_url: str | None = None,
        *,
        first_file: int = 0,
        with_fields: bool = False,
    ) -> None:
        """Open no file yet. `text_field` names a table's column with the text; `with_fields` keeps other cells.

        `first_file` is the position of the first of these files among all inputs.
        """
        self.counts = Counts()  # complete when the stream has ended
        self._files = files
        self._text_field = text_field
        self._endpoint_url = endpoint_url
        self._first_file = first_file
        self._with_fields = with_fields

    def __iter__(self) -> Iterator[RawDocument]:
        """Yield the documents, each with the position of its file among the inputs and its own in the file.

        Raises UserError if a file cannot be read to its end, or if the column of the text is missing in a parquet or
        Arrow file, or in a table that the user gave by its name.
        """
        for position, file in enumerate(self._files, self._first_file):
            if not file.size:
                continue  # the search has counted it as left out
            try:
                for number, document in enumerate(self._documents_of_file(file)):
                    document.file = position
                    document.number = number
                    yield document
                self.counts.add_file(file.name, file.source, file.size)
            except NoTextColumn as error:
                self._skip_table(file, error)
            except DAMAGED_FILE_ERRORS as error:
                raise UserError(
                    f"{file.location}: cannot be read to its end ({error}); replace the file or leave it out"
                ) from None

    def _documents_of_file(self, file: InputFile) -> Iterator[RawDocument]:
        """Yield the documents of one file, decompressed but not decoded."""
        kind = kind_of(file.name)
        assert kind is not None
        with local_path(file, self._endpoint_url) as path, open_regular(path) as raw:
            stream = decompressed(raw, kind.compression)
            if kind.format in ARCHIVES:
                yield from self._documents_of_archive(file.name, stream, kind.format)
            else:
                yield from self._read(kind.format, stream)
            size = os.stat(path).st_size
        if size != file.size:
            raise UserError(
                f"{file.location}: has {size:,} bytes, but had {file.size:,} when the inputs were listed; run the "
                "same command again when the file is complete"
            )

    def _documents_of_archive(self, name: str, stream: io.BufferedIOBase, file_format: str) -> Iterator[RawDocument]:
        """Yield the documents of all members with texts; count tables without the text column as left out."""
        archive = ArchiveReader(name, self._text_field, self.counts)
        for member in archive.members(stream, file_format):
            if not member.data:
                archive.skip("empty_file", member.name)
                continue
            try:
                yield from self._documents_of_member(member)
            except NoTextColumn as error:
                archive.skip("no_text_column", member.name)
                self.counts.other_fields.update(error.text_columns)
                continue
            except DAMAGED_FILE_ERRORS as error:
                raise OSError(f"member {member.name}: {error}") from None
            self.counts.members[ending_of(member.name)] += 1

    def _documents_of_member(self, member: TextMember) -> Iterator[RawDocument]:
        """Yield the documents of one file in an archive.

        A .json member that cannot be parsed gives one document with its whole content. The decoding of that document
        then fails, and the build counts the document as broken JSON.
        """
        stream = decompressed(io.BytesIO(member.data), member.kind.compression)
        if member.kind.format != "json":
            yield from self._read(member.kind.format, stream)
            return
        text = read_whole(stream)
        try:
            values = list(self._read("json", io.BytesIO(text)))
        except (EOFError, OSError):
            values = [RawDocument(text, is_json=True)]
        yield from values

    def _read(self, file_format: str, stream: io.BufferedIOBase) -> Iterator[RawDocument]:
        if file_format in _TEXT_FORMATS and _begins_as_utf16(stream):
            stream = stream_of(_utf8_of_utf16(stream))
        return _read_format(file_format, stream, self._text_field, with_fields=self._with_fields)

    def _skip_table(self, file: InputFile, error: NoTextColumn) -> None:
        """Count a table without the text's column as left out, or raise UserError if it was meant to be read.

        A CSV or TSV table in an input folder is counted, because it may only describe the texts in the folder. A
        parquet or Arrow file, or a table that the user gave by its name, is an error.
        """
        if file.is_given or file.format in ("parquet", "arrow"):
            raise UserError(f"{file.location}: {error}") from None
        self.counts.skip_input("no_text_column", file.name)
        self.counts.other_fields.update(error.text_columns)


class TextStream:
    """Iterable over the decoded documents of input files, in order; those without a usable text are only counted.

    Iterate over an instance once, in one thread.
    """

    def __init__(
        self,
        files: Sequence[InputFile],
        text_field: str,
        endpoint_url: str | None = None,
        undecodable: Undecodable = "skip",
    ) -> None:
        """Open no file yet; `undecodable` is the config key `corpus.undecodable`, the rest as for `DocumentStream`."""
        self._files = files
        self._text_field = text_field
        self._undecodable = undecodable
        self._documents = DocumentStream(files, text_field, endpoint_url)
        self.counts = self._documents.counts  # of what has been read so far

    def __iter__(self) -> Iterator[tuple[RawDocument, str]]:
        """Yield each document with its text; raise UserError as `DocumentStream` does."""
        for document in self._documents:
            file = self._files[document.file]
            self.counts.of_source(file.source)["documents"] += 1
            try:
                text = decode(document, self._text_field, self._undecodable)
            except SkippedDocument as skipped:
                self.counts.skip_document(file.source, file.given_path, skipped.kind, document.size)
                self.counts.other_fields.update(skipped.other_fields)
                if len(self.counts.other_fields) > MAX_NAMES:
                    self.counts.forget_small_losses()
            else:
                yield document, text


def _begins_as_utf16(stream: io.BufferedIOBase) -> bool:
    """Return whether a stream begins with the byte order mark of UTF-16 (and not UTF-32), without reading from it."""
    if isinstance(stream, io.BytesIO):
        beginning = bytes(stream.getbuffer()[:4])
    else:
        assert isinstance(stream, io.BufferedReader)
        beginning = stream.peek(4)[:4]
    return beginning.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) and beginning != codecs.BOM_UTF32_LE


def _utf8_of_utf16(stream: io.BufferedIOBase) -> Iterator[bytes]:
    """Yield the text of a UTF-16 file as UTF-8; half a surrogate pair becomes bytes that are not UTF-8.

    Raises EOFError if the file ends within a character.
    """
    decoder = codecs.getincrementaldecoder("utf-16")("surrogatepass")
    is_at_end = False
    while not is_at_end:
        data = stream.read(READ_BYTES)
        is_at_end = not data
        try:
            text = decoder.decode(data, final=is_at_end)
        except UnicodeDecodeError:
            raise EOFError("the UTF-16 text is cut off within a character") from None
        yield text.encode("utf-8", "surrogatepass")


@contextlib.contextmanager
def local_path(file: InputFile, endpoint_url: str | None) -> Iterator[Path]:
    """Provide a local path of an input file; one at a URL is downloaded, and deleted again after the `with` block."""
    if not file.is_remote:
        yield Path(file.location)
        return
    with tempfile.TemporaryDirectory(prefix="electra-input-") as folder:
        path = Path(folder) / "input"
        if file.location.startswith(REMOTE_SCHEMES):
            store = _store_of_inputs(file.location.removesuffix(f"/{file.name}"), endpoint_url)
            store.fetch(file.name, path)
        else:
            fetch_url(file.location, file.size, file.version, path)
        yield path


@functools.lru_cache(maxsize=1)
def _store_of_inputs(url: str, endpoint_url: str | None) -> Store:
    """Open the folder or bucket of an input file as a store, which is kept for the next file of the same place."""
    return open_store(url, endpoint_url)


def _read_format(
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
        text = read_whole(stream).strip()
        if text:
            yield RawDocument(text, is_json=False)
    else:
        yield from _read_txt(stream)


def _read_txt(stream: io.BufferedIOBase) -> Iterator[RawDocument]:
    """Yield the blocks of text between blank lines, stripped of white space.

    The file is read piece by piece. The text after the last blank line of a piece is an unfinished document, to which
    the next piece is joined. A piece is at least as large as the unfinished text, so that the time stays linear even
    for a huge document. Raises OSError for a document of more than 256 MiB.
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
        body = _read_warc_body(stream, headers.get(b"content-length", b""))
        if headers.get(b"warc-type") == b"conversion":
            url = headers.get(b"warc-target-uri", b"").decode("utf-8", "replace")
            yield RawDocument(body, is_json=False, fields={"url": url} if with_fields else None)


def _read_warc_headers(stream: io.BufferedIOBase) -> dict[bytes, bytes]:
    """Read the headers of a WARC record and the empty line after them; return {b"warc-type": b"conversion", ...}.

    Raises OSError or EOFError if they are too long or cut off.
    """
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


def _read_warc_body(stream: io.BufferedIOBase, content_length: bytes) -> bytes:
    """Read the body of a WARC record, from the value of its header Content-Length (b"" if it has none).

    Raises OSError for a length that is missing, no number or more than 256 MiB, EOFError if the body is cut off.
    """
    if not content_length.isdigit() or len(content_length) > _MOST_LENGTH_DIGITS:
        raise OSError(f"a WARC record has Content-Length {content_length[:40]!r} where a number of bytes is expected")
    body_length = int(content_length)
    if body_length > MOST_DOCUMENT_BYTES:
        raise OSError(f"a WARC record of more than {MOST_DOCUMENT_BYTES >> 20} MiB")
    body = stream.read(body_length)
    if len(body) < body_length:
        raise EOFError(f"the last WARC record is cut off: it has {len(body)} of {body_length} bytes")
    return body
