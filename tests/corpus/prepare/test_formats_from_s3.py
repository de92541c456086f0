"""Inputs of every format on an S3 server: which documents `corpus build` and `corpus prepare` read and drop."""

from __future__ import annotations

import dataclasses
import io
import json
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import botocore.client
import pyarrow as pa
import pyarrow.parquet
import pytest
from made_sources import COMPRESS, english, lines, page, warc, wet
from prepare_processes import REPOSITORY
from support.s3_server import S3Server

from electra_dist.corpus.builder.build_corpus import WHOLE, build_corpus, build_part
from electra_dist.corpus.builder.build_request import BuildRequest
from electra_dist.corpus.inputs.find_inputs import search_inputs
from electra_dist.corpus.prepare.prepare_config import PrepareConfig
from electra_dist.errors import UserError
from electra_dist.store.open_store import open_store

NUM_GOOD = 3  # documents with text in each input
HTML = "text/html; charset=utf-8"


class Input(NamedTuple):
    """Files of one format, and how many of their documents are expected to be read and dropped."""

    label: str  # in the table
    files: dict[str, bytes]
    build_drops: dict[str, int]  # documents that `corpus build` reads and drops, by reason
    build_skips: dict[str, int]  # files that it does not read, by reason
    prepare_drops: dict[str, int]
    prepare_skips: dict[str, int]
    build_reads: int = NUM_GOOD  # documents with text
    prepare_reads: int = NUM_GOOD


def texts(first: int) -> list[str]:
    """Return `NUM_GOOD` documents of English text, made from the seeds `first`, `first` + 1 and so on."""
    return [english(seed) for seed in range(first, first + NUM_GOOD)]


def file_of(write: Callable[[Path], None], path: Path) -> bytes:
    """Return the bytes that a function writes to the file `path`."""
    write(path)
    return path.read_bytes()


def table_file(cells: list[str | None], kind: str) -> bytes:
    """Return a table with a column of text as bytes: a parquet file, or a stream of Arrow as Hugging Face saves."""
    table = pa.table({"text": pa.array(cells, pa.string())})
    out = io.BytesIO()
    if kind == "parquet":
        pa.parquet.write_table(table, out)
    else:
        with pa.ipc.new_stream(out, table.schema) as stream:
            stream.write_table(table)
    return out.getvalue()


