"""Add up the counts of all tasks in prepare.json, the report of a preparation.

Guarantee: documents in = documents out + documents dropped, for each source; the documents that a stage reads are
those that the stage before wrote. prepare.json is written last: an output that has it is complete. It holds no time
and no path of the work folder, so a repetition gives the same bytes.

| key | content |
| --- | --- |
| `sources` | for each source: licence, files, bytes, documents and characters read and kept, `TextShape` |
| `dropped` | step -> reason -> source -> documents |
| `inputs_skipped` | source -> reason -> ending -> files that were not read |
| `outputs` | the files with the documents: name, sha256, bytes, documents |
| `config` | what decided the result: the config without folders and machines, and the versions of libraries |
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import (
    Any,
    NotRequired,  # pydantic needs this one before Python 3.12
)

from datatrove.pipeline.base import PipelineStep
from pydantic import TypeAdapter
from typing_extensions import TypedDict

from electra_dist.corpus.counts import FIELDS_FOUND, MAX_FIELDS, TextShape, most_frequent, remark_on_shape
from electra_dist.corpus.prepare.document_files import RECORDS_DIR, record_of_task
from electra_dist.corpus.prepare.prepare_config import PrepareConfig
from electra_dist.corpus.prepare.source_plan import SourcePlan, read_plan
from electra_dist.errors import UserError
from electra_dist.store.json_file import read_json_object
from electra_dist.store.open_store import open_store

REPORT_FILE = "prepare.json"
SAMPLES_DIR = "samples"
_FORMAT = 1
_NAMED_DROPS = 3  # steps with their reasons that are named for a source that has lost all documents

Tree = dict[str, Any]


class SourceCounts(TypedDict):
    """Entry of prepare.json for one source: its licence, files, documents and characters."""

    license: str
    files: int
    bytes: int
    documents_in: int
    documents_dropped: int
    documents_out: int
    characters_in: int
    characters_out: int
    shape: NotRequired[dict[str, int]]
    other_fields: NotRequired[dict[str, int]]  # field with text of records without `text_field` -> such records


class OutputFile(TypedDict):
    """Entry of prepare.json for one output file with documents."""

    name: str
    sha256: str
    size_bytes: int
    documents: int


class PrepareReport(TypedDict):
    """Content of prepare.json, the report that marks a preparation as complete."""

    format: int
    documents_in: int
    documents_dropped: int
    documents_out: int
    sources: dict[str, SourceCounts]
    dropped: dict[str, dict[str, dict[str, int]]]
    inputs_skipped: dict[str, dict[str, dict[str, int]]]
    outputs: list[OutputFile]
    config: Tree


REPORT = TypeAdapter(PrepareReport)


class WriteReport(PipelineStep):
    """The only step of a preparation's last stage. It writes samples of dropped documents, then prepare.json."""

    name = "report"
    type = "WRITER"

    def __init__(self, config: PrepareConfig, stage_names: Sequence[str]) -> None:
        """Store the config, and the names of the stages that write documents, in order; their counts are added up."""
        super().__init__()
        self._config = config
        self._stage_names = stage_names

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        """Add up the counts of all stages, and write the samples and prepare.json; yield nothing."""
        config = self._config
        work = Path(config.work)
        records = []
        for name in self._stage_names:
            files = [work / name / RECORDS_DIR / record_of_task(task) for task in range(config.executor.tasks)]
            records.append([read_json_object(file, f"delete {work} and prepare again") for file in files])
        store = open_store(config.output, config.endpoint_url)
        for step, lines in _samples(records).items():
            store.write(f"{SAMPLES_DIR}/{step}.jsonl", "".join(lines).encode())
        report = make_report(config, read_plan(work), records)
        store.write(REPORT_FILE, (json.dumps(report, indent=1, ensure_ascii=False) + "\n").encode())
        yield from ()


