"""Step of datatrove that reads the documents of a task's files, in the formats of `corpus build` and as web pages.

Guarantee: a document becomes text or is counted with its reason. A damaged file ends the preparation with one line
that names it. A document's id is SOURCE/FILE#NUMBER, where the number counts the documents of the file from 0.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep

from electra_dist.corpus.prepare.prepare_config import PrepareConfig, SourceSection
from electra_dist.corpus.prepare.source_plan import PlannedFile, read_plan
from electra_dist.corpus.prepare.steps.drop_recorder import DropRecorder
from electra_dist.corpus.prepare.steps.web_pages import PAGE_FORMATS, read_pages
from electra_dist.corpus.text_decoding import RawDocument, SkippedDocument, decode, name_of_value
from electra_dist.corpus.text_readers import DocumentStream

IS_HTML = "is_html"  # key of a document's metadata until its text is extracted


class ReadSources(PipelineStep):
    """Reader of the files that plan.json gives to a task."""

    name = "sources"
    type = "READER"

    def __init__(self, config: PrepareConfig, recorder: DropRecorder) -> None:
        """Prepare to read; plan.json is read when a task begins.

        Args:
            config: the preparation.
            recorder: receives the counts.
        """
        super().__init__()
        self._work = Path(config.work)
        self._endpoint_url = config.endpoint_url
        self._undecodable = config.undecodable
        self._source_of_name = {source.name: source for source in config.sources}
        self._recorder = recorder

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Yield the documents of task `rank`.

        Raises:
            UserError: a file is damaged, or a table has no column of text.
            StoreError: a file cannot be downloaded.
        """
        self._recorder.begin()
        for file in read_plan(self._work).files_of_task(rank):
            source = self._source_of_name[file.source]
            for number, (text, details, reason) in enumerate(self._texts(file, source)):
                if reason is not None:
                    self._recorder.add_unreadable(source.name, reason)
                    continue
                metadata = {"source": source.name, "license": source.license, "file": file.name, **details}
                document = Document(text, f"{source.name}/{file.name}#{number}", metadata=metadata)
                self._recorder.add_read(document)
                yield document

    def _texts(self, file: PlannedFile, source: SourceSection) -> Iterator[tuple[str, dict[str, Any], str | None]]:
        """Yield (text, further metadata, None) of each document of a file, or ("", {}, reason) for an unusable one."""
        input_file = file.input_file(self._endpoint_url)
        if file.format in PAGE_FORMATS:
            for page in read_pages(input_file):
                details: dict[str, Any] = {IS_HTML: True} if page.is_html else {}
                yield page.text, _with_url(details, page.url), page.dropped
            return
        for raw in DocumentStream([input_file], source.text_field):
            try:
                text = decode(raw, source.text_field, self._undecodable)
            except SkippedDocument as skipped:
                yield "", {}, skipped.kind
                continue
            yield text, _with_url({}, _url_of(raw, source.url_field)), None


def _url_of(raw: RawDocument, url_field: str | None) -> str | None:
    """Return the address in a JSON document that has been decoded before, as encodable text; None if it has none."""
    if not raw.is_json or url_field is None or raw.data is None:
        return None
    url = json.loads(raw.data.decode("utf-8-sig", "replace")).get(url_field)
    return name_of_value(url) if isinstance(url, str) else None


def _with_url(details: dict[str, Any], url: str | None) -> dict[str, Any]:
    """Return the metadata with the address of the document, if it has one."""
    return {**details, "url": url} if url else details
