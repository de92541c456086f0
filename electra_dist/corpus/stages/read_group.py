"""Stage 1 of a corpus build: read a group of input files, and write their documents to spill files.

Guarantee: every document of the group is in exactly one spill file of the group, undecoded. The record of the group is
written after the spill files.

Limits: a worker holds the documents of one spill file in memory, `spill_bytes`, and once more while it is written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from electra_dist.corpus.inputs.find_inputs import InputFile
from electra_dist.corpus.report.read_counts import of_stream
from electra_dist.corpus.stages.build_records import BuildRecords, ReadGroup
from electra_dist.corpus.stages.document_order import document_key
from electra_dist.corpus.stages.input_groups import InputGroup
from electra_dist.corpus.stages.spill_file import SPILLS_FOLDER, OrderedDocument, write_spill
from electra_dist.corpus.text_decoding import RawDocument
from electra_dist.corpus.text_readers import DocumentStream
from electra_dist.store.interface import Store
from electra_dist.store.open_store import open_store

_DOCUMENT_BYTES = 64  # added to the size of every document, so that many empty documents fill a spill file, too


@dataclass(frozen=True, kw_only=True)
class ReadSettings:
    """What a worker needs to read groups of input files."""

    output: str  # folder or s3:// prefix of the corpus
    endpoint_url: str | None  # S3 endpoint of the output
    files: list[InputFile]  # all inputs of the build
    text_field: str
    order_seed: int  # of the order of the documents
    spill_bytes: int  # bytes of documents at which a spill file is complete
    with_ids: bool  # whether spill files keep the ids of documents from a table's column `id`, for the origin files


class ReadTask(NamedTuple):
    """A group of input files for a worker to read, or only to check for changes."""

    group: InputGroup
    is_check: bool  # only compute the record; neither it nor a spill file is written


def start_reading(settings: ReadSettings) -> Callable[[ReadTask], ReadGroup]:
    """Return a function that reads a group of input files, writes its documents to spill files and records the group.

    That function raises UserError if a file cannot be read to its end, or if a table has no column of text.
    """
    store = open_store(settings.output, settings.endpoint_url)
    records = BuildRecords(store)

    def read(task: ReadTask) -> ReadGroup:
        group = task.group
        stream = DocumentStream([settings.files[position] for position in group.files], settings.text_field)
        writer = _SpillWriter(store, group.number, settings.spill_bytes)
        digest = blake2b(digest_size=16)
        num_documents = 0
        source_bytes: Counter[str] = Counter()
        for place, number, read_document in stream.numbered():
            document = read_document if settings.with_ids else read_document._replace(id=None)
            num_documents += 1
            source_bytes[document.source] += len(document.data or b"")
            _add_to_digest(digest, document)
            if not task.is_check:
                file = group.files[place]
                writer.add(OrderedDocument(document_key(settings.order_seed, file, number), file, number, document))
        writer.finish()
        record = ReadGroup(
            number=group.number,
            files_digest=group.digest,
            modified=group.modified,
            documents_digest=digest.hexdigest(),
            spills=writer.names,
            documents=num_documents,
            source_bytes=dict(sorted(source_bytes.items())),
            counts=of_stream(stream.counts),
        )
        if not task.is_check:
            records.record_group(record)
        return record

    return read


class _SpillWriter:
    """Writer of an input group's documents to intermediate (spill) files of about `spill_bytes` of documents each."""

    def __init__(self, store: Store, group: int, spill_bytes: int) -> None:
        self.names: list[str] = []  # keys of the files that are written
        self._store = store
        self._group = group
        self._spill_bytes = spill_bytes
        self._documents: list[OrderedDocument] = []
        self._size = 0

    def add(self, document: OrderedDocument) -> None:
        self._documents.append(document)
        self._size += len(document.document.data or b"") + _DOCUMENT_BYTES
        if self._size >= self._spill_bytes:
            self.finish()

    def finish(self) -> None:
        """Write the documents that are in no file yet, if there are any."""
        if self._documents:
            name = f"{SPILLS_FOLDER}{self._group:06d}-{len(self.names):06d}"
            write_spill(self._store, name, self._documents)
            self.names.append(name)
            self._documents = []
            self._size = 0


def _add_to_digest(digest: blake2b, document: RawDocument) -> None:
    """Add a document's length and the document to a group's digest, which so depends on where documents end."""
    data = document.data or b""
    length = -1 if document.data is None else len(data)
    digest.update(b"%d%d:" % (document.is_json, length))
    digest.update(data)
    if document.id is not None:
        digest.update(document.id.encode())
