"""Write the documents of a task to one file, read them in the next stage, and count what each step drops.

Guarantee: the file of task N is NNNNN.jsonl.gz, in every stage, and appears whole or not at all. Equal documents give
equal bytes: there is no time in the gzip header, and the keys of a line are sorted. The record with the counts of the
task is written after the file, and datatrove marks the task as completed after both. Of each source, documents in =
documents out + documents dropped by each step; `DropRecorder.as_json` asserts it. The samples of a step are the
documents with the smallest hashes of id and text, so a task that runs again keeps the same ones.

How: every filter and deduplication of datatrove writes what it drops to an exclusion writer. `DropRecorder.writer`
returns such a writer, which only counts and keeps samples.

Limits: another version of zlib may compress the same documents to other bytes.
"""

from __future__ import annotations

import bisect
import gzip
import hashlib
import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep

from electra_dist.corpus.counts import MAX_FIELDS, MAX_NAMES, measure, most_frequent
from electra_dist.store.atomic_files import file_sha256, make_folder, replacing
from electra_dist.store.open_store import open_store

DOCUMENTS_DIR = "documents"
RECORDS_DIR = "records"
_UNFINISHED_DIR = "unfinished"
_WORK_COMPRESSION = 1  # intermediate files are read once
_OUTPUT_COMPRESSION = 6
_SAMPLE_CHARS = 2000  # of the text of a dropped document


def file_of_task(rank: int) -> str:
    """Return the name of the file in which task `rank` of a stage writes its documents."""
    return f"{rank:05d}.jsonl.gz"


def record_of_task(rank: int) -> str:
    """Return the name of the file in which task `rank` of a stage writes its counts of documents."""
    return f"{rank:05d}.json"


class ReadDocuments(PipelineStep):
    """First step of a stage: reads the documents that the task of the same number wrote in an earlier stage."""

    name = "documents"
    type = "READER"

    def __init__(self, stage_folder: Path, recorder: DropRecorder) -> None:
        """Read from `stage_folder`, the folder of the earlier stage; count in the `recorder` of the new stage."""
        super().__init__()
        self._folder = stage_folder / DOCUMENTS_DIR
        self._recorder = recorder

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Yield the documents of task `rank` in the order in which they were written."""
        self._recorder.begin()
        with gzip.open(self._folder / file_of_task(rank), "rt", encoding="utf-8") as lines:
            for line in lines:
                document = Document(**json.loads(line))
                self._recorder.add_read(document)
                yield document


class WriteDocuments(PipelineStep):
    """Last step of a stage: writes the documents of a task to its file, then a file with their counts."""

    name = "documents"
    type = "WRITER"

    def __init__(
        self, stage_folder: Path, recorder: DropRecorder, output: str | None = None, endpoint_url: str | None = None
    ) -> None:
        """Write documents to `output`, or to `stage_folder` if it is None; the counts always go to `stage_folder`."""
        super().__init__()
        self._folder = stage_folder
        self._recorder = recorder
        self._output = output
        self._endpoint_url = endpoint_url

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Write all documents of `data`, then their counts; yield nothing."""
        name = file_of_task(rank)
        unfinished = self._folder / _UNFINISHED_DIR / name
        self._write(data, unfinished)
        record = self._recorder.as_json()
        record["file"] = {
            "name": f"{DOCUMENTS_DIR}/{name}",
            "sha256": file_sha256(unfinished),
            "size_bytes": unfinished.stat().st_size,
            "documents": sum(record["documents_out"].values()),
        }
        self._publish(unfinished, name)
        with replacing(self._folder / RECORDS_DIR / record_of_task(rank)) as out_record:
            out_record.write(json.dumps(record).encode())
        yield from ()

    def _write(self, documents: Iterable[Document], path: Path) -> None:
        """Write documents to a compressed file, count them, and wait until the file is on the disk."""
        make_folder(path.parent)
        level = _WORK_COMPRESSION if self._output is None else _OUTPUT_COMPRESSION
        with path.open("wb") as raw:
            with gzip.GzipFile("", "wb", level, raw, mtime=0) as out:
                for document in documents:
                    self._recorder.add_written(document)
                    out.write(_line_of(document))
            raw.flush()
            os.fsync(raw.fileno())

    def _publish(self, unfinished: Path, name: str) -> None:
        """Move a finished file to its place: the stage's folder, or the output of the preparation."""
        if self._output is not None:
            open_store(self._output, self._endpoint_url).upload(unfinished, f"{DOCUMENTS_DIR}/{name}")
            unfinished.unlink()
            return
        make_folder(self._folder / DOCUMENTS_DIR)
        os.replace(unfinished, self._folder / DOCUMENTS_DIR / name)


def _line_of(document: Document) -> bytes:
    """Return a document as a line of JSON with sorted keys, in UTF-8; half a surrogate pair becomes an escape."""
    tree = {"text": document.text, "id": document.id, "metadata": document.metadata}
    return json.dumps(tree, ensure_ascii=False, sort_keys=True).encode("utf-8", "backslashreplace") + b"\n"


