"""Origin files of a corpus name the documents of each row, in any input format, with build tasks and restarts."""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from electra_launcher.cli.main import app
from support.s3_server import S3Server
from typer.testing import CliRunner

from electra_dist.corpus.build_report import corpus_sources, find_preparations
from electra_dist.corpus.builder.build_corpus import Part, build_corpus, build_part
from electra_dist.corpus.builder.build_request import BuildRequest
from electra_dist.corpus.builder.join_parts import join_parts
from electra_dist.corpus.inputs.find_inputs import find_inputs
from electra_dist.corpus.inputs.text_decoding import RawDocument, decode_counted
from electra_dist.corpus.inputs.text_readers import DocumentStream
from electra_dist.corpus.origins import SCHEMA, lines_of_source, open_origins
from electra_dist.data.manifest import CorpusManifest, read_manifest
from electra_dist.data.shard import Shard
from electra_dist.errors import ManifestMismatch, UserError
from electra_dist.store.open_store import open_store
from electra_dist.tokenizer import Vocabulary, WordPieceTokenizer

RequestFactory = Callable[..., BuildRequest]
Prose = Callable[[int, int], list[str]]
Key = tuple[str, str, int, str | None, str | None]  # source, file, number, id, source of the record


@pytest.fixture
def texts_of(prose: Prose, tmp_path: Path) -> dict[Key, str]:
    """Write documents of several formats to two folders; return the text of each document by its key.

    The formats are plain text, JSON lines with and without ids, and a table with a column `id`.
    """
    web = tmp_path / "in" / "web"
    books = tmp_path / "in" / "books"
    web.mkdir(parents=True)
    books.mkdir()
    texts: dict[Key, str] = {}

    lines = []
    for number, text in enumerate(prose(40, 1)):
        record: dict[str, object] = {"text": text}
        names: tuple[str | None, str | None] = (None, None)
        if number % 3 == 0:
            record |= {"id": f"doc-{number}", "metadata": {"source": "forum"}}
            names = (f"doc-{number}", "forum")
        lines.append(json.dumps(record))
        texts[str(web), "web/a.jsonl", number, *names] = text
    (web / "a.jsonl").write_text("\n".join(lines))

    table_texts = prose(30, 2)
    table = pyarrow.table({"id": [1000 + number for number in range(30)], "text": table_texts})
    pyarrow.parquet.write_table(table, web / "b.parquet")
    for number, text in enumerate(table_texts):
        texts[str(web), "web/b.parquet", number, str(1000 + number), None] = text

    book_texts = prose(30, 3)
    (books / "c.txt").write_text("\n\n".join(book_texts))
    for number, text in enumerate(book_texts):
        texts[str(books), "books/c.txt", number, None, None] = text
    return texts


def examples(folder: Path) -> Iterator[tuple[Key, list[int]]]:
    """Yield the names of each example's document, and its ids."""
    store = open_store(str(folder))
    manifest = read_manifest(store)
    origins = open_origins(store, manifest)
    assert origins is not None
    pad_id = manifest.tokenizer.special["[PAD]"]
    for entry in manifest.shards:
        shard = Shard(folder / entry.name, manifest.seq_len, manifest.numpy_dtype)
        rows = shard.rows(np.arange(shard.num_rows))
        lines = origins.table(entry.name).to_pylist()
        assert sorted({line["row"] for line in lines}) == list(range(len(rows)))
        for place, line in enumerate(lines):
            is_last = place + 1 == len(lines) or lines[place + 1]["row"] != line["row"]
            end = manifest.seq_len if is_last else lines[place + 1]["start"]
            ids = [int(token) for token in rows[line["row"], line["start"] : end] if token != pad_id]
            key = (line["source"], line["file"], line["number"], line["id"], line["record_source"])
            yield key, ids


def tokens_by_document(folder: Path, vocabulary: Vocabulary) -> dict[Key, Counter[int]]:
    """Return, for each document, how often each token id occurs in the examples that the origin files assign to it."""
    special = vocabulary.special
    tokens: dict[Key, Counter[int]] = {}
    for key, ids in examples(folder):
        assert ids[0] == special["[CLS]"]
        assert ids.count(special["[CLS]"]) == 1
        added = (special["[CLS]"], special["[SEP]"])
        tokens.setdefault(key, Counter()).update(token for token in ids if token not in added)
    return tokens


