"""Measure what each step of a corpus build and of a preparation costs on this machine, for `electra-dist corpus plan`.

Guarantee: the timed functions are those of a build (readers of the inputs, writer and reader of spill files, making of
rows, and writer of shards) and the stages of a preparation. CPU time of this process is measured, which other load on
the machine changes less than it changes wall-clock time.

How: one process passes a sample of documents through the steps one after another, in memory and in a temporary folder.
`corpus_plan.py` turns the measured costs into a plan for a corpus of any size. Of a preparation, the filters run on
the files of the sample, then the deduplication on all its documents, also on those that the filters drop: to
deduplicate the few kept documents would take little more than the fixed costs. A plan multiplies its cost per byte by
the size of the text that the filters keep.

Limits: waiting for a disk or for S3 is not CPU time and is not measured, and neither is the memory of the search for
duplicates. That search sorts, so its time grows a little faster than the text; the plan does not extrapolate this. A
text with few different words is tokenized faster than the text of a large corpus.
"""

from __future__ import annotations

import contextlib
import io
import resource
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from pydantic import Field, TypeAdapter, field_validator

from electra_dist.config.sections.base import Section
from electra_dist.corpus.builder.build_records import BuildRecords, FinishedBucket
from electra_dist.corpus.builder.build_request import BuildRequest
from electra_dist.corpus.builder.chunk_processor import ChunkProcessor
from electra_dist.corpus.builder.shuffle import NUM_CELLS, SpillFile, document_key, write_spill
from electra_dist.corpus.builder.worker_stages import cut_chunks, put_shard
from electra_dist.corpus.counts import Counts
from electra_dist.corpus.inputs.find_inputs import InputFile
from electra_dist.corpus.inputs.text_decoding import RawDocument
from electra_dist.corpus.inputs.text_readers import DocumentStream
from electra_dist.corpus.prepare.prepare_config import (
    DeduplicationSection,
    ExecutorSection,
    PrepareConfig,
    SourceSection,
)
from electra_dist.errors import UserError
from electra_dist.store.json_file import DamagedJson, damaged_file, read_json_object, validate_json
from electra_dist.store.open_store import open_store

if TYPE_CHECKING:
    from electra_dist.corpus.prepare.stages import Stage  # imports datatrove

READ, SPILL, COLLECT, TOKENIZE, WRITE = "read", "spill", "collect", "tokenize", "write"
STEPS = (READ, SPILL, COLLECT, TOKENIZE, WRITE)  # in the order in which a build does them
SAMPLE_BYTES = 8_000_000  # size of the sample's documents; smaller inputs are used as a whole
_NUM_RECORDS = 64  # records of finished buckets that are read to time the merge of a build


class PrepareRate(Section):
    """CPU time of one stage of `corpus prepare` on a sample of text, and the size of the text that the stage read."""

    stage: str = Field(description="name of the stage, such as 02-exact-signatures")
    cpu_s: float = Field(ge=0, description="CPU seconds for the sample")
    text_bytes: int = Field(gt=0, description="bytes of text that the stage read")


class CorpusRates(Section):
    """CPU times of the steps of a corpus build, and the sizes of the text sample on which they were measured."""

    sample: str = Field(description="description of the text of the sample")
    date: str = Field(description="date of the measurement, UTC, as ISO 8601")
    hardware: str = Field(description="processor, cores and memory of the machine")
    settings: dict[str, str | int | float] = Field(description="values of the config on which the rates depend")
    input_bytes: int = Field(gt=0, description="size of the sample's files on disk, in bytes")
    text_bytes: int = Field(gt=0, description="size of the sample's documents in bytes, before decoding")
    documents: int = Field(gt=0, description="number of documents in the sample")
    spill_bytes: int = Field(gt=0, description="size of the spill files in bytes")
    tokens: int = Field(gt=0, description="tokens of all training and held-out rows, without [PAD]")
    shard_bytes: int = Field(gt=0, description="size of the shards in bytes")
    cpu_s: dict[str, float] = Field(description="step of the build -> its CPU seconds for the whole sample")
    record_cpu_s: float = Field(ge=0, description="CPU seconds in which a merge reads the record of one bucket")
    prepare: list[PrepareRate] = Field(default=[], description="stages of `corpus prepare`; empty if not measured")

    @field_validator("cpu_s")
    @classmethod
    def _has_all_steps(cls, value: dict[str, float]) -> dict[str, float]:
        if set(value) != set(STEPS) or min(value.values()) < 0:
            raise ValueError(f"must have the seconds of the steps {', '.join(STEPS)}")
        return value

    @property
    def tokens_per_core_s_of_build(self) -> float:
        """Return how many tokens of the corpus one core processes per second in all steps of a build together."""
        return self.tokens / max(sum(self.cpu_s.values()), 1e-9)


