"""Steps of datatrove that read the documents of a task's files, also web pages, and take the main text from pages.

Guarantee: a document or page becomes text or is counted with its reason. A damaged file ends the preparation with one
line that names it. A document has the id of its own record or, without one, SOURCE/FILE#NUMBER, where the number
counts the documents of the file from 0. The other fields of its record are in its metadata. Records of a WARC file
that hold no page of the crawl (requests, metadata) are passed over.

How: `DocumentStream` reads the files that a build reads, too, and warcio WARC files. An HTML page that is not UTF-8 is
decoded with the encoding that trafilatura detects. trafilatura then takes the main text from it, in a process of its
own with a time limit; a page without text is counted as `no_text`, `timeout`, `crash` (the process died, as for lack
of memory) or `error`. The text depends on the page alone: the deduplication of trafilatura, which remembers earlier
pages, is off.

Limits: which pages exceed the time limit depends on the machine and its load. Only then may a repetition differ.
"""

from __future__ import annotations

import ctypes
import io
import json
import math
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.extractors.base import ExtractorSandbox
from trafilatura import extract
from trafilatura.utils import decode_file
from warcio.archiveiterator import ArchiveIterator
from warcio.exceptions import ArchiveLoadFailed

from electra_dist.corpus.inputs.file_kinds import decompressed, encodable, kind_of, read_whole
from electra_dist.corpus.inputs.find_inputs import InputFile
from electra_dist.corpus.inputs.text_decoding import (
    DecodedText,
    RawDocument,
    SkippedDocument,
    decode_counted,
    name_of_value,
    path_of_field,
)
from electra_dist.corpus.inputs.text_readers import DAMAGED_FILE_ERRORS, DocumentStream, local_path
from electra_dist.corpus.prepare.document_files import DropRecorder
from electra_dist.corpus.prepare.prepare_config import ExtractionSection, PrepareConfig, SourceSection
from electra_dist.corpus.prepare.source_plan import read_plan
from electra_dist.errors import UserError
from electra_dist.store.atomic_files import open_regular

IS_HTML = "is_html"  # key of a document's metadata until its text is extracted
# Keys of metadata that a preparation sets itself; fields of these names in a record are kept under RECORD.
RECORD = "record"
_RESERVED = {RECORD, "source", "license", "file", "url", IS_HTML, "filter_reason"}
_RESERVED_BY_LANGUAGE_FILTER = {"language", "language_script", "language_score"}
_MAX_DEPTH = 100  # of a value in metadata; what is deeper is left out
PAGE_FORMATS = ("warc", "html")
_HTML_TYPES = ("text/html", "application/xhtml+xml")


class ReadSources(PipelineStep):
    """First step of a preparation: reads the documents of the files that plan.json gives to a task."""

    name = "sources"
    type = "READER"

    def __init__(self, config: PrepareConfig, recorder: DropRecorder) -> None:
        """Store the settings. A task looks up its files in plan.json when it begins."""
        super().__init__()
        self._work = Path(config.work)
        self._endpoint_url = config.endpoint_url
        self._undecodable = config.undecodable
        self._source_of_name = {source.name: source for source in config.sources}
        self._recorder = recorder
        self._reserved = _RESERVED | (_RESERVED_BY_LANGUAGE_FILTER if config.filters.language else set())

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Yield the documents of task `rank` that have a usable text, and count the others."""
        self._recorder.begin()
        for file in read_plan(self._work).files_of_task(rank):
            source = self._source_of_name[file.source]
            name = encodable(file.name)
            for number, page in enumerate(_naming_key(self._pages(file, source))):
                if page.dropped is not None:
                    self._recorder.add_unreadable(source.name, page.dropped)
                    continue
                set_here = {"source": source.name, "license": source.license, "file": name}
                if page.url:
                    set_here["url"] = page.url
                metadata = metadata_of_record(page.fields, set_here, self._reserved)
                if page.is_html:
                    metadata[IS_HTML] = True
                document = Document(page.text, page.id or f"{source.name}/{name}#{number}", metadata=metadata)
                self._recorder.add_read(document)
                yield document

    def _pages(self, file: InputFile, source: SourceSection) -> Iterator[SourceDocument]:
        """Yield every page or document of a file, decoded; an unusable one has the reason in `dropped`."""
        if file.format in PAGE_FORMATS:
            yield from read_pages(file, self._endpoint_url)
            return
        documents = DocumentStream([file], source.text_field, self._endpoint_url, with_fields=True)
        for raw in documents:
            try:
                decoded = decode_counted(raw, source.text_field, self._undecodable)
            except SkippedDocument as skipped:
                self._recorder.add_fields(source.name, skipped.other_fields)
                yield SourceDocument("", skipped.kind)
                continue
            if file.format == "wet":
                assert raw.fields is not None
                yield SourceDocument(decoded.text, url=raw.fields["url"] or None)
            else:
                yield _read_record(raw, decoded, source)
        self._recorder.add_fields(source.name, documents.counts.other_fields)


def _naming_key(pages: Iterator[SourceDocument]) -> Iterator[SourceDocument]:
    """Yield `pages`; if an error advises the option `--text-field`, advise the source's key `text_field` instead."""
    try:
        yield from pages
    except UserError as error:
        option = "set --text-field "
        if option not in str(error):
            raise  # such as StoreAway, which has an exit code of its own
        raise UserError(str(error).replace(option, "set the source's text_field ")) from None