class DropRecorder:
    """Counts of the documents that one task of a stage reads, drops and writes; all steps of the stage share it."""

    def __init__(self, samples_per_filter: int) -> None:
        self._samples_per_filter = samples_per_filter
        self.begin()

    def begin(self) -> None:
        """Set all counts to zero; the first step of a stage calls this when a task begins."""
        self.documents_in: Counter[str] = Counter()
        self.characters_in: Counter[str] = Counter()
        self.documents_out: Counter[str] = Counter()
        self.characters_out: Counter[str] = Counter()
        self.shapes_out: defaultdict[str, Counter[str]] = defaultdict(Counter)  # source -> counts of `TextShape`
        self.dropped: Counter[tuple[str, str, str]] = Counter()  # (step, reason, source) -> documents
        self.other_fields: defaultdict[str, Counter[str]] = defaultdict(Counter)  # source -> field -> records
        self._samples: defaultdict[str, list[tuple[str, dict[str, Any]]]] = defaultdict(list)
        self._current: Any = None

    def add_read(self, document: Any) -> None:
        """Count a document that was read, and remember it for `is_current`."""
        self.documents_in[document.metadata["source"]] += 1
        self.characters_in[document.metadata["source"]] += len(document.text)
        self._current = document

    def add_unreadable(self, source: str, reason: str) -> None:
        """Count a document that the reader of a source cannot turn into text, as read and as dropped."""
        self.documents_in[source] += 1
        self.dropped["read", reason, source] += 1

    def add_fields(self, source: str, names: Iterable[str]) -> None:
        """Count the fields with text of a record, or the columns of a table, without the source's `text_field`."""
        fields = self.other_fields[source]
        fields.update(names)
        if len(fields) > MAX_NAMES:
            self.other_fields[source] = Counter(dict(most_frequent(fields, MAX_FIELDS)))

    def add_written(self, document: Any) -> None:
        """Count a document that passed all steps of the stage, its characters and its `TextShape`."""
        self.documents_out[document.metadata["source"]] += 1
        self.characters_out[document.metadata["source"]] += len(document.text)
        self.shapes_out[document.metadata["source"]].update(measure(document.text))

    def drop(self, step: str, reason: str, document: Any) -> None:
        """Count a document that a step drops; keep it as a sample if few dropped documents have a smaller hash."""
        source = document.metadata["source"]
        self.dropped[step, reason, source] += 1
        key = hashlib.blake2b(f"{document.id}\n{document.text}".encode(), digest_size=16).hexdigest()
        sample = {"id": document.id, "source": source, "reason": reason, "text": document.text[:_SAMPLE_CHARS]}
        samples = self._samples[step]
        bisect.insort(samples, (key, sample), key=lambda pair: pair[0])
        del samples[self._samples_per_filter :]

    def writer(self, step: str, reason: str = "duplicate") -> ExclusionWriter:
        """Return an object that counts what a step drops; `reason` is recorded if the step itself gives none."""
        return ExclusionWriter(self, step, reason)

    def is_current(self, document: Any) -> bool:
        """Return whether `document` is the object that was read last; a shortened copy of it is another object."""
        return document is self._current

    def as_json(self) -> dict[str, Any]:
        """Return all counts and samples; raise AssertionError if the counts of a source do not add up."""
        dropped_of_source: Counter[str] = Counter()
        for (_, _, source), number in self.dropped.items():
            dropped_of_source[source] += number
        for source, number in self.documents_in.items():
            assert number == self.documents_out[source] + dropped_of_source[source], source
        return {
            "documents_in": dict(self.documents_in),
            "characters_in": dict(self.characters_in),
            "documents_out": dict(self.documents_out),
            "characters_out": dict(self.characters_out),
            "shapes_out": self.shapes_out,
            "other_fields": {
                source: dict(most_frequent(fields, MAX_FIELDS)) for source, fields in self.other_fields.items()
            },
            "dropped": [[*key, number] for key, number in sorted(self.dropped.items())],
            "samples": {step: [sample for _, sample in pairs] for step, pairs in sorted(self._samples.items())},
        }


class ExclusionWriter:
    """Counter of the documents that a step of datatrove drops; the step gets it as its `exclusion_writer`.

    The deduplication of sentences also writes copies of documents that it only shortens; these are not counted.
    """

    def __init__(self, recorder: DropRecorder, step: str, reason: str) -> None:
        """Count in `recorder` under the name `step`; `reason` is used if the step itself gives no reason."""
        self._recorder = recorder
        self._step = step
        self._reason = reason

    def __enter__(self) -> ExclusionWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def write(self, document: Any, rank: int = 0) -> None:
        """Count a document that the step drops; if the filter has put a reason into the metadata, that one is used."""
        if self._recorder.is_current(document):
            self._recorder.drop(self._step, document.metadata.get("filter_reason", self._reason), document)
