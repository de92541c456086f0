"""build.json: the counts equal those of an independent reading, for any number of workers and after interruptions."""

from __future__ import annotations

import dataclasses
import json
import tarfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from electra_dist.corpus.build_console import length_line, remarks, source_table
from electra_dist.corpus.build_report import read_report
from electra_dist.corpus.builder import join_parts, worker_stages
from electra_dist.corpus.builder.build_corpus import build_corpus
from electra_dist.corpus.builder.build_request import BuildRequest
from electra_dist.corpus.inputs.find_inputs import search_inputs
from electra_dist.data.manifest import CorpusManifest
from electra_dist.errors import ManifestMismatch, UserError
from electra_dist.store.interface import Store
from electra_dist.store.open_store import open_store
from electra_dist.tokenizer import Vocabulary, WordPieceTokenizer

Prose = Callable[[int, int], list[str]]
RequestFactory = Callable[..., BuildRequest]


class BuildStopped(Exception):
    """Raised inside a build to end it, in place of a kill."""


@pytest.fixture
def mixed(prose: Prose, tmp_path: Path) -> Path:
    """A folder with texts of several formats, of which some cannot be used, and files that are left out."""
    folder = tmp_path / "mixed"
    for name in ("wiki", "books", "shards"):
        (folder / name).mkdir(parents=True)
    lines = [json.dumps({"text": text}) for text in prose(90, 1)]
    lines += ['{"title": "no text"}', "", "{broken", '{"text": "\\u200b"}']
    (folder / "wiki/a.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "wiki/b.json").write_text(json.dumps([{"text": text} for text in prose(60, 2)]))
    (folder / "books/one.txt").write_bytes(
        b"\n\n".join(text.encode() for text in prose(60, 3)) + b"\n\ncaf\xe9 and so on"
    )
    (folder / "books/two.md").write_text("\u4e2d \u4e2d words of which some are unknown \u4e2d")
    with tarfile.open(folder / "shards/x.tar", "w") as tar:
        for number, text in enumerate(prose(30, 4)):
            path = tmp_path / "member"
            path.write_text(text)
            tar.add(path, f"{number:03d}.txt")
            tar.add(path, f"{number:03d}.cls")
    (folder / "page.html").write_text("x")
    (folder / "gone.txt").symlink_to(folder / "missing.txt")
    return folder


@pytest.fixture
def request_of(build_request: RequestFactory) -> Callable[..., BuildRequest]:
    """The function `request_of(folder, output, ...)`, as `build_request`, with what the search has left out."""

    def request(folder: Path, output: str = "corpus", **settings: Any) -> BuildRequest:
        found = search_inputs([folder])
        plain = build_request(folder, output, heldout_fraction=0.1, **settings)
        return dataclasses.replace(plain, skipped_inputs=found.skipped)

    return request


def report_of(request: BuildRequest) -> dict[str, Any]:
    """Return the content of build.json in the output of a build."""
    return json.loads((Path(request.output) / "build.json").read_text())


def test_the_report_counts_every_file_document_and_token(
    request_of: RequestFactory, mixed: Path, prose: Prose, vocabulary: Vocabulary
) -> None:
    """The independent truth is the texts that the inputs were written from, and the tokenizer."""
    request = request_of(mixed)

    result = build_corpus(request)

    report = report_of(request)
    texts = {"wiki": prose(90, 1) + prose(60, 2), "books": prose(60, 3), "shards": prose(30, 4)}
    texts["books"].append((mixed / "books/two.md").read_text())
    tokenizer = WordPieceTokenizer(vocabulary.ids, lowercase=True)
    num_tokens = Counter[str]()
    num_unknown = Counter[str]()
    lengths = Counter[int]()
    for source, source_texts in texts.items():
        for text in source_texts:
            [ids] = tokenizer.encode([text.replace("\n", " ")])
            num_tokens[source] += len(ids)
            num_unknown[source] += ids.count(vocabulary.special["[UNK]"])
            lengths[len(ids).bit_length()] += 1
    for source, source_texts in texts.items():
        counts = report["sources"][f"{mixed}/{source}"]
        assert counts["documents"] == len(source_texts)
        assert counts["tokens"] == num_tokens[source]
        assert counts["unk_tokens"] == num_unknown[source]
        assert counts["tokens_per_document"] == pytest.approx(num_tokens[source] / len(source_texts))
    assert num_unknown["books"] >= 3
    assert report["text"]["unk_rate"] == pytest.approx(num_unknown.total() / num_tokens.total())
    assert report["document_lengths"] == {str(2 ** (bits - 1)): lengths[bits] for bits in sorted(lengths)}

    sizes = {path.name: path.stat().st_size for path in mixed.rglob("*") if path.is_file()}
    assert report["files_read"] == {
        ending: {"files": 1, "bytes": sizes[name]}
        for ending, name in [
            (".json", "b.json"),
            (".jsonl", "a.jsonl"),
            (".md", "two.md"),
            (".tar", "x.tar"),
            (".txt", "one.txt"),
        ]
    }
    assert report["bytes_in"] == sum(sizes.values()) - sizes["page.html"]
    assert report["members_read"] == {".txt": 30}
    assert report["inputs_skipped"] == {"unknown_kind": {".cls": 30}, "page": {".html": 1}, "broken_link": {".txt": 1}}
    assert report["skipped_names"]["broken_link"] == ["gone.txt"]

    skipped = {kind: counts["documents"] for kind, counts in report["documents_skipped"].items()}
    assert skipped == result.manifest.totals["documents_skipped"]
    assert skipped == {"undecodable": 1, "broken_json": 1, "no_text": 1, "empty": 1, "no_tokens": 1}
    for kind, counts in report["documents_skipped"].items():
        name = "books/one.txt" if kind == "undecodable" else "wiki/a.jsonl"
        assert counts["files"] == 1
        assert counts["worst_files"] == {f"{mixed}/{name}": 1}, kind
    assert report["other_fields"] == {"title": 1}
    assert report["documents_skipped"]["undecodable"]["bytes"] == len(b"caf\xe9 and so on")
    assert report["undecodable"] == {"policy": "skip", "documents": 1, "bytes": 1}
    assert report["documents_in"] == report["documents_used"] + report["documents_heldout"] + 5
    assert report["documents_heldout"] == result.manifest.totals["documents_heldout"] > 0


def test_the_report_is_equal_for_two_workers_and_for_a_build_that_was_cut_twice(
    request_of: RequestFactory, mixed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = request_of(mixed, "whole")
    of_two_workers = request_of(mixed, "two", num_workers=2)
    cut = request_of(mixed, "cut")
    build_corpus(whole)
    build_corpus(of_two_workers)
    make = worker_stages.RowMaker.__call__

    for number_of_cut in (1, 2):

        def stop(self: worker_stages.RowMaker, bucket: int, last: int = number_of_cut) -> Any:
            if bucket == last:
                raise BuildStopped
            return make(self, bucket)

        with monkeypatch.context() as patch:
            patch.setattr(worker_stages.RowMaker, "__call__", stop)
            with pytest.raises(BuildStopped):
                build_corpus(cut)
    result = build_corpus(cut)

    assert result.resumed_shards == 2
    expected = (Path(whole.output) / "build.json").read_bytes()
    assert (Path(of_two_workers.output) / "build.json").read_bytes() == expected
    assert (Path(cut.output) / "build.json").read_bytes() == expected


def test_a_build_that_was_killed_before_corpus_json_writes_the_same_report_again(
    request_of: RequestFactory, mixed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All shards are finished then, so that the resumed build makes none."""
    request = request_of(mixed)

    write_manifest = join_parts.write_manifest

    def stop_at_the_training_corpus(store: Store, manifest: CorpusManifest) -> None:
        if store.url == request.output:
            raise BuildStopped
        write_manifest(store, manifest)

    with monkeypatch.context() as patch:
        patch.setattr(join_parts, "write_manifest", stop_at_the_training_corpus)
        with pytest.raises(BuildStopped):
            build_corpus(request)
    first_report = report_of(request)
    (Path(request.output) / "build.json").unlink()

    result = build_corpus(request)

    assert report_of(request) == first_report
    assert build_corpus(request).report == result.report, "a finished corpus keeps its report"


UNDECODABLE = [  # a line of the input, and the text that `replace` makes of it
    (b'{"text": "one caf\xe9 word"}', "one caf\ufffd word"),
    (b'{"text": "half \\ud83d pair"}', "half \ufffd pair"),
]


def test_replace_keeps_documents_with_bytes_that_are_not_utf8_and_counts_the_bytes(
    build_request: RequestFactory, prose: Prose, tmp_path: Path, vocabulary: Vocabulary
) -> None:
    """One of these bytes is in a document of 200 KB, of which nothing else may be lost."""
    long_text = " ".join(prose(200, 5))[:200_000].replace("\n", " ")
    path = tmp_path / "dirty.jsonl"
    lines = [line for line, _ in UNDECODABLE]
    lines.append(json.dumps({"text": long_text}).encode().replace(b"document 7", b"document\xff 7", 1))
    path.write_bytes(b"\n".join(lines) + b"\n")
    replaced = build_request(path, "replaced", undecodable="replace")
    skipped = build_request(path, "skipped")

    report = build_corpus(replaced).report
    with pytest.raises(UserError, match=r"no usable document among 3 \(undecodable 3\)"):
        build_corpus(skipped)

    assert report is not None
    texts = [text for _, text in UNDECODABLE]
    texts.append(long_text)
    tokenizer = WordPieceTokenizer(vocabulary.ids, lowercase=True)
    assert report.text.tokens == sum(len(ids) for ids in tokenizer.encode(texts))
    assert report.undecodable.model_dump() == {"policy": "replace", "documents": 3, "bytes": 1 + 6 + 1}
    assert report.documents_skipped["undecodable"].documents == 0
    [remark] = [line for line in remarks(report) if "not UTF-8" in line]
    assert "replaced 8 bytes that are not UTF-8 in 3 documents" in remark


def test_the_policy_for_undecodable_bytes_is_a_parameter_of_the_corpus(
    build_request: RequestFactory, prose: Prose, jsonl_file: Callable[..., Path]
) -> None:
    path = jsonl_file(prose(30, 1))
    skip = build_corpus(build_request(path, "skip")).manifest
    replace = build_corpus(build_request(path, "replace", undecodable="replace")).manifest

    assert skip.builder["undecodable"] == "skip"
    assert replace.builder["undecodable"] == "replace"
    assert [shard.sha256 for shard in skip.shards] == [shard.sha256 for shard in replace.shards]
    with pytest.raises(ManifestMismatch, match="with undecodable = skip, but this build has undecodable = replace"):
        build_corpus(build_request(path, "skip", undecodable="replace"))
    with pytest.raises(ManifestMismatch, match="with undecodable = replace, but this build has undecodable = skip"):
        build_corpus(build_request(path, "replace"))


def test_a_name_that_is_not_utf8_can_be_reported(request_of: RequestFactory, prose: Prose, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.txt").write_text("\n\n".join(prose(20, 1)))
    (folder / "caf\udce9").mkdir()
    (folder / "caf\udce9/b.txt").write_text("\n\n".join(prose(5, 2)))
    (folder / "\udcff\n.html").write_text("x")

    report = build_corpus(request_of(folder)).report

    assert report is not None
    assert report.skipped_names == {"page": ["\\udcff\n.html"]}
    assert report.sources[f"{folder}/caf\\udce9"].documents == 5


def test_the_lengths_of_documents_are_summed_up_by_powers_of_two(
    build_request: RequestFactory, jsonl_file: Callable[..., Path]
) -> None:
    """Ten documents: one of 3 words, five of 10 words, four of 100 words; each word is one token."""
    texts = ["that " * number for number in [3, 10, 10, 10, 10, 10, 100, 100, 100, 100]]

    report = build_corpus(build_request(jsonl_file(texts))).report

    assert report is not None
    assert report.document_lengths == {"2": 1, "8": 5, "64": 4}
    assert length_line(report) == (
        "documents by length: 10 % have fewer than 4 tokens, 50 % have fewer than 16 tokens, "
        "90 % have fewer than 128 tokens"
    )


def test_documents_of_about_the_same_length_are_described_by_one_phrase(
    build_request: RequestFactory, jsonl_file: Callable[..., Path]
) -> None:
    report = build_corpus(build_request(jsonl_file(["that " * number for number in (8, 10, 12, 15)]))).report

    assert report is not None
    assert length_line(report) == "documents by length: most have 8 to 15 tokens"


def test_a_damaged_report_is_an_error_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "build.json").write_text('{"format": 1}')

    with pytest.raises(UserError, match=r"build\.json: damaged, .*; delete the file") as error:
        read_report(open_store(str(tmp_path)))

    assert "\n" not in str(error.value)


def test_the_ten_files_with_most_losses_are_named_for_each_reason(
    build_request: RequestFactory, prose: Prose, tmp_path: Path
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    good = [json.dumps({"text": text}) for text in prose(40, 1)]
    for number in range(13):
        broken = ["{"] * (number + 1) + ['{"data": {"text": "x"}, "title": "y", "id": 1}'] * (number == 12)
        (folder / f"{number:02d}.jsonl").write_text("\n".join(good + broken))

    report = build_corpus(build_request(folder, num_workers=2)).report

    assert report is not None
    broken_json = report.documents_skipped["broken_json"]
    assert list(broken_json.worst_files.items()) == [
        (f"{folder}/{number:02d}.jsonl", number + 1) for number in range(12, 2, -1)
    ]
    assert broken_json.files == 13
    [line] = [line for line in remarks(report) if "not a JSON object" in line]
    assert line.startswith("left out 91 documents")
    assert f"{folder}/12.jsonl 13, {folder}/11.jsonl 12," in line
    assert line.endswith(f"{folder}/03.jsonl 4 and 3 files more")
    assert report.other_fields == {"data.text": 1, "title": 1}


def test_a_source_is_an_input_as_it_was_given_and_all_its_files_are_counted_together(
    build_request: RequestFactory, prose: Prose, tmp_path: Path
) -> None:
    folder = tmp_path / "in"
    (folder / "wiki").mkdir(parents=True)
    files = ["in/a.parquet", "in/b.parquet", "in/wiki/c.parquet", "alone.parquet", "x-0.parquet", "x-1.parquet"]
    for seed, name in enumerate(files):
        pyarrow.parquet.write_table(pyarrow.table({"text": prose(10 + seed, seed)}), tmp_path / name)
    inputs = [folder, tmp_path / "alone.parquet", tmp_path / "x-{0..1}.parquet"]

    report = build_corpus(build_request(inputs)).report

    assert report is not None
    assert {name: (counts.files, counts.documents_in) for name, counts in report.sources.items()} == {
        f"{folder}": (2, 10 + 11),
        f"{folder}/wiki": (1, 12),
        f"{tmp_path}/alone.parquet": (1, 13),
        f"{tmp_path}/x-{{0..1}}.parquet": (2, 14 + 15),
    }
    table = source_table(report)
    assert table.columns[1].header == "files"
    assert list(table.columns[1].cells) == ["1", "2", "1", "2", "6"]


def test_text_in_a_nested_field_is_used_and_a_wrong_field_is_answered_with_those_that_exist(
    build_request: RequestFactory, prose: Prose, tmp_path: Path
) -> None:
    texts = prose(60, 1)
    records = [{"id": number, "data": {"text": text, "n": 1}} for number, text in enumerate(texts)]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(record) for record in records))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "a.parquet")
    flat = [json.dumps({"text": text}) for text in texts]
    (tmp_path / "flat.jsonl").write_text("\n".join(flat))

    expected = build_corpus(build_request(tmp_path / "flat.jsonl", "flat"))
    for name in ("a.jsonl", "a.parquet"):
        found = build_corpus(build_request(tmp_path / name, f"of-{name}", text_field="data.text"))
        assert found.manifest.totals == expected.manifest.totals
        assert [entry.sha256 for entry in found.manifest.shards] == [
            entry.sha256 for entry in expected.manifest.shards
        ]
    with pytest.raises(UserError, match=r"--text-field to a field with text \(data\.text\)"):
        build_corpus(build_request(tmp_path / "a.jsonl", "no", text_field="data"))
    with pytest.raises(
        UserError, match=r"no column `data\.body` of text; .*: id \(no text\), data\.text, data\.n \(no text\)$"
    ):
        build_corpus(build_request(tmp_path / "a.parquet", "no2", text_field="data.body"))