class SourceDocument(NamedTuple):
    """One document or page of a source as it was read: its text and its fields, or why it is unusable."""

    text: str  # or the HTML of a page
    dropped: str | None = None
    is_html: bool = False
    url: str | None = None
    id: str | None = None
    fields: Mapping[str, Any] = {}  # of its record, without the text and the id


def _read_record(raw: RawDocument, decoded: DecodedText, source: SourceSection) -> SourceDocument:
    """Return a decoded document with the address, id and other fields that its JSON record or table row holds."""
    fields: dict[str, Any] = {}
    if raw.is_json:
        assert raw.data is not None
        fields = json.loads(raw.data.decode("utf-8-sig", "replace"))
        *path, name = path_of_field(source.text_field, fields)
        inner = fields
        for outer_name in path:
            inner = inner[outer_name]
        del inner[name]
    elif raw.fields is not None:
        fields = dict(raw.fields)
    url = fields.get(source.url_field) if source.url_field else None
    own_id = decoded.names.id if source.text_field != "id" else None
    if own_id:
        del fields["id"]
    address = name_of_value(url) if isinstance(url, str) else None
    return SourceDocument(decoded.text, url=address, id=own_id, fields=fields)


def metadata_of_record(fields: Mapping[str, Any], set_here: Mapping[str, Any], reserved: set[str]) -> dict[str, Any]:
    """Return the metadata of a document: the values that the preparation sets, and the other fields of its record.

    The fields within the record's own `metadata` are put beside the others, as in datatrove. Two kinds of fields are
    kept under the key `record` instead: those with a name in `reserved`, and fields of `metadata` with a name that the
    record uses, too. `reserved` has all names that the preparation may set, `set_here` the values that it sets for
    this document.
    """
    added = {key: value for key, value in fields.items() if key not in set_here or value != set_here[key]}
    values = {key: _json_value(value) for key, value in added.items()}
    inner = values.pop("metadata") if isinstance(values.get("metadata"), dict) else {}
    metadata = {key: value for key, value in {**inner, **values}.items() if key not in reserved}
    hidden = {key: value for key, value in values.items() if key in reserved and value is not None}
    hidden_inner = {key: value for key, value in inner.items() if key in reserved or key in values}
    if hidden_inner:
        hidden["metadata"] = hidden_inner
    if hidden:
        metadata[RECORD] = hidden
    return {**metadata, **set_here}


