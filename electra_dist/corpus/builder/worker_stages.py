"""Do the work of a corpus build that its worker processes do: read input groups, and make the shards of buckets.

Stage 1 reads a group of input files and writes its documents to spill files. Stage 2 turns the documents of a bucket
into rows and writes them as shards.

Guarantee: every document of a group is in exactly one spill file of the group, undecoded. The shards of a bucket
depend on the documents, the parameters and the bucket's number alone. The name of a shard follows from the number of
its bucket, so two parts of a build never write shards of the same name. The record of a group is written after its
spill files, that of a bucket after its shards.

How: a cell is a range of the documents' shuffle keys (`shuffle.py`), and a bucket is a range of cells. Its documents
are collected from all spill files, sorted, and cut into chunks, which `chunk_processor.py` turns into rows. The rows
of a bucket are divided evenly among its shards, whose number follows from a sample of rows (`sample_rows`).

Limits: a worker holds the documents of one spill file in memory, `spill_bytes`, and once more while it is written; or
the documents of a bucket and their rows.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import pyarrow

from electra_dist.corpus.build_report import UnknownTokens
from electra_dist.corpus.builder.build_records import BuildOrder, BuildRecords, FinishedBucket, ReadGroup
from electra_dist.corpus.builder.build_request import BuildRequest
from electra_dist.corpus.builder.chunk_processor import ChunkProcessor, ChunkRows, Rows, in_groups
from electra_dist.corpus.builder.shuffle import (
    NUM_CELLS,
    SPILLS_FOLDER,
    SpillFile,
    cell_of_original,
    cells_of_bucket,
    chunk_seed,
    copy_key,
    document_key,
    documents_of_spills,
    num_copies,
    open_spills,
    write_spill,
)
from electra_dist.corpus.counts import Counts
from electra_dist.corpus.inputs.file_kinds import encodable
from electra_dist.corpus.inputs.find_inputs import InputFile
from electra_dist.corpus.inputs.text_decoding import DOCUMENT_BYTES, DocumentNames, RawDocument
from electra_dist.corpus.inputs.text_readers import DocumentStream
from electra_dist.corpus.origins import Origin, OriginFile, join_tables, put_origins, rows_of_table, table_of_examples
from electra_dist.data.manifest import ShardEntry
from electra_dist.data.shard import write_shard
from electra_dist.errors import UserError
from electra_dist.store.interface import Store
from electra_dist.store.json_file import canonical_json
from electra_dist.store.open_store import open_store

_BLOCK_BYTES = 1 << 20  # size of the blocks of rows within a shard
_TRAIN_STREAM = 0  # numbers of the two streams of random draws of a chunk
_HELDOUT_STREAM = 1
SAMPLE_BYTES = 1_000_000  # size of the documents that are sampled; they take about half a second
_WITHOUT_ROWS = 0.5  # used if no document of the sample gives a row


class ReadTask(NamedTuple):
    """Task of a worker: to read a group of input files into spill files, or only to check it for changes."""

    group: InputGroup
    is_check: bool  # only compute the record; neither it nor a spill file is written


class InputReader:
    """Function object with which a worker reads groups of input files and sorts their documents into spill files."""

    def __init__(self, request: BuildRequest) -> None:
        self._request = request
        self._store = open_store(request.output, request.endpoint_url)
        self._records = BuildRecords(self._store)
        self._order_seed = request.order_seed

    def __call__(self, task: ReadTask) -> ReadGroup:
        """Read the files of a group, write spill files and then the group's record; return the record.

        Raises UserError if a file cannot be read to its end, or if a table has no column of text.
        """
        request = self._request
        group = task.group
        files = [request.inputs[position] for position in group.files]
        stream = DocumentStream(files, request.text_field, request.endpoint_url, first_file=group.files.start)
        writer = _SpillWriter(self._store, group.number, request.spill_bytes)
        digest = blake2b(digest_size=16)
        for document in stream:
            if not request.corpus.origins:
                document.id = None  # only origin files name it
            numbers = stream.counts.of_source(request.inputs[document.file].source)
            numbers["read"] += 1
            numbers["read_bytes"] += document.size
            _add_to_digest(digest, document)
            if not task.is_check:
                document.key = document_key(self._order_seed, document.file, document.number)
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
            self._records.record_group(record)
        return record


class _SpillWriter:
    """Writer of the documents of an input group to intermediate files of about `spill_bytes` of documents each."""

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
    """Add a document to the digest of its group of input files, with its length, so that a moved border is noticed."""
    data = document.data or b""
    length = -1 if document.data is None else len(data)
    digest.update(b"%d%d:" % (document.is_json, length))
    digest.update(data)
    if document.id is not None:
        digest.update(document.id.encode())


class InputGroup(NamedTuple):
    """Consecutive input files that one worker reads. How files are grouped has no influence on the corpus."""

    number: int  # position of the group, from 0
    files: range  # positions of its files among the inputs
    size: int  # bytes of its files, as they are on disk
    digest: str  # SHA-256 of the names, sizes and sources of its files, in hexadecimal
    modified: str  # SHA-256 of the times of the last change of its files, as far as they are known, in hexadecimal


def group_inputs(files: Sequence[InputFile], group_bytes: int) -> list[InputGroup]:
    """Divide the input files into groups of `group_bytes` on disk or more; only the last group may be smaller."""
    groups: list[InputGroup] = []
    first = 0
    for number, group_files in enumerate(in_groups(files, lambda file: file.size, group_bytes)):
        positions = range(first, first + len(group_files))
        size = sum(file.size for file in group_files)
        digest = _digest([[file.name, file.size, file.source] for file in group_files])
        times = [_modified_ns(file.location) for file in group_files if not file.is_remote]
        versions = [file.version for file in group_files if file.version]
        groups.append(InputGroup(number, positions, size, digest, modified=_digest([*times, *versions])))
        first = positions.stop
    return groups


def _modified_ns(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError as error:  # a vocabulary may have been trained for hours since the inputs were listed
        raise UserError(
            f"{path}: is gone since the inputs were listed ({error.strerror}); run the same command again"
        ) from None


def _digest(values: list[Any]) -> str:
    return hashlib.sha256(canonical_json(values).encode()).hexdigest()


class RowMaker:
    """Function object with which a worker makes the shards of a bucket, a range of the shuffled documents of a corpus.

    It keeps the tokenizer and the offset tables of all spill files (the documents by shuffle key) in memory.
    """

    def __init__(self, request: BuildRequest, order: BuildOrder, spills: Sequence[str]) -> None:
        """Open all spill files, whose keys in the store are `spills`."""
        self._request = request
        self._order = order
        self._store = open_store(request.output, request.endpoint_url)
        self._records = BuildRecords(self._store)
        self._spills = open_spills(self._store, spills)
        self._processor = ChunkProcessor(request)

    def __call__(self, bucket: int) -> FinishedBucket:
        """Write the shards of bucket number `bucket` and then its record; return the record.

        The returned record lacks the digests of the held-out rows and of their documents, which only the written one
        has.
        """
        chunks: list[ChunkRows] = []
        train_origins: list[pyarrow.Table] = []
        heldout_origins: list[pyarrow.Table] = []
        with_origins = self._request.corpus.origins
        for documents, chunk in self._rows_of_chunks(bucket):
            chunks.append(chunk)
            if with_origins:
                origins = self._origins(documents, chunk)
                train_origins.append(table_of_examples(chunk.train.places, origins))
                heldout_origins.append(table_of_examples(chunk.heldout.places, origins))
        entries, origin_files = self._write_shards(bucket, [chunk.train for chunk in chunks], train_origins)
        heldout = [chunk.heldout for chunk in chunks]
        counts = Counts.total(chunk.counts for chunk in chunks)
        counts.forget_small_losses()
        record = FinishedBucket(number=bucket, entries=entries, origins=origin_files, counts=counts)
        heldout_table = _join_origins(heldout, heldout_origins) if with_origins else None
        self._records.record_bucket(record, self._join_rows(rows.block for rows in heldout), heldout_table)
        return record

    def _write_shards(
        self, bucket: int, chunks: list[Rows], tables: list[pyarrow.Table]
    ) -> tuple[list[ShardEntry], list[OriginFile]]:
        """Write a bucket's training rows to shards, and each row's documents to origin files; return the entries.

        If there are fewer rows than shards, the empty shards are not written, and their numbers are missing. `tables`
        names the documents of each chunk's rows; it is empty if the build writes no origin files.
        """
        num_shards = self._order.shards_per_bucket
        rows = self._join_rows(chunk.block for chunk in chunks)
        table = _join_origins(chunks, tables) if self._request.corpus.origins else None
        entries: list[ShardEntry] = []
        origin_files: list[OriginFile] = []
        pad_id = self._request.vocabulary.special["[PAD]"]
        first_row = 0
        for index, shard_rows in enumerate(np.array_split(rows, num_shards)):
            if len(shard_rows):
                name = f"shard-{bucket * num_shards + index:06d}.tar"
                entries.append(put_shard(self._store, name, shard_rows, pad_id))
                if table is not None:
                    shard_table = rows_of_table(table, first_row, len(shard_rows))
                    origin_files.append(put_origins(self._store, name, shard_table))
            first_row += len(shard_rows)
        return entries, origin_files

    def _origins(self, documents: Sequence[RawDocument], chunk: ChunkRows) -> list[Origin]:
        no_names = DocumentNames()
        origins = []
        for index, document in enumerate(documents):
            file = self._request.inputs[document.file]
            names = chunk.names.get(index, no_names)
            origins.append(Origin(encodable(file.name), document.number, file.source, names))
        return origins

    def _join_rows(self, blocks: Iterable[np.ndarray]) -> np.ndarray:
        filled = [block for block in blocks if len(block)]
        return np.concatenate(filled) if filled else np.empty((0, self._request.seq_len), np.uint16)

    def _rows_of_chunks(self, bucket: int) -> Iterator[tuple[list[RawDocument], ChunkRows]]:
        seed = self._request.example_seed
        for number, documents in enumerate(cut_chunks(self._documents(bucket), self._request.chunk_bytes)):
            train_seed = chunk_seed(seed, bucket, number, _TRAIN_STREAM)
            heldout_seed = chunk_seed(seed, bucket, number, _HELDOUT_STREAM)
            yield documents, self._processor.process(documents, train_seed, heldout_seed)

    def _documents(self, bucket: int) -> list[RawDocument]:
        """Return the documents of a bucket, sorted by shuffle key; one that the corpus uses twice has two keys."""
        epochs = self._order.epochs
        cells = cells_of_bucket(bucket, self._order.num_buckets)
        most_copies = max(map(math.ceil, epochs.values()), default=1)
        found: list[RawDocument] = []
        for copy in range(most_copies):
            for original_cells in _consecutive(cell_of_original(cell, copy) for cell in cells):
                for document in documents_of_spills(self._spills, original_cells):
                    source = self._request.inputs[document.file].source
                    if copy < num_copies(document.key, epochs[source]):
                        document.key = copy_key(document.key, copy)
                        found.append(document)
        found.sort(key=lambda document: document.place)
        return found


def _join_origins(chunks: Sequence[Rows], tables: Sequence[pyarrow.Table]) -> pyarrow.Table:
    return join_tables((table, len(chunk.block)) for chunk, table in zip(chunks, tables, strict=True))


def _consecutive(cells: Iterable[int]) -> Iterator[range]:
    """Divide a sequence into ranges of consecutive numbers: [4094, 4095, 0, 1] gives 4094-4095 and 0-1."""
    # Within a range, the cells are greater than their places in the sequence by the same number.
    for _, run in itertools.groupby(enumerate(cells), key=lambda pair: pair[1] - pair[0]):
        numbers = [cell for _, cell in run]
        yield range(numbers[0], numbers[-1] + 1)


def cut_chunks(documents: Sequence[RawDocument], chunk_bytes: int) -> Iterator[list[RawDocument]]:
    """Cut documents into chunks, groups of consecutive documents that become rows together; yield them in order.

    A chunk ends with the document that brings it to `chunk_bytes`; only the last chunk may be smaller. Every document
    counts 64 bytes more than its data, which also bounds the number of empty documents in a chunk.
    """
    return in_groups(documents, lambda document: document.size + DOCUMENT_BYTES, chunk_bytes)


def put_shard(store: Store, name: str, rows: np.ndarray, pad_id: int) -> ShardEntry:
    """Write rows, [rows, seq_len], as a shard; return its entry for corpus.json, which counts all tokens but [PAD]."""
    tar = io.BytesIO()
    write_shard(tar, rows, max(1, _BLOCK_BYTES // rows[0].nbytes))
    data = tar.getvalue()
    store.write(name, data)
    num_tokens = int(np.count_nonzero(rows != pad_id))
    return ShardEntry(
        name=name, rows=len(rows), tokens=num_tokens, bytes=len(data), sha256=hashlib.sha256(data).hexdigest()
    )


class RowSample(NamedTuple):
    """Measurements on a sample of a corpus's documents: the size of their rows, and how many tokens are [UNK]."""

    row_bytes_per_document_byte: float  # 0.5 if no document of the sample gives a row
    unknown: UnknownTokens  # counts of its tokens and of [UNK]


def sample_rows(spills: Sequence[SpillFile], request: BuildRequest) -> RowSample:
    """Make rows of the first documents of the shuffled corpus, at least 1 MB if there are, and measure the rows."""
    documents: list[RawDocument] = []
    size = 0
    for document in _first_documents(spills):
        documents.append(document)
        size += document.size
        if size >= SAMPLE_BYTES:
            break
    seed = request.example_seed
    rows = ChunkProcessor(request).process(documents, seed, seed)
    row_bytes = rows.train.block.nbytes + rows.heldout.block.nbytes
    counts = rows.counts.all_sources()
    return RowSample(
        row_bytes_per_document_byte=row_bytes / size if row_bytes else _WITHOUT_ROWS,
        unknown=UnknownTokens(counts["tokens"], counts["unk_tokens"]),
    )


def _first_documents(spills: Sequence[SpillFile]) -> Iterator[RawDocument]:
    """Yield the documents of the shuffled corpus from its beginning on, reading twice as many cells each time."""
    end = 0
    while end < NUM_CELLS:
        start = end
        end = min(2 * start + 1, NUM_CELLS)
        documents = documents_of_spills(spills, range(start, end))
        yield from sorted(documents, key=lambda document: document.place)
