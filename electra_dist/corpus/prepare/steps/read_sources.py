"""Step of datatrove that reads the documents of a task's files, in the formats of `corpus build` and as web pages.

Guarantee: a document becomes text or is counted with its reason. A damaged file ends the preparation with one line
that names it. A document has the id of its own record or, without one, SOURCE/FILE#NUMBER, where the number counts the
documents of the file from 0. The other fields of its record are in its metadata.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep

from electra_dist.corpus.inputs.skipped_inputs import encodable
from electra_dist.corpus.prepare.prepare_config import PrepareConfig, SourceSection
from electra_dist.corpus.prepare.source_plan import PlannedFile, read_plan
from electra_dist.corpus.prepare.steps.drop_recorder import DropRecorder
from electra_dist.corpus.prepare.steps.web_pages import PAGE_FORMATS, read_pages
from electra_dist.corpus.text_decoding import DecodedText, RawDocument, SkippedDocument, decode_counted, name_of_value
from electra_dist.corpus.text_readers import DocumentStream

IS_HTML = "is_html"  # key of a document's metadata until its text is extracted
# Keys of metadata that a preparation sets itself; fields of these names in a record are kept under RECORD.
RECORD = "record"
_RESERVED = {RECORD, "source", "license", "file", "url", IS_HTML, "filter_reason"}
_RESERVED_BY_LANGUAGE_FILTER = {"language", "language_script", "language_score"}
_MAX_DEPTH = 100  # of a value in metadata; what is deeper is left out


class ReadSources(PipelineStep):
    """First step of a preparation: reads the documents of the files that plan.json gives to a task."""

    name = "sources"
    type = "READER"

    def __init__(self, config: PrepareConfig, recorder: DropRecorder) -> None:
        """Store the settings and the counter. plan.json is read only when a task begins."""
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
            for number, page in enumerate(self._pages(file, source)):
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

    def _pages(self, file: PlannedFile, source: SourceSection) -> Iterator[_Read]:
        input_file = file.input_file(self._endpoint_url)
        if file.format in PAGE_FORMATS:
            for page in read_pages(input_file):
                yield _Read(page.text, page.dropped, page.is_html, url=page.url)
            return
        for raw in DocumentStream([input_file], source.text_field, with_fields=True):
            try:
                decoded = decode_counted(raw, source.text_field, self._undecodable)
            except SkippedDocument as skipped:
                yield _Read("", skipped.kind)
                continue
            yield _read_record(raw, decoded, source)


class _Read(NamedTuple):
    """Text and fields of one document; `dropped` is the reason why the document is unusable, None if it is usable."""

    text: str
    dropped: str | None = None
    is_html: bool = False
    url: str | None = None
    id: str | None = None
    fields: Mapping[str, Any] = {}  # of its record, without the text and the id


def _read_record(raw: RawDocument, decoded: DecodedText, source: SourceSection) -> _Read:
    """Return a decoded document with the address, id and other fields that its JSON record or table row holds."""
    fields: dict[str, Any] = {}
    if raw.is_json:
        assert raw.data is not None
        fields = json.loads(raw.data.decode("utf-8-sig", "replace"))
        del fields[source.text_field]
    elif raw.fields is not None:
        fields = dict(raw.fields)
    url = fields.get(source.url_field) if source.url_field else None
    own_id = decoded.names.id if source.text_field != "id" else None
    if own_id:
        del fields["id"]
    return _Read(decoded.text, url=name_of_value(url) if isinstance(url, str) else None, id=own_id, fields=fields)


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
    hidden = {key: value for key, value in values.items() if key in reserved and value is not None}
    inner_hidden = {key: value for key, value in inner.items() if key in reserved or key in values}
    if inner_hidden:
        hidden["metadata"] = inner_hidden
    beside = {key: value for key, value in {**inner, **values}.items() if key not in reserved}
    return {**beside, **({RECORD: hidden} if hidden else {}), **set_here}


def _json_value(value: Any, depth: int = 0) -> Any:
    """Convert a value to one that JSON can hold: bytes, infinities and NaN become None, other types become text."""
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