def _json_value(value: Any, depth: int = 0) -> Any:
    """Convert a value to one that JSON can hold: bytes, infinities and NaN become None, other types become text.

    `depth` is the number of lists and dictionaries around the value; those more than 100 deep become None.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bytes) or depth > _MAX_DEPTH:
        return None
    if isinstance(value, dict):
        return {str(key): _json_value(part, depth + 1) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(part, depth + 1) for part in value]
    return str(value)


def read_pages(file: InputFile, endpoint_url: str | None = None) -> Iterator[SourceDocument]:
    """Yield the pages of an HTML or WARC file in order; raise UserError if it is damaged or cut off."""
    kind = kind_of(file.name, with_pages=True)
    assert kind is not None and kind.format in PAGE_FORMATS
    if not file.size:
        return  # the search has counted it as left out
    try:
        with local_path(file, endpoint_url) as path, open_regular(path) as raw:
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
    records = iter(ArchiveIterator(_CountedStream(stream)))
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


def _page_of_record(record: Any) -> SourceDocument | None:
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
        return SourceDocument("", "not_html", is_html=True, url=url)
    if not headers.get_statuscode().startswith("2"):
        return SourceDocument("", "http_status", is_html=True, url=url)
    return _decoded(body, is_html=True, url=url)


def _whole_body(record: Any) -> bytes:
    """Return a WARC record's body, freed of HTTP encodings such as gzip; raise EOFError if the body is cut off."""
    body = read_whole(record.content_stream())
    if record.raw_stream.limit > 0:  # bytes of the record that the file does not have
        raise EOFError(f"the last WARC record is cut off: {record.raw_stream.limit} bytes are missing")
    return body


def _decoded(data: bytes, *, is_html: bool, url: str | None) -> SourceDocument:
    """Decode a page; if it has no text, its `dropped` is "undecodable" or "empty"."""
    if not data.strip():
        return SourceDocument("", "empty", is_html, url)
    try:
        return SourceDocument(data.decode("utf-8-sig"), None, is_html, url)
    except UnicodeDecodeError:
        if not is_html:
            return SourceDocument("", "undecodable", is_html, url)
    text = decode_file(data)
    return SourceDocument(text, None if text and text.strip() else "undecodable", is_html, url)


class _CountedStream(io.RawIOBase):
    """Stream that counts the bytes read from a decompressed file, for warcio, which needs only `read` and `tell`."""

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


_STEP = "extraction"
_PR_SET_PDEATHSIG = 1  # from linux/prctl.h


class ExtractText(PipelineStep):
    """Step that replaces HTML pages by their main text; documents that are text already pass unchanged."""

    name = "trafilatura"
    type = "EXTRACTOR"

    def __init__(self, settings: ExtractionSection, recorder: DropRecorder) -> None:
        """Store the settings. The process that extracts text starts with the first page."""
        super().__init__()
        self._settings = settings
        self._recorder = recorder

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Yield the documents of `data` with HTML replaced by its text; drop and count pages that give no text."""
        with ExtractorSandbox(self._settings.timeout_s) as sandbox:
            for document in data:
                if not document.metadata.pop(IS_HTML, False):
                    yield document
                    continue
                text, reason = self._extract(sandbox, document.text)
                if reason is not None:
                    self._recorder.drop(_STEP, reason, document)
                    continue
                document.text = text
                yield document

    def _extract(self, sandbox: ExtractorSandbox, html: str) -> tuple[str, str | None]:
        """Return the main text of a page and None or, if the page is to be dropped, "" and the reason."""
        try:
            text = sandbox.process_document(html, self.extract)
        except TimeoutError:
            return "", "timeout"
        except EOFError:
            return "", "crash"
        if text is None:
            return "", "error"
        return (text, None) if text.strip() else ("", "no_text")

    def extract(self, html: str) -> str | None:
        """Return the main text of a page, "" if it has none; None if trafilatura fails. Runs in a child process.

        datatrove first calls this with an empty page. The child process then asks the kernel to kill it when its
        parent ends.
        """
        if not html:
            _die_with_parent()
            return ""
        try:
            text = extract(
                html,
                favor_precision=self._settings.favor == "precision",
                favor_recall=self._settings.favor == "recall",
                include_comments=False,
                deduplicate=False,
            )
        except (ValueError, TypeError, AttributeError, LookupError, RecursionError, AssertionError):
            return None  # a fault of the extractor on a broken page; the page is counted
        return text or ""


def _die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends; this works on Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