def read_rates(path: Path) -> CorpusRates:
    """Read CPU times of a build's steps from a file that this command stored, or from its output by --json.

    Raises UserError if the file is neither.
    """
    next_step = "give another --rates, or leave it out to measure"
    tree = read_json_object(path, next_step)
    try:
        return validate_json(TypeAdapter(CorpusRates), tree.get("rates", tree))
    except DamagedJson as error:
        raise damaged_file(path, error, next_step) from None


def measure_rates(
    request: BuildRequest, sample: str, hardware: str, prepare: Sequence[PrepareRate] = ()
) -> CorpusRates:
    """Measure the CPU time of each step of a build on a sample of its text, and return it with the sample's sizes.

    All inputs of `request` are read, and the first documents (`SAMPLE_BYTES`) go through the other steps. The output
    and workers of `request` are ignored. `sample` (a description), `hardware` and `prepare` are copied to the result.
    Raises UserError if no document of the sample gives a row.
    """
    with tempfile.TemporaryDirectory(prefix="corpus-rates-") as folder:
        return _Measurement(request, Path(folder)).run(sample, hardware, prepare)


class _Sample(NamedTuple):
    documents: list[RawDocument]
    size: int  # bytes of the documents, at least 1
    share: float  # of the bytes of all documents


class _Measurement:
    def __init__(self, request: BuildRequest, folder: Path) -> None:
        """Prepare a measurement that writes its spill file, shard and records to `folder`, which must be empty."""
        self._request = request
        self._store = open_store(str(folder))
        self._cpu_s: dict[str, float] = {}

    def run(self, sample: str, hardware: str, prepare: Sequence[PrepareRate]) -> CorpusRates:
        """Do all steps of a build on the sample, and return their CPU times and the sizes of their results."""
        request = self._request
        read = self._read()
        spill_bytes = self._spill(read.documents)
        tokens, blocks, counts = self._make_rows(self._collect(spill_bytes))
        if not tokens:
            raise UserError(f"{sample}: {counts.nothing_usable('give another --input or --text-field')}")
        shard_bytes, bucket = self._write(blocks)
        return CorpusRates(
            sample=sample,
            date=time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
            hardware=hardware,
            settings=rate_settings(request),
            input_bytes=max(1, round(read.share * sum(file.size for file in request.inputs))),
            text_bytes=read.size,
            documents=len(read.documents),
            spill_bytes=spill_bytes,
            tokens=tokens,
            shard_bytes=shard_bytes,
            cpu_s=self._cpu_s,
            record_cpu_s=self._time_of_a_record(bucket),
            prepare=list(prepare),
        )

    def _read(self) -> _Sample:
        """Read all documents, and return the first ones as the sample.

        The CPU time recorded for this step is that of reading all files, multiplied by the share of the sample.
        """
        documents: list[RawDocument] = []
        sample_bytes = 0
        all_bytes = 0
        begin = time.process_time()
        for document in DocumentStream(self._request.inputs, self._request.text_field, self._request.endpoint_url):
            all_bytes += document.size
            if sample_bytes < SAMPLE_BYTES:
                documents.append(document)
                sample_bytes += document.size
        seconds = time.process_time() - begin
        share = sample_bytes / all_bytes if all_bytes else 1.0
        self._cpu_s[READ] = seconds * share
        return _Sample(documents, max(sample_bytes, 1), share)

    def _spill(self, documents: list[RawDocument]) -> int:
        seed = self._request.order_seed
        for document in documents:
            document.key = document_key(seed, document.file, document.number)
        begin = time.process_time()
        spill_bytes = write_spill(self._store, "spill", documents)
        self._cpu_s[SPILL] = time.process_time() - begin
        return spill_bytes

    def _collect(self, spill_bytes: int) -> list[RawDocument]:
        begin = time.process_time()
        documents = list(SpillFile(self._store, "spill", spill_bytes).documents(range(NUM_CELLS)))
        self._cpu_s[COLLECT] = time.process_time() - begin
        return documents

    def _make_rows(self, documents: list[RawDocument]) -> tuple[int, list[np.ndarray], Counts]:
        """Make rows; return their number of tokens without [PAD], blocks of ids [rows, seq_len], and all counts."""
        processor = ChunkProcessor(self._request)
        blocks: list[np.ndarray] = []
        counts = []
        begin = time.process_time()
        for number, chunk in enumerate(cut_chunks(documents, self._request.chunk_bytes)):
            rows = processor.process(chunk, number, number)
            counts.append(rows.counts)
            blocks += [part.block for part in (rows.train, rows.heldout) if len(part.block)]
        self._cpu_s[TOKENIZE] = time.process_time() - begin
        total = Counts.total(counts)
        return sum(rows["tokens"] for rows in total.rows.values()), blocks, total

    def _write(self, blocks: Sequence[np.ndarray]) -> tuple[int, FinishedBucket]:
        """Write the rows as one shard; return its size in bytes, and a build record that lists this shard."""
        begin = time.process_time()
        pad_id = self._request.vocabulary.special["[PAD]"]
        entry = put_shard(self._store, "shard-000000.tar", np.concatenate(blocks), pad_id)
        self._cpu_s[WRITE] = time.process_time() - begin
        return entry.bytes, FinishedBucket(number=0, entries=[entry], counts=Counts())

    def _time_of_a_record(self, bucket: FinishedBucket) -> float:
        """Return the CPU seconds per bucket in which the last step of a build, the merge, reads its record."""
        records = BuildRecords(self._store)
        for number in range(_NUM_RECORDS):
            records.record_bucket(bucket.model_copy(update={"number": number}), np.empty((0, 0)))
        begin = time.process_time()
        records.buckets()
        return (time.process_time() - begin) / _NUM_RECORDS