def make_report(config: PrepareConfig, plan: SourcePlan, records: Sequence[Sequence[Tree]]) -> Tree:
    """Return the content of prepare.json; raise AssertionError if the counts do not add up.

    `records` holds, for each stage that writes documents, in order, the records with the counts of its tasks.
    """
    documents_in = _sum(records[0], "documents_in")
    documents_out = _sum(records[-1], "documents_out")
    dropped, num_dropped = _sum_dropped(records)
    for earlier, later in pairwise(records):
        assert _sum(earlier, "documents_out") == _sum(later, "documents_in")
    sources = {}
    for source in config.sources:
        name = source.name
        assert documents_in[name] == documents_out[name] + num_dropped[name], name
        files = [file for file in plan.files if file.source == name]
        sources[name] = {
            "license": source.license,
            "files": len(files),
            "bytes": sum(file.size for file in files),
            "documents_in": documents_in[name],
            "documents_dropped": num_dropped[name],
            "documents_out": documents_out[name],
            "characters_in": _sum(records[0], "characters_in")[name],
            "characters_out": _sum(records[-1], "characters_out")[name],
            "shape": _shape(records[-1], name),
        }
        fields = _total(records[0], "other_fields", name)
        if fields:
            sources[name]["other_fields"] = dict(most_frequent(fields, MAX_FIELDS))
    return {
        "format": _FORMAT,
        "documents_in": documents_in.total(),
        "documents_dropped": num_dropped.total(),
        "documents_out": documents_out.total(),
        "sources": sources,
        "dropped": dropped,
        "inputs_skipped": plan.inputs_skipped,
        "outputs": [record["file"] for record in records[-1]],
        "config": plan.identity,
    }


def _sum(records: Sequence[Tree], key: str) -> Counter[str]:
    total: Counter[str] = Counter()
    for record in records:
        total.update(record[key])
    return total


def _sum_dropped(records: Sequence[Sequence[Tree]]) -> tuple[Tree, Counter[str]]:
    """Add up the dropped documents of all tasks: as step -> reason -> source -> number, and as source -> number."""
    dropped: Tree = {}
    num_dropped: Counter[str] = Counter()
    for record in chain.from_iterable(records):
        for step, reason, source, number in record["dropped"]:
            by_source = dropped.setdefault(step, {}).setdefault(reason, {})
            by_source[source] = by_source.get(source, 0) + number
            num_dropped[source] += number
    return dropped, num_dropped


def _shape(records: Sequence[Tree], source: str) -> dict[str, int]:
    return dict.fromkeys(TextShape.model_fields, 0) | _total(records, "shapes_out", source)


def _total(records: Sequence[Tree], key: str, source: str) -> Counter[str]:
    total: Counter[str] = Counter()
    for record in records:
        total.update(record.get(key, {}).get(source, {}))
    return total


def _samples(records: Sequence[Sequence[Tree]]) -> dict[str, list[str]]:
    """Return samples of dropped documents as JSON lines: step -> its samples, in the order of stages and tasks."""
    lines: dict[str, list[str]] = {}
    for stage_records in records:
        for record in stage_records:
            for step, samples in record["samples"].items():
                for sample in samples:
                    line = json.dumps(sample, ensure_ascii=False, sort_keys=True) + "\n"
                    lines.setdefault(step, []).append(line)
    return lines


def lines_of_lost_sources(report: PrepareReport, output: str) -> list[str]:
    """Return a line for each source that has lost all documents, with the steps that dropped them, most first.

    Another line names the fields found in records without the source's `text_field`. Raises UserError with these
    lines if no document of any source is kept.
    """
    lines = []
    for name, source in report["sources"].items():
        if fields := source.get("other_fields"):
            lines.append(f"source {name}: {FIELDS_FOUND} (text_field): {', '.join(fields)}")
        if source["documents_out"] == 0 and source["documents_in"]:
            lines.append(
                f"source {name}: none of {source['documents_in']:,} documents is kept; dropped by "
                f"{_steps_that_dropped(report, name)}"
            )
    if report["documents_out"] == 0:
        found = "; ".join(lines) or "the sources have no documents"
        raise UserError(
            f"{output}: the preparation keeps no document: {found}; correct the sources or these steps, and set "
            "another `output` and `work`"
        )
    return lines


def _steps_that_dropped(report: PrepareReport, source: str) -> str:
    """Name the steps that dropped most of a source's documents, as in: "language (de) 1,024, exact (duplicate) 3"."""
    drops: Counter[str] = Counter()
    for step, reasons in report["dropped"].items():
        for reason, count_of_source in reasons.items():
            drops[f"{step} ({reason})"] = count_of_source.get(source, 0)
    return ", ".join(f"{step} {number:,}" for step, number in drops.most_common(_NAMED_DROPS) if number)


def remarks_on_shapes(report: PrepareReport) -> list[str]:
    """Return a line for each source whose kept documents look like something else than text, such as base64."""
    shapes = {name: TextShape(**source.get("shape", {})) for name, source in report["sources"].items()}
    return [line for name, shape in shapes.items() if (line := remark_on_shape(f"source {name}", shape))]
