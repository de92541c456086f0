"""Stage 2 of a corpus build: turn the documents of a bucket into rows, and write them as shards.

Guarantee: the shards of a bucket depend on the documents, the parameters and the bucket's number alone. The name of a
shard follows from the number of its bucket, so two parts of a build never write shards of the same name. The record of
the bucket is written after its shards.

How: a cell is a range of the documents' shuffle keys (`document_order.py`), and a bucket is a range of cells. Its
documents are collected from all spill files, sorted, and cut into chunks, which `chunk_processor.py` turns into rows.
The rows of a bucket are divided evenly among its shards.

Limits: a worker holds the documents of a bucket and their rows in memory.
"""

from __future__ import annotations

import hashlib
import io
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow

from electra_dist.corpus.chunk_processor import Chunk, ChunkProcessor, ChunkRows, Rows, Rules
from electra_dist.corpus.inputs.skipped_inputs import encodable
from electra_dist.corpus.origins.origin_files import OriginFile, put_origins
from electra_dist.corpus.origins.origin_table import Origin, joined, rows_of_table, table_of_examples
from electra_dist.corpus.report.document_counts import add_sources
from electra_dist.corpus.stages.build_records import BuildRecords, CorpusOrder, FinishedBucket
from electra_dist.corpus.stages.document_order import (
    cell_of_original,
    cells_of_bucket,
    chunk_seed,
    copy_key,
    num_copies,
)
from electra_dist.corpus.stages.spill_file import OrderedDocument, documents_of_spills, open_spills
from electra_dist.corpus.text_decoding import DocumentNames, RawDocument
from electra_dist.data.manifest import ShardEntry
from electra_dist.data.shard_format import write_shard
from electra_dist.store.interface import Store
from electra_dist.store.open_store import open_store
from electra_dist.tokenizer import VOCAB_FILE, Vocabulary

_BLOCK_BYTES = 1 << 20  # size of the blocks of rows within a shard
_DOCUMENT_BYTES = 64  # added to the size of every document, so that many empty documents fill a chunk, too
_TRAIN_STREAM = 0  # numbers of the two streams of random draws of a chunk
_HELDOUT_STREAM = 1


@dataclass(frozen=True, kw_only=True)
class RowSettings:
    """What a worker needs to turn buckets (ranges of the shuffled documents) into shards."""

    output: str  # folder or s3:// prefix of the corpus
    endpoint_url: str | None  # S3 endpoint of the output
    sources: list[str]  # source of each input file of the build
    file_names: list[str]  # name of each input file of the build
    with_origins: bool  # whether to write origin files, which name the documents of each row
    spills: list[str]  # keys of all spill files
    order: CorpusOrder
    rules: Rules
    seed: int  # of the examples' random draws
    chunk_bytes: int  # bytes of documents at which a chunk is complete


def start_making_rows(settings: RowSettings) -> Callable[[int], FinishedBucket]:
    """Return a function that takes the number of a bucket of documents, writes its shards and records them."""
    return _RowMaker(settings).make


