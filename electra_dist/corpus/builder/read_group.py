"""Stage 1 of a corpus build: read a group of input files, and write their documents to spill files.

Guarantee: every document of the group is in exactly one spill file of the group, undecoded. The record of the group is
written after the spill files.

Limits: a worker holds the documents of one spill file in memory, `spill_bytes`, and once more while it is written.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from electra_dist.config import canonical_json
from electra_dist.corpus.builder.build_records import BuildRecords, ReadGroup
from electra_dist.corpus.builder.build_request import BuildRequest
from electra_dist.corpus.builder.document_order import document_key
from electra_dist.corpus.builder.spill_file import SPILLS_FOLDER, write_spill
from electra_dist.corpus.inputs.find_inputs import InputFile
from electra_dist.corpus.inputs.text_decoding import DOCUMENT_BYTES, RawDocument
from electra_dist.corpus.inputs.text_readers import DocumentStream
from electra_dist.store.interface import Store
from electra_dist.store.open_store import open_store


class ReadTask(NamedTuple):
    """A group of input files for a worker to read, or only to check for changes."""

    group: InputGroup
    is_check: bool  # only compute the record; neither it nor a spill file is written


def start_reading(request: BuildRequest) -> Callable[[ReadTask], ReadGroup]:
    """Return a function that reads a group of input files, writes its documents to spill files and records the group.

    That function raises UserError if a file cannot be read to its end, or if a table has no column of text.
    """
    store = open_store(request.output, request.endpoint_url)
    records = BuildRecords(store)
    order_seed = request.order_seed
    with_ids = request.corpus.origins  # of documents in a table's column `id`, for the origin files

    def read(task: ReadTask) -> ReadGroup:
        group = task.group
        files = [request.inputs[position] for position in group.files]
        stream = DocumentStream(files, request.text_field, request.endpoint_url, first_file=group.files.start)
        writer = _SpillWriter(store, group.number, request.spill_bytes)
        digest = blake2b(digest_size=16)
        for document in stream:
            if not with_ids:
                document.id = None
            numbers = stream.counts.of_source(request.inputs[document.file].source)
            numbers["read"] += 1
            numbers["read_bytes"] += document.size
            _add_to_digest(digest, document)
            if not task.is_check:
                document.key = document_key(order_seed, document.file, document.number)
                writer.add(document)
        writer.finish()
        record = ReadGroup(
            number=group.number,
            files_digest=group.digest,
            modified=group.modified,
            documents_digest=digest.hexdigest(),
            spills=writer.names,
            counts=stream.counts,
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
        self._documents: list[RawDocument] = []
        self._size = 0

    def add(self, document: RawDocument) -> None:
        self._documents.append(document)
        self._size += document.size + DOCUMENT_BYTES
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


class InputGroup(NamedTuple):
    """Consecutive input files, which one worker reads. How files are grouped has no influence on the corpus."""

    number: int  # position of the group, from 0
    files: range  # positions of its files among the inputs
    size: int  # bytes of its files, as they are on disk
    digest: str  # SHA-256 of the names and sizes of its files, in hexadecimal
    modified: str  # SHA-256 of the times at which its local files were last modified, in hexadecimal


def group_inputs(files: Sequence[InputFile], group_bytes: int) -> list[InputGroup]:
    """Divide the input files into groups of `group_bytes` on disk or more; only the last group may be smaller."""
    groups: list[InputGroup] = []
    first = 0
    size = 0
    for position, file in enumerate(files):
        size += file.size
        if size >= group_bytes or position == len(files) - 1:
            group_files = [files[index] for index in range(first, position + 1)]
            digest = _digest([[file.name, file.size] for file in group_files])
            modified = _digest([os.stat(file.location).st_mtime_ns for file in group_files if not file.is_remote])
            groups.append(InputGroup(len(groups), range(first, position + 1), size, digest, modified))
            first = position + 1
            size = 0
    return groups


def _digest(values: list[Any]) -> str:
    return hashlib.sha256(canonical_json(values).encode()).hexdigest()