def expected_tokens(text: str, vocabulary: Vocabulary) -> Counter[int]:
    """Return how often each token id occurs in a document, computed without the corpus builder."""
    lines = WordPieceTokenizer(vocabulary.ids, lowercase=True).encode(text.split("\n"))
    return Counter(token for line in lines for token in line)


@pytest.mark.parametrize("packing", ["rows", "none"])
def test_each_document_has_exactly_its_tokens_in_the_rows_that_are_named_for_it(
    texts_of: dict[Key, str], build_request: RequestFactory, tmp_path: Path, vocabulary: Vocabulary, packing: str
) -> None:
    """The rows of each document are compared with its text, tokenized separately; also those of held-out rows."""
    request = build_request(tmp_path / "in", heldout_fraction=0.2, packing=packing)

    build_corpus(request)

    folder = Path(request.output)
    train = tokens_by_document(folder, vocabulary)
    heldout = tokens_by_document(folder / "heldout", vocabulary)
    assert len(heldout) > 5
    assert not train.keys() & heldout.keys()
    assert train | heldout == {key: expected_tokens(text, vocabulary) for key, text in texts_of.items()}


def shards_of(folder: Path) -> dict[str, bytes]:
    """Return the content of each shard and manifest below a folder by its name, without origin files."""
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    return {name: (folder / name).read_bytes() for name in names if "origins" not in name}


def test_the_corpus_is_the_same_without_origin_files(
    texts_of: dict[Key, str], build_request: RequestFactory, tmp_path: Path
) -> None:
    with_files = build_request(tmp_path / "in", "with", heldout_fraction=0.2)
    without = build_request(tmp_path / "in", "without", heldout_fraction=0.2, origins=False)

    assert build_corpus(with_files).manifest == build_corpus(without).manifest

    assert shards_of(tmp_path / "with") == shards_of(tmp_path / "without")
    assert not list((tmp_path / "without").rglob("*origins*"))
    # A finished corpus is left as it is, also if the setting has changed since.
    again = dataclasses.replace(without, corpus=with_files.corpus)
    assert build_corpus(again).was_finished


def test_documents_that_repeat_are_in_the_origin_files_as_often(
    texts_of: dict[Key, str], build_request: RequestFactory, tmp_path: Path, vocabulary: Vocabulary
) -> None:
    books = str(tmp_path / "in" / "books")
    request = build_request(tmp_path / "in", source_epochs={books: 3})

    build_corpus(request)

    found = tokens_by_document(Path(request.output), vocabulary)
    for key, text in texts_of.items():
        times = 3 if key[0] == books else 1
        once = expected_tokens(text, vocabulary)
        assert found[key] == Counter({token: times * number for token, number in once.items()})


