"""Steps of datatrove that write the documents of a task to one file, and read them in the next stage.

Guarantee: the file of task N is NNNNN.jsonl.gz, in every stage, and appears whole or not at all. Equal documents give
equal bytes: there is no time in the gzip header, and the keys of a line are sorted. The record with the counts of the
task is written after the file, and datatrove marks the task as completed after both.

Limits: another version of zlib may compress the same documents to other bytes.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep

from electra_dist.corpus.prepare.steps.drop_recorder import DropRecorder
from electra_dist.store.atomic_files import file_sha256, make_folder, replacing
from electra_dist.store.open_store import open_store

DOCUMENTS_DIR = "documents"
RECORDS_DIR = "records"
_UNFINISHED_DIR = "unfinished"
_WORK_COMPRESSION = 1  # intermediate files are read once
_OUTPUT_COMPRESSION = 6


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
        make_folder(unfinished.parent)
        level = _WORK_COMPRESSION if self._output is None else _OUTPUT_COMPRESSION
        with unfinished.open("wb") as raw:
            with gzip.GzipFile("", "wb", level, raw, mtime=0) as out:
                for document in data:
                    self._recorder.add_written(document)
                    out.write(_line_of(document))
            raw.flush()
            os.fsync(raw.fileno())
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