def zipped(content: bytes) -> bytes:
    """Return a zip archive that contains a file of JSON lines, as bytes."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("part.jsonl", content)
    return out.getvalue()


def make_inputs(folder: Path) -> dict[str, Input]:
    """Return all inputs, keyed by the name of the folder to which each is written."""
    pages = [(f"http://a.example.com/{seed}", page(text), HTML, "200 OK") for seed, text in enumerate(texts(0))]
    pages += [
        ("http://a.example.com/picture", b"\x89PNG", "image/png", "200 OK"),
        ("http://a.example.com/gone", page(english(99)), HTML, "404 Not Found"),
    ]
    records = [(f"http://b.example.com/{seed}", text) for seed, text in enumerate(texts(10))]
    html_files = {f"{seed}.html": page(text) for seed, text in enumerate(texts(20))}
    dataset = {
        "data-00000-of-00001.arrow": table_file([*texts(40), None], "arrow"),
        "dataset_info.json": json.dumps({"description": "", "features": {"text": {"dtype": "string"}}}).encode(),
        "state.json": json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}).encode(),
    }
    inputs = {
        "warc": Input(
            "WARC (.warc.gz): three pages, a picture, a page with status 404",
            {"a.warc.gz": file_of(lambda path: warc(path, pages), folder / "a.warc.gz")},
            {},
            {"page": 1},
            {"not_html": 1, "http_status": 1},
            {},
            build_reads=0,
        ),
        "wet": Input(
            "WET (.wet.gz)",
            {"a.wet.gz": file_of(lambda path: wet(path, records), folder / "a.wet.gz")},
            {},
            {},
            {},
            {},
        ),
        "html": Input("HTML: three pages", html_files, {}, {"page": 3}, {}, {}, build_reads=0),
        "parquet": Input(
            "parquet with a null",
            {"a.parquet": table_file([*texts(30), None], "parquet")},
            {"no_text": 1},
            {},
            {"no_text": 1},
            {},
        ),
        "arrow": Input(
            "Hugging Face dataset on disk (.arrow with a null, two .json)",
            dataset,
            {"no_text": 3},
            {},
            {"no_text": 3},
            {},
        ),
        "other": Input(
            "text, beside a hidden file, a picture and an empty file",
            {"a.txt": "\n\n".join(texts(50)).encode(), ".b.txt": b"x", "c.png": b"x", "d.txt": b""},
            {},
            {"hidden": 1, "unknown_kind": 1, "empty_file": 1},
            {},
            {"hidden": 1, "unknown_kind": 1, "empty_file": 1},
        ),
    }
    compressions: dict[str, Callable[[bytes], bytes]] = {**COMPRESS, ".zip": zipped}
    for number, (ending, compress) in enumerate(compressions.items()):
        content = lines([*texts(60 + 10 * number), " "]) + b"{broken\n"
        name = f"a.jsonl{ending}" if ending != ".zip" else "a.zip"
        drops = {"broken_json": 1, "empty": 1}
        label = "jsonl, plain, .gz, .bz2, .xz, .zst and .zip: a blank text, a broken line"
        folder_name = "jsonl" + ending.replace(".", "-")
        inputs[folder_name] = Input(label, {name: compress(content)}, drops, {}, drops, {})
    return inputs


@pytest.fixture
def inputs(bucket: str, s3: S3Server, tmp_path: Path) -> dict[str, Input]:
    """Upload all inputs to S3, each to a folder of its own below `in/`; return them."""
    store = open_store(f"{bucket}/in", s3.endpoint_url)
    made = make_inputs(tmp_path)
    for folder, each in made.items():
        for name, content in each.files.items():
            store.write(f"{folder}/{name}", content)
    return made


@pytest.fixture
def request_of(
    build_request: Callable[..., BuildRequest], jsonl_file: Callable[..., Path], bucket: str, s3: S3Server
) -> Callable[[str], BuildRequest]:
    """Return the function `request_of(prefix)`, which makes the build of all inputs below a prefix of the bucket."""

    def make(prefix: str) -> BuildRequest:
        found = search_inputs([f"{bucket}/{prefix}"], s3.endpoint_url)
        return dataclasses.replace(
            build_request(jsonl_file(["text"])),
            inputs=found.files,
            skipped_inputs=found.skipped,
            output=f"{bucket}/corpus-{prefix.replace('/', '-')}",
            endpoint_url=s3.endpoint_url,
        )

    return make


def run_prepare(bucket: str, s3: S3Server, names: list[str], work: Path) -> Any:
    """Run `corpus prepare` without filters on all inputs, each as a source of its own; return prepare.json."""
    from electra_dist.corpus.prepare.preparation import check, finished_report, run

    config = PrepareConfig.model_validate(
        {
            "output": f"{bucket}/prepared",
            "work": str(work),
            "sources": [{"name": name, "path": f"{bucket}/in/{name}"} for name in names],
            "endpoint_url": s3.endpoint_url,
            "executor": {"tasks": 2, "workers": 1},
            "samples_per_filter": 0,
        }
    )
    preparation = check(config)
    run(preparation, lambda *progress: None)
    open_store(config.output, config.endpoint_url).delete("prepare.json")
    run(preparation, lambda *progress: None)  # writes the report again, and nothing else
    return finished_report(preparation)


def in_words(counts: dict[str, int]) -> str:
    """Return counts by reason as the text of a table cell."""
    return ", ".join(f"{reason} {number}" for reason, number in sorted(counts.items())) or "-"


def table(inputs: dict[str, Input]) -> Iterator[str]:
    """Yield the lines that the table of formats in docs/corpus_prepare.md should have."""
    yield "| input, from S3 | `corpus build` reads | drops | `corpus prepare` reads | drops |"
    yield "| --- | --- | --- | --- | --- |"
    for each in {each.label: each for each in inputs.values()}.values():
        of_build = in_words({**each.build_drops, **each.build_skips})
        of_prepare = in_words({**each.prepare_drops, **each.prepare_skips})
        yield f"| {each.label} | {each.build_reads} | {of_build} | {each.prepare_reads} | {of_prepare} |"


@pytest.mark.sample
def test_what_is_read_and_dropped_of_every_format(
    inputs: dict[str, Input], bucket: str, s3: S3Server, request_of: Callable[[str], BuildRequest], tmp_path: Path
) -> None:
    report = build_corpus(request_of("in")).report
    prepared = run_prepare(bucket, s3, list(inputs), tmp_path / "work")
    after = build_corpus(request_of("prepared/documents")).report
    assert report is not None and after is not None

    for name, each in inputs.items():
        source = report.sources.get(f"{bucket}/in/{name}")
        assert (source.documents if source else 0) == each.build_reads, name
        assert (source.documents_skipped if source else 0) == sum(each.build_drops.values()), name
        counts = prepared["sources"][name]
        assert counts["documents_out"] == each.prepare_reads, name
        dropped = {
            reason: by_source[name]
            for reasons in prepared["dropped"].values()
            for reason, by_source in reasons.items()
            if name in by_source
        }
        assert dropped == each.prepare_drops, name
        skipped = {reason: sum(counts.values()) for reason, counts in prepared["inputs_skipped"][name].items()}
        assert skipped == each.prepare_skips, name
    drops: Counter[str] = Counter()
    skips: Counter[str] = Counter()
    for each in inputs.values():
        drops.update(each.build_drops)
        skips.update(each.build_skips)
    documents = {kind: skipped.documents for kind, skipped in report.documents_skipped.items()}
    assert {kind: number for kind, number in documents.items() if number} == drops
    assert {reason: sum(counts.values()) for reason, counts in report.inputs_skipped.items()} == skips
    assert after.text.documents == sum(each.prepare_reads for each in inputs.values())
    assert "\n".join(table(inputs)) in (REPOSITORY / "docs" / "corpus_prepare.md").read_text()


def test_a_build_that_continues_fetches_only_inputs_that_were_not_read(
    bucket: str, s3: S3Server, request_of: Callable[[str], BuildRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(f"{bucket}/in", s3.endpoint_url)
    for number in range(6):
        texts_of_file = [english(seed) for seed in range(100 * number, 100 * number + 90)]
        store.write(f"{number}.jsonl", lines(texts_of_file))  # more than a group of inputs
    request = request_of("in")
    fetched: Counter[str] = Counter()
    refused: set[str] = set()
    send = botocore.client.BaseClient._make_api_call

    def watch(client: Any, operation: str, arguments: Any) -> Any:
        """Count the GET requests for inputs, and raise an error at a request for one of the files in `refused`."""
        key = arguments.get("Key", "")
        if operation == "GetObject" and key.endswith(".jsonl"):
            if key.rpartition("/")[2] in refused:
                raise UserError("the build ends here")
            fetched[key.rpartition("/")[2]] += 1
        return send(client, operation, arguments)

    monkeypatch.setattr(botocore.client.BaseClient, "_make_api_call", watch)
    refused.add("4.jsonl")
    with pytest.raises(UserError, match="the build ends here"):
        build_part(request, WHOLE)
    assert fetched.keys() == {f"{number}.jsonl" for number in range(4)}
    refused.clear()
    fetched.clear()
    build_part(request, WHOLE)
    assert fetched == {"4.jsonl": 1, "5.jsonl": 1}