def test_a_bucket_without_one_of_its_origin_files_is_built_again(
    texts_of: dict[Key, str], build_request: RequestFactory, tmp_path: Path
) -> None:
    whole = build_request(tmp_path / "in", "whole")
    build_corpus(whole)
    request = dataclasses.replace(whole, output=str(tmp_path / "resumed"))
    build_part(request, Part(1, 2))
    lost = sorted((tmp_path / "resumed" / "origins").iterdir())[0]
    lost.unlink()

    for number in (1, 2):
        build_part(request, Part(number, 2))
    join_parts(request.output, None)

    names = {path.name for path in (tmp_path / "whole" / "origins").iterdir()}
    assert {path.name for path in (tmp_path / "resumed" / "origins").iterdir()} == names
    for name in [*(f"origins/{name}" for name in names), "origins.json"]:
        assert (tmp_path / "resumed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_build_goes_on_as_it_was_begun(
    texts_of: dict[Key, str], build_request: RequestFactory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    request = build_request(tmp_path / "in")
    without = dataclasses.replace(request, corpus=request.corpus.model_copy(update={"origins": False}))
    build_part(without, Part(1, 2))
    build_part(request, Part(2, 2))
    assert "was begun with corpus.origins false" in capsys.readouterr().out
    join_parts(request.output, None)
    assert not list(Path(request.output).rglob("*origins*"))


def flip_a_bit(path: Path) -> None:
    """Flip one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_side_file_that_is_damaged_or_of_another_corpus_is_refused(
    texts_of: dict[Key, str], build_request: RequestFactory, tmp_path: Path
) -> None:
    first = build_request(tmp_path / "in", "first")
    manifest = build_corpus(first).manifest
    second = build_request(tmp_path / "in", "second", shard_size_mb=0.08)
    build_corpus(second)
    store = open_store(first.output)

    flip_a_bit(tmp_path / "first" / "origins" / "shard-000000.parquet")
    origins = open_origins(store, manifest)
    assert origins is not None
    with pytest.raises(ManifestMismatch, match=r"shard-000000\.parquet: damaged.* restore it"):
        origins.table("shard-000000.tar")

    (tmp_path / "first" / "origins.json").write_bytes((tmp_path / "second" / "origins.json").read_bytes())
    with pytest.raises(ManifestMismatch, match="belongs to another corpus"):
        open_origins(store, manifest)

    (tmp_path / "first" / "origins.json").write_text('{"format": 1')
    with pytest.raises(ManifestMismatch, match=r"origins\.json: damaged"):
        open_origins(store, manifest)


def test_a_text_and_a_document_are_found_on_s3_as_in_a_folder(
    texts_of: dict[Key, str], build_request: RequestFactory, tmp_path: Path, bucket: str, s3: S3Server
) -> None:
    local = build_request(tmp_path / "in", heldout_fraction=0.2)
    remote = build_request(tmp_path / "in", f"{bucket}/corpus", endpoint_url=s3.endpoint_url, heldout_fraction=0.2)
    for request in (local, remote):
        build_corpus(request)

    for query in (["document 3"], ["--document", "1007"], ["--source", "books"]):
        found = []
        for request, options in ((local, []), (remote, ["--endpoint-url", s3.endpoint_url])):
            result = CliRunner().invoke(app, ["corpus", "find", request.output, *query, *options, "--json"])
            assert result.exit_code == 0, result.output
            found.append(json.loads(result.stdout))
        assert found[0] == found[1]
        assert found[0]["rows"] or found[0]["heldout_rows"]


def test_bytes_that_are_no_utf8_are_searched_for_in_names_and_refused_as_text(
    prose: Prose, build_request: RequestFactory, tmp_path: Path
) -> None:
    """The bytes come as half surrogate pairs, which is how Python takes them from a command line."""
    name = os.fsdecode(b"caf\xe9")
    (tmp_path / name).mkdir()
    (tmp_path / name / f"{name}.txt").write_text("\n\n".join(prose(5, 1)))
    request = build_request(tmp_path / name)
    build_corpus(request)

    for query in (["--source", str(tmp_path / name)], ["--document", f"{name}.txt#3"]):
        result = CliRunner().invoke(app, ["corpus", "find", request.output, *query, "--json"])
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["rows"]
    nothing = CliRunner().invoke(app, ["corpus", "find", request.output, "--source", f"x{name}"])
    assert nothing.exit_code == 0
    refused = CliRunner().invoke(app, ["corpus", "find", request.output, f"document {name}"])
    assert isinstance(refused.exception, UserError)
    assert "TEXT: document caf" in str(refused.exception)
    assert "not UTF-8" in str(refused.exception)


@pytest.mark.parametrize(
    ("value", "name"),
    [("a", "a"), (7, "7"), (True, None), (None, None), (1.5, None), (["a"], None), ("a\ud83d", "a\ufffd")],
)
def test_an_id_is_a_string_or_an_integer(value: object, name: str | None) -> None:
    record = RawDocument(json.dumps({"text": "some text", "id": value, "metadata": {"source": value}}).encode(), True)
    assert decode_counted(record, "text", "skip").names == (name, name)


def test_a_table_of_any_format_gives_its_ids(tmp_path: Path) -> None:
    table = pyarrow.table({"text": ["a b", None, "c"], "id": ["x", "y", None]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pyarrow.ipc.new_stream(tmp_path / "b.arrow", table.schema) as stream:
        stream.write_table(table)
    (tmp_path / "c.csv").write_text("id,text\nx,a b\ny\n,c\n")
    found = [(document.data, document.id) for document in DocumentStream(find_inputs([tmp_path]))]
    expected = [(b"a b", "x"), (None, "y"), (b"c", None)]
    assert found == [*expected, *expected, (b"a b", "x"), (None, None), (b"c", "")]


def test_verify_reads_the_origin_files_too(
    texts_of: dict[Key, str], build_request: RequestFactory, tmp_path: Path
) -> None:
    request = build_request(tmp_path / "in", heldout_fraction=0.2)
    build_corpus(request)
    command = ["verify", "--bytes", request.output, "--json"]
    good = CliRunner().invoke(app, command)
    assert good.exit_code == 0, good.output
    num_files = len(list(Path(request.output).rglob("*.parquet")))
    assert json.loads(good.stdout)["counts"]["origin file"] == num_files

    damaged = Path(request.output) / "heldout" / "origins" / "shard-000000.parquet"
    flip_a_bit(damaged)

    bad = CliRunner().invoke(app, command)
    assert isinstance(bad.exception, UserError)  # which ends the command with exit code 78
    assert [part["url"] for part in json.loads(bad.stdout)["bad"]] == [str(damaged)]


def test_licences_come_from_the_config_and_of_prepared_text_from_its_report(
    prose: Prose, build_request: RequestFactory, tmp_path: Path
) -> None:
    prepared = tmp_path / "prepared"
    (prepared / "documents").mkdir(parents=True)
    (tmp_path / "own").mkdir()
    for folder, seed in ((prepared / "documents", 1), (tmp_path / "own", 2)):
        (folder / "a.txt").write_text("\n\n".join(prose(20, seed)))
    counts = {"documents_in": 30, "documents_dropped": 10, "documents_out": 20}
    sources = {"web": {"license": "odc-by", "files": 1, **counts}, "wiki": {"license": "cc-by-sa-4.0", **counts}}
    dropped = {"minhash": {"near_duplicate": {"web": 10}}}
    (prepared / "prepare.json").write_text(json.dumps({"format": 1, "sources": sources, "dropped": dropped}))
    given = [str(prepared / "documents"), str(tmp_path / "own")]
    request = build_request([Path(path) for path in given], licences={given[1]: "cc0-1.0"})
    request = dataclasses.replace(request, prepared=find_preparations(given, None))

    report = build_corpus(request).report

    assert report is not None
    assert {name: source.licence for name, source in report.sources.items()} == {
        given[0]: "cc-by-sa-4.0, odc-by",
        given[1]: "cc0-1.0",
    }
    assert report.prepared[given[0]].dropped == dropped
    recorded = corpus_sources(open_store(request.output))
    assert recorded[given[1]] == {"tokens": report.sources[given[1]].tokens, "licence": "cc0-1.0"}
    assert find_preparations([str(prepared)], None).keys() == {given[0]}
    (prepared / "prepare.json").write_text(json.dumps({"sources": {"web": {"license": 3}}}))
    with pytest.raises(UserError, match=r"prepare\.json: damaged, .*; run .* again, or delete the file"):
        find_preparations(given, None)


def test_a_licence_of_an_unknown_source_is_refused(
    texts_of: dict[Key, str], build_request: RequestFactory, tmp_path: Path
) -> None:
    request = build_request(tmp_path / "in", licences={"wiki": "mit"})
    with pytest.raises(UserError, match=r"corpus\.licences: wiki is not a source of these inputs; .*books"):
        build_corpus(request)


def test_the_fingerprint_does_not_depend_on_licences(
    texts_of: dict[Key, str], build_request: RequestFactory, tmp_path: Path
) -> None:
    plain = build_request(tmp_path / "in", "plain")
    stated = build_request(tmp_path / "in", "stated", licences={str(tmp_path / "in" / "web"): "mit"})

    def manifest(request: BuildRequest) -> CorpusManifest:
        return build_corpus(request).manifest

    assert manifest(plain) == manifest(stated)


def test_a_source_is_found_by_its_name_or_by_whole_folders_at_its_end_and_not_by_the_end_of_a_word() -> None:
    names = ["b", "a/b", "ab", "a/ab", "b/a", "c"]
    records = [None, None, None, None, None, "x/b"]
    columns = {"row": range(6), "start": [0] * 6, "file": ["f"] * 6, "number": range(6), "source": names}
    table = pyarrow.table({**columns, "id": [None] * 6, "record_source": records}, schema=SCHEMA)
    assert lines_of_source(table, "b").tolist() == [True, True, False, False, False, True]
    assert lines_of_source(table, "a/b").tolist() == [False, True, False, False, False, False]
