"""Measure what each step of a corpus build costs on this machine, for `electra-dist corpus plan` and the benchmark.

Guarantee: the functions that are timed are those of a build: the readers of the inputs, the spill files, the making of
rows and the writing of shards. What is counted is CPU time of this process, so other load on the machine changes a
rate less than it changes a wall-clock time.

How: a sample of documents goes through the steps one after another, in one process and in memory and a temporary
folder. `corpus_plan.py` makes a plan of the result.

Cost: about 2 s of one core for each million tokens of the sample.

Limits: waiting for a disk or for S3 is not CPU time and is not measured. Text with few different words is faster to
tokenize than the text of a large corpus.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from pydantic import Field, field_validator

from electra_dist.config_sections.section import Section
from electra_dist.corpus.build_request import BuildRequest
from electra_dist.corpus.chunk_processor import Chunk, ChunkProcessor
from electra_dist.corpus.inputs.find_inputs import InputFile
from electra_dist.corpus.stages.bucket_rows import cut_chunks, put_shard
from electra_dist.corpus.stages.build_records import BuildRecords, FinishedBucket
from electra_dist.corpus.stages.document_order import NUM_CELLS, document_key
from electra_dist.corpus.stages.spill_file import OrderedDocument, SpillFile, write_spill
from electra_dist.corpus.text_decoding import RawDocument
from electra_dist.corpus.text_readers import DocumentStream
from electra_dist.errors import UserError
from electra_dist.store.open_store import open_store

READ, SPILL, COLLECT, TOKENIZE, WRITE = "read", "spill", "collect", "tokenize", "write"
STEPS = (READ, SPILL, COLLECT, TOKENIZE, WRITE)  # in the order in which a build does them
SAMPLE_BYTES = 8_000_000  # of documents
_NUM_RECORDS = 64  # records of buckets that are read to time the merge


class PrepareRate(Section):
    """Cost of one stage of `corpus prepare`."""

    stage: str = Field(description="name of the stage, such as 02-exact-signatures")
    cpu_s: float = Field(ge=0, description="CPU seconds for the sample")
    text_bytes: int = Field(gt=0, description="bytes of text that the stage read")


class CorpusRates(Section):
    """Costs of the steps of a corpus build, measured on a sample of text on one machine."""

    sample: str = Field(description="the text of the sample")
    date: str = Field(description="date of the measurement, UTC, as ISO 8601")
    hardware: str = Field(description="processor, cores and memory of the machine")
    settings: dict[str, str | int | float] = Field(description="values of the config that decide the rates")
    input_bytes: int = Field(gt=0, description="bytes of the files of the sample, as they are on disk")
    text_bytes: int = Field(gt=0, description="bytes of its documents, undecoded")
    documents: int = Field(gt=0, description="number of its documents")
    spill_bytes: int = Field(gt=0, description="bytes of the spill files")
    tokens: int = Field(gt=0, description="tokens of the rows without [PAD], training and held-out")
    shard_bytes: int = Field(gt=0, description="bytes of the shards")
    cpu_s: dict[str, float] = Field(description="CPU seconds of each step, for the whole sample")
    record_cpu_s: float = Field(ge=0, description="CPU seconds in which a merge reads the record of one bucket")
    prepare: list[PrepareRate] = Field(default=[], description="stages of `corpus prepare`; empty: not measured")

    @field_validator("cpu_s")
    @classmethod
    def _has_all_steps(cls, value: dict[str, float]) -> dict[str, float]:
        """Return the value; raise ValueError if a step is missing, or one is unknown or negative."""
        if set(value) != set(STEPS) or min(value.values()) < 0:
            raise ValueError(f"must have the seconds of the steps {', '.join(STEPS)}")
        return value

    def tokens_per_core_s(self, step: str) -> float:
        """Return the rate of a step of `STEPS`, in tokens of the corpus per second of one core."""
        return self.tokens / max(self.cpu_s[step], 1e-9)

    @property
    def tokens_per_core_s_of_build(self) -> float:
        """Return the rate of all steps together, in tokens of the corpus per second of one core."""
        return self.tokens / max(sum(self.cpu_s.values()), 1e-9)


def measure_rates(
    request: BuildRequest, sample: str, hardware: str, prepare: Sequence[PrepareRate] = ()
) -> CorpusRates:
    """Return what the steps of a build cost, measured on files from which the documents of a sample are taken.

    Args:
        request: the build to measure; its `inputs` are read as a whole, of their documents about `SAMPLE_BYTES` take
            part in the steps after the reading. `output` and `num_workers` are ignored.
        sample: what the text is, for the result.
        hardware: description of the machine, for the result.
        prepare: measured stages of a preparation, which are only passed on.

    Raises:
        UserError: no document gives a row, or a file cannot be read.
        StoreError: a file on S3 cannot be read.
    """
    with tempfile.TemporaryDirectory(prefix="corpus-rates-") as folder:
        return _Measurement(request, Path(folder)).run(sample, hardware, prepare)


class _Measurement:
    """State of one measurement: the sample on its way through the steps, and the seconds of each."""

    def __init__(self, request: BuildRequest, folder: Path) -> None:
        """Prepare; `folder` receives spill files, shards and records."""
        self._request = request
        self._store = open_store(str(folder))
        self._cpu_s: dict[str, float] = {}

    def run(self, sample: str, hardware: str, prepare: Sequence[PrepareRate]) -> CorpusRates:
        """Time all steps; return the result."""
        request = self._request
        documents, text_bytes, share = self._read()
        ordered = [
            OrderedDocument(document_key(request.order_seed, 0, number), 0, number, document)
            for number, document in enumerate(documents)
        ]
        begin = time.process_time()
        spill_bytes = write_spill(self._store, "spill", ordered)
        self._cpu_s[SPILL] = time.process_time() - begin
        begin = time.process_time()
        entries = list(SpillFile(self._store, "spill").documents(range(NUM_CELLS)))
        self._cpu_s[COLLECT] = time.process_time() - begin
        tokens, blocks = self._make_rows([entry.document for entry in entries])
        if not tokens:
            raise UserError(
                f"{sample}: no document of the sample gives a row, so nothing can be measured; give another --input, "
                "or the --text-field that holds its text"
            )
        shard_bytes, bucket = self._write(blocks)
        return CorpusRates(
            sample=sample,
            date=time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
            hardware=hardware,
            settings=rate_settings(request),
            input_bytes=max(1, round(share * sum(file.size for file in request.inputs))),
            text_bytes=text_bytes,
            documents=len(documents),
            spill_bytes=spill_bytes,
            tokens=tokens,
            shard_bytes=shard_bytes,
            cpu_s=self._cpu_s,
            record_cpu_s=self._time_of_a_record(bucket),
            prepare=list(prepare),
        )

    def _read(self) -> tuple[list[RawDocument], int, float]:
        """Read all files; return the sample, its bytes, and its share of the bytes of all documents that were read.

        The recorded time is that share of the time of reading.
        """
        documents: list[RawDocument] = []
        sample_bytes = 0
        all_bytes = 0
        begin = time.process_time()
        for document in DocumentStream(self._request.inputs, self._request.text_field):
            length = len(document.data or b"")
            all_bytes += length
            if sample_bytes < SAMPLE_BYTES:
                documents.append(document)
                sample_bytes += length
        seconds = time.process_time() - begin
        share = sample_bytes / all_bytes if all_bytes else 1.0
        self._cpu_s[READ] = seconds * share
        return documents, max(sample_bytes, 1), share

    def _make_rows(self, documents: list[RawDocument]) -> tuple[int, list[np.ndarray]]:
        """Turn the documents into rows; return the number of tokens and the blocks of rows."""
        processor = ChunkProcessor(self._request.rules())
        blocks: list[np.ndarray] = []
        tokens = 0
        begin = time.process_time()
        for number, chunk in enumerate(cut_chunks(documents, self._request.chunk_bytes)):
            rows = processor.process(Chunk(documents=chunk, seed=number, heldout_seed=number))
            for part in (rows.train, rows.heldout):
                tokens += part.counts["tokens"]
                if len(part.block):
                    blocks.append(part.block)
        self._cpu_s[TOKENIZE] = time.process_time() - begin
        return tokens, blocks

    def _write(self, blocks: Sequence[np.ndarray]) -> tuple[int, FinishedBucket]:
        """Write the rows as one shard; return its size and the record of a bucket that consists of it."""
        begin = time.process_time()
        rows = np.concatenate(blocks)
        entry = put_shard(self._store, "shard-000000.tar", rows, len(rows))
        self._cpu_s[WRITE] = time.process_time() - begin
        bucket = FinishedBucket(
            number=0, entries=[entry], heldout_rows=0, documents={}, train={}, heldout={}, sources={}
        )
        return entry.bytes, bucket

    def _time_of_a_record(self, bucket: FinishedBucket) -> float:
        """Return the CPU seconds in which the record of one bucket is read, with the check of its shard."""
        records = BuildRecords(self._store)
        for number in range(_NUM_RECORDS):
            records.record_bucket(bucket.model_copy(update={"number": number}), np.empty((0, 0)))
        begin = time.process_time()
        records.buckets()
        return (time.process_time() - begin) / _NUM_RECORDS


def rate_settings(request: BuildRequest) -> dict[str, str | int | float]:
    """Return the values of a build that decide its rates; rates of other values are not those of this build."""
    corpus = request.corpus
    return {
        "seq_len": request.seq_len,
        "vocab_size": request.vocabulary.size,
        "packing": corpus.packing,
        "lowercase": int(corpus.lowercase),
        "shard_size_mb": corpus.shard_size_mb,
    }


def smallest_files(files: Sequence[InputFile], num_bytes: int) -> list[InputFile]:
    """Return the smallest files that are not empty, in their order, until together they have `num_bytes` on disk."""
    chosen: set[str] = set()
    size = 0
    for file in sorted(files, key=lambda file: (file.size, file.location)):
        if file.size and size < num_bytes:
            chosen.add(file.location)
            size += file.size
    return [file for file in files if file.location in chosen]