def rate_settings(request: BuildRequest) -> dict[str, str | int | float]:
    """Return those settings of a build that influence its speed, by name, to be stored beside measured rates."""
    corpus = request.corpus
    return {
        "seq_len": request.seq_len,
        "vocab_size": request.vocabulary.size,
        "packing": corpus.packing,
        "lowercase": int(corpus.lowercase),
        "shard_size_mb": corpus.shard_size_mb,
    }


def smallest_files(files: Sequence[InputFile], num_bytes: int) -> list[InputFile]:
    """Return the smallest files that together have at least `num_bytes` on disk, or all files if they have less.

    Empty files are left out. The result keeps the order of `files`.
    """
    chosen: set[str] = set()
    size = 0
    for file in sorted(files, key=lambda file: (file.size, file.location)):
        if file.size and size < num_bytes:
            chosen.add(file.location)
            size += file.size
    return [file for file in files if file.location in chosen]


def measure_preparation(config: PrepareConfig, files: Sequence[InputFile], text_field: str) -> list[PrepareRate]:
    """Run the stages of `corpus prepare` on local files and return the CPU time of each stage.

    `files` replace the sources of `config`, temporary folders its folders, and the default executor its executor.
    Raises UserError if a file that the filters need is missing.
    """
    with tempfile.TemporaryDirectory(prefix="prepare-rates-") as name:
        folder = Path(name)
        filters = config.model_copy(update={"deduplication": DeduplicationSection()})
        rates = _run_stages(filters, folder / "filters", files, text_field)
        has_deduplication = any(method is not None for method in config.deduplication.__dict__.values())
        if has_deduplication:
            without_filters = {"filters": type(config.filters)(), "formatting": type(config.formatting)()}
            duplicates = config.model_copy(update=without_filters)
            # The first stage reads and filters; its cost is known from the run above.
            rates += _run_stages(duplicates, folder / "duplicates", files, text_field)[1:]
        return rates


def _run_stages(config: PrepareConfig, folder: Path, files: Sequence[InputFile], text_field: str) -> list[PrepareRate]:
    """Run all stages of a preparation except the report at the end, in this process, and return their CPU times.

    `folder` gets its files; the input `files` replace the sources of `config`.
    """
    from datatrove.utils.logging import logger  # an optional package, which a plan without --prepare does not need

    from electra_dist.corpus.prepare.preparation import check
    from electra_dist.corpus.prepare.source_plan import write_plan

    logger.remove()  # datatrove's messages would appear on the console
    sources = tuple(
        SourceSection(name=f"file-{number}", path=file.location, text_field=text_field)
        for number, file in enumerate(files)
    )
    changes = {
        "output": str(folder / "output"),
        "work": str(folder / "work"),
        "sources": sources,
        "executor": ExecutorSection(),
        "samples_per_filter": 0,
    }
    preparation = check(config.model_copy(update=changes))
    work = folder / "work"
    work.mkdir(parents=True)
    write_plan(preparation.plan, work)
    rates: list[PrepareRate] = []
    sizes: list[int] = []
    for stage in preparation.stages[:-1]:
        begin = _cpu_seconds()
        _run_stage(stage, sizes if stage is preparation.stages[0] else None)
        cpu_s = _cpu_seconds() - begin
        rates.append(PrepareRate(stage=stage.name, cpu_s=cpu_s, text_bytes=max(1, sum(sizes))))
    return rates


def _run_stage(stage: Stage, sizes: list[int] | None) -> None:
    """Run all tasks of a stage; `sizes`, if given, gets the bytes of text of each document that the stage reads."""
    with contextlib.redirect_stderr(io.StringIO()):  # hides the progress bars of datatrove
        for task in range(stage.num_tasks):
            documents = None
            for number, step in enumerate(stage.steps):
                documents = step.run(documents, task, stage.num_tasks)
                if sizes is not None and number == 0:  # the first step reads the sources
                    documents = _noting_sizes(documents, sizes)
            deque(documents or (), maxlen=0)  # The steps are generators, which run when they are read.


def _noting_sizes(documents: Iterable[Any], sizes: list[int]) -> Iterator[Any]:
    for document in documents:
        sizes.append(len(document.text.encode()))
        yield document


def _cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its ended child processes, such as those that extract HTML."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime
