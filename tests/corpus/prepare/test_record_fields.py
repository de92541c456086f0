"""A prepared document keeps the id and the other fields of its own record, whatever format the record had."""

from __future__ import annotations

import datetime
import gzip
import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from electra_launcher.cli.main import app
from typer.testing import CliRunner

from electra_dist.corpus.builder.build_corpus import build_corpus
from electra_dist.corpus.builder.build_request import BuildRequest
from electra_dist.corpus.prepare.prepare_config import PrepareConfig

RECORDS = [
    {"text": "the first text", "id": "post-1", "title": "One", "tags": ["a", {"b": None}], "score": 0.5},
    {"text": "the second text", "id": 22, "url": "http://a.example/2", "metadata": {"lang": "en", "title": "x"}},
    {"text": "the third text", "source": "stack", "license": "mit", "is_html": True, "filter_reason": "none"},
    {"text": "the fourth text", "id": "half \ud83d", "note \udcff": "an emoji \ud83d", "url": "http://a/\ud83d"},
    {"text": "the fifth text", "id": None, "url": 5, "metadata": "plain", "nan": float("nan")},
]
METADATA = [  # of these records, beside source, license and file
    {"title": "One", "tags": ["a", {"b": None}], "score": 0.5},
    {"url": "http://a.example/2", "lang": "en", "title": "x"},
    {"record": {"source": "stack", "license": "mit", "is_html": True, "filter_reason": "none"}},
    {"note \udcff": "an emoji \ud83d", "url": "http://a/\ufffd", "record": {"url": "http://a/\ud83d"}},
    {"id": None, "record": {"url": 5}, "metadata": "plain", "nan": None},
]
IDS = ["post-1", "22", "web/a.jsonl#2", "half \ufffd", "web/a.jsonl#4"]


@pytest.fixture
def prepared(tmp_path: Path) -> tuple[Path, dict[str, dict[str, Any]]]:
    """The output of a preparation of JSON lines, a parquet file and a CSV file: its folder, and text -> document."""
    from electra_dist.corpus.prepare.preparation import check, run

    source = tmp_path / "in"
    source.mkdir()
    (source / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    columns = {
        "text": ["a row of a table", "another row"],
        "id": pyarrow.array(["row-1", None]),
        "url": ["http://b.example/1", None],
        "day": [datetime.date(2024, 1, 2), None],
        "time": pyarrow.array([1, None], pyarrow.timestamp("ns", "UTC")),
        "price": [Decimal("1.50"), None],
        "weight": [float("nan"), 2.0],
        "picture": [b"\x89PNG", None],
        "parts": [[{"name": "x", "size": 1}], None],
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), source / "b.parquet")
    (source / "c.csv").write_text("id,text,year\nline-1,a line of a file,1999\n")
    sources = [{"name": "web", "path": str(source), "license": "cc0-1.0"}]
    config = {"output": str(tmp_path / "out"), "work": str(tmp_path / "work"), "sources": sources}
    run(check(PrepareConfig.model_validate(config)), lambda *progress: None)
    data = gzip.decompress((tmp_path / "out" / "documents" / "00000.jsonl.gz").read_bytes())
    documents = [json.loads(line) for line in data.splitlines()]
    return tmp_path / "out", {document["text"]: document for document in documents}


def test_documents_keep_their_ids_and_fields_and_are_found_by_the_ids(
    prepared: tuple[Path, dict[str, dict[str, Any]]], build_request: Callable[..., BuildRequest]
) -> None:
    folder, documents = prepared
    for record, own_id, metadata in zip(RECORDS, IDS, METADATA, strict=True):
        document = documents[str(record["text"])]
        set_here = {"source": "web", "license": "cc0-1.0", "file": "a.jsonl"}
        assert (document["id"], document["metadata"]) == (own_id, {**metadata, **set_here})

    first, second = documents["a row of a table"], documents["another row"]
    assert (first["id"], second["id"]) == ("row-1", "web/b.parquet#1")
    assert first["metadata"] == {
        "source": "web",
        "license": "cc0-1.0",
        "file": "b.parquet",
        "url": "http://b.example/1",
        "day": "2024-01-02",
        "time": "1970-01-01 00:00:00.000000001Z",
        "price": "1.50",
        "weight": None,
        "picture": None,
        "parts": [{"name": "x", "size": 1}],
    }
    assert second["metadata"]["weight"] == 2.0
    assert not {"url", "record"} & second["metadata"].keys()
    line = documents["a line of a file"]
    assert (line["id"], line["metadata"]["year"]) == ("line-1", "1999")

    request = build_request(folder / "documents")
    build_corpus(request)
    for document_id in ("post-1", "22", "web/a.jsonl#2", "half \ufffd", "row-1", "line-1"):
        result = CliRunner().invoke(app, ["corpus", "find", request.output, "--document", document_id, "--json"])
        assert result.exit_code == 0, result.output
        found = json.loads(result.stdout)["rows"]
        assert [document["document"] for row in found for document in row["documents"]] == [document_id]