class _RowMaker:
    """Writer of the shards of buckets; keeps the tokenizer and the offset tables of all spill files in memory."""

    def __init__(self, settings: RowSettings) -> None:
        self._settings = settings
        self._store = open_store(settings.output, settings.endpoint_url)
        self._records = BuildRecords(self._store)
        self._spills = open_spills(self._store, settings.spills)
        self._processor = ChunkProcessor(settings.rules)
        self._pad_id = Vocabulary(settings.rules.vocabulary_text, VOCAB_FILE).special["[PAD]"]

    def make(self, bucket: int) -> FinishedBucket:
        """Write the shards of a bucket (a range of documents) and then its record; return the record.

        Only the written record has the digests of the held-out rows and of their documents; the returned one lacks
        them.
        """
        chunks: list[ChunkRows] = []
        train_origins: list[pyarrow.Table] = []
        heldout_origins: list[pyarrow.Table] = []
        for documents, chunk in self._rows_of_chunks(bucket):
            chunks.append(chunk)
            if self._settings.with_origins:
                origins = self._origins(documents, chunk)
                train_origins.append(table_of_examples(chunk.train.places, origins))
                heldout_origins.append(table_of_examples(chunk.heldout.places, origins))
        entries, origin_files = self._write_shards(bucket, [chunk.train for chunk in chunks], train_origins)
        heldout = [chunk.heldout for chunk in chunks]
        heldout_rows = self._join_rows(rows.block for rows in heldout)
        record = FinishedBucket(
            number=bucket,
            entries=entries,
            origins=origin_files,
            heldout_rows=len(heldout_rows),
            documents=sum_counts(chunk.documents for chunk in chunks),
            train=sum_counts(chunk.train.counts for chunk in chunks),
            heldout=sum_counts(chunk.heldout.counts for chunk in chunks),
            sources=add_sources(chunk.sources for chunk in chunks),
        )
        heldout_table = _join_origins(heldout, heldout_origins) if self._settings.with_origins else None
        self._records.record_bucket(record, heldout_rows, heldout_table)
        return record

    def _write_shards(
        self, bucket: int, chunks: list[Rows], tables: list[pyarrow.Table]
    ) -> tuple[list[ShardEntry], list[OriginFile]]:
        """Write a bucket's training rows to shards, and each row's documents to origin files; return their entries.

        If there are fewer rows than shards, the empty shards are not written, and their numbers are missing. `tables`
        names the documents of each chunk's rows; it is empty if the build writes no origin files.
        """
        num_shards = self._settings.order.shards_per_bucket
        rows = self._join_rows(chunk.block for chunk in chunks)
        table = _join_origins(chunks, tables) if self._settings.with_origins else None
        entries: list[ShardEntry] = []
        origin_files: list[OriginFile] = []
        first_row = 0
        for index, shard_rows in enumerate(np.array_split(rows, num_shards)):
            if len(shard_rows):
                name = f"shard-{bucket * num_shards + index:06d}.tar"
                num_tokens = int(np.count_nonzero(shard_rows != self._pad_id))
                entries.append(put_shard(self._store, name, shard_rows, num_tokens))
                if table is not None:
                    shard_table = rows_of_table(table, first_row, len(shard_rows))
                    origin_files.append(put_origins(self._store, name, shard_table))
            first_row += len(shard_rows)
        return entries, origin_files

    def _origins(self, documents: Sequence[OrderedDocument], chunk: ChunkRows) -> list[Origin]:
        no_names = DocumentNames()
        return [
            Origin(
                file=encodable(self._settings.file_names[document.file]),
                number=document.number,
                source=document.document.source,
                names=chunk.names.get(index, no_names),
            )
            for index, document in enumerate(documents)
        ]

    def _join_rows(self, blocks: Iterable[np.ndarray]) -> np.ndarray:
        filled = [block for block in blocks if len(block)]
        return np.concatenate(filled) if filled else np.empty((0, self._settings.rules.seq_len), np.uint16)

    def _rows_of_chunks(self, bucket: int) -> Iterator[tuple[list[OrderedDocument], ChunkRows]]:
        settings = self._settings
        ordered = self._documents(bucket)
        raw_documents = [entry.document for entry in ordered]
        first = 0  # position of the chunk's first document in the bucket
        for number, documents in enumerate(cut_chunks(raw_documents, settings.chunk_bytes)):
            chunk = Chunk(
                documents=documents,
                seed=chunk_seed(settings.seed, bucket, number, _TRAIN_STREAM),
                heldout_seed=chunk_seed(settings.seed, bucket, number, _HELDOUT_STREAM),
            )
            yield ordered[first : first + len(documents)], self._processor.process(chunk)
            first += len(documents)

    def _documents(self, bucket: int) -> list[OrderedDocument]:
        """Return a bucket's documents, sorted by shuffle key; a document that is used twice occurs with two keys."""
        settings = self._settings
        cells = cells_of_bucket(bucket, settings.order.num_buckets)
        most_copies = max(map(math.ceil, settings.order.epochs.values()), default=1)
        found: list[OrderedDocument] = []
        for copy in range(most_copies):
            for original_cells in _consecutive(cell_of_original(cell, copy) for cell in cells):
                for entry in documents_of_spills(self._spills, original_cells):
                    source = settings.sources[entry.file]
                    if copy < num_copies(entry.key, settings.order.epochs[source]):
                        document = entry.document._replace(source=source)
                        found.append(entry._replace(key=copy_key(entry.key, copy), document=document))
        found.sort(key=lambda entry: (entry.key, entry.file, entry.number))
        return found


def _join_origins(chunks: Sequence[Rows], tables: Sequence[pyarrow.Table]) -> pyarrow.Table:
    return joined((table, len(chunk.block)) for chunk, table in zip(chunks, tables, strict=True))


def _consecutive(cells: Iterable[int]) -> Iterator[range]:
    """Divide a sequence into ranges of consecutive numbers: [4094, 4095, 0, 1] gives 4094-4095 and 0-1."""
    start: int | None = None
    end = 0
    for cell in cells:
        if start is not None and cell == end:
            end += 1
            continue
        if start is not None:
            yield range(start, end)
        start = cell
        end = cell + 1
    if start is not None:
        yield range(start, end)


def cut_chunks(documents: Sequence[RawDocument], chunk_bytes: int) -> Iterator[list[RawDocument]]:
    """Cut documents into chunks (groups of consecutive documents), and yield them in order.

    A chunk ends with the document that brings it to `chunk_bytes`; only the last chunk may be smaller. Every document
    counts 64 bytes more than its data, which also bounds the number of empty documents in a chunk.
    """
    chunk: list[RawDocument] = []
    chunk_size = 0
    for document in documents:
        chunk.append(document)
        chunk_size += len(document.data or b"") + _DOCUMENT_BYTES
        if chunk_size >= chunk_bytes:
            yield chunk
            chunk = []
            chunk_size = 0
    if chunk:
        yield chunk


def put_shard(store: Store, name: str, rows: np.ndarray, num_tokens: int) -> ShardEntry:
    """Write rows, [rows, seq_len], as a shard; return its entry for corpus.json. `num_tokens` counts all but [PAD]."""
    tar = io.BytesIO()
    write_shard(tar, rows, max(1, _BLOCK_BYTES // rows[0].nbytes))
    data = tar.getvalue()
    store.write(name, data)
    return ShardEntry(
        name=name, rows=len(rows), tokens=num_tokens, bytes=len(data), sha256=hashlib.sha256(data).hexdigest()
    )


def sum_counts(counters: Iterable[Counter[str]]) -> Counter[str]:
    """Return the sum of several counters, key by key; keys whose sum is 0 are left out."""
    return sum(counters, Counter[str]())
