"""A build: the same bytes whoever works on it, every document accounted for, refusals of one line."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import webdataset
from support.s3_server import S3Server

from electra_dist.corpus.build_corpus import build_corpus
from electra_dist.corpus.build_request import BuildRequest
from electra_dist.data.corpus_manifest import CorpusManifest, read_manifest
from electra_dist.data.shard import Shard
from electra_dist.errors import ManifestMismatch, StoreError, UserError
from electra_dist.store.open_store import open_store
from electra_dist.tokenizer import Vocabulary, WordPieceTokenizer

Prose = Callable[[int, int], list[str]]
Jsonl = Callable[..., Path]
Request = Callable[..., BuildRequest]


def all_rows(folder: Path, manifest: CorpusManifest) -> np.ndarray:
    blocks = []
    for entry in manifest.shards:
        shard = Shard(folder / entry.name, manifest.seq_len, manifest.numpy_dtype)
        blocks.append(shard.rows(np.arange(shard.num_rows)))
        shard.close()
    return np.concatenate(blocks)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def word_counts(rows: np.ndarray, vocabulary: Vocabulary) -> Counter[int]:
    special = {vocabulary.special[token] for token in ("[PAD]", "[CLS]", "[SEP]")}
    return Counter(number for number in rows.ravel().tolist() if number not in special)


@pytest.fixture
def inputs(prose: Prose, jsonl: Jsonl) -> list[Path]:
    return [jsonl(prose(120, 1), "a.jsonl"), jsonl(prose(150, 2), "b.jsonl")]


@pytest.mark.parametrize("packing", ["rows", "none"])
def test_rows_hold_every_token_of_every_document(
    make_request: Request, inputs: list[Path], vocabulary: Vocabulary, prose: Prose, packing: str
) -> None:
    request = make_request(inputs, packing=packing)
    manifest = build_corpus(request).manifest
    rows = all_rows(Path(request.output), manifest)
    tokenizer = WordPieceTokenizer(vocabulary, lowercase=True)
    expected = Counter(n for text in prose(120, 1) + prose(150, 2) for line in tokenizer.encode([text]) for n in line)
    assert word_counts(rows, vocabulary) == expected
    is_pad = rows == vocabulary.special["[PAD]"]
    assert not (is_pad[:, :-1] & ~is_pad[:, 1:]).any()
    starts = rows == vocabulary.special["[CLS]"]
    assert starts[:, 0].all()
    totals = manifest.totals
    assert totals["text_tokens"] == sum(expected.values())
    assert totals["examples"] == starts.sum()
    assert totals["rows"] == manifest.num_rows == len(rows)
    assert totals["tokens"] == manifest.num_tokens == (~is_pad).sum()
    if packing == "none":
        assert (starts.sum(1) == 1).all()
        assert totals["rows"] == totals["examples"]


def test_packing_conserves_examples(make_request: Request, inputs: list[Path], vocabulary: Vocabulary) -> None:
    found = []
    for packing in ("rows", "none"):
        request = make_request(inputs, packing, packing=packing)
        rows = all_rows(Path(request.output), build_corpus(request).manifest)
        real = [row[row != vocabulary.special["[PAD]"]] for row in rows]
        parts = [np.split(row, np.flatnonzero(row == vocabulary.special["[CLS]"])[1:]) for row in real]
        found.append((len(rows), sorted(part.tolist() for row in parts for part in row)))
    assert found[0][1] == found[1][1]
    assert found[0][0] < found[1][0]


def test_manifest_tells_the_truth(make_request: Request, inputs: list[Path], vocabulary: Vocabulary) -> None:
    request = make_request(inputs)
    folder = Path(request.output)
    manifest = build_corpus(request).manifest
    assert manifest == read_manifest(open_store(request.output))
    assert len(manifest.shards) >= 4
    for entry in manifest.shards:
        data = (folder / entry.name).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (entry.bytes, entry.sha256)
    assert all(entry.rows * 64 * 2 >= 40_000 for entry in manifest.shards[:-1])
    assert manifest.tokenizer.special == vocabulary.special
    assert hashlib.sha256((folder / "vocab.txt").read_bytes()).hexdigest() == manifest.tokenizer.sha256
    assert set(files_of(folder)) == {"corpus.json", "vocab.txt", *(entry.name for entry in manifest.shards)}


def test_any_number_of_workers_gives_the_same_corpus(make_request: Request, inputs: list[Path]) -> None:
    one = make_request(inputs, "one", heldout_fraction=0.1)
    four = make_request(inputs, "four", heldout_fraction=0.1, num_workers=4)
    assert build_corpus(one).manifest.fingerprint == build_corpus(four).manifest.fingerprint
    assert files_of(Path(one.output)) == files_of(Path(four.output))


def test_the_place_of_the_inputs_does_not_matter(make_request: Request, inputs: list[Path], tmp_path: Path) -> None:
    first = build_corpus(make_request(inputs, "first")).manifest
    for path in inputs:
        (tmp_path / "elsewhere").mkdir(exist_ok=True)
        shutil.copy(path, tmp_path / "elsewhere")
    assert build_corpus(make_request(tmp_path / "elsewhere", "second")).manifest == first


def test_webdataset_reads_the_shards(make_request: Request, inputs: list[Path]) -> None:
    request = make_request(inputs)
    manifest = build_corpus(request).manifest
    urls = [str(Path(request.output) / entry.name) for entry in manifest.shards]
    dataset = webdataset.WebDataset(urls, shardshuffle=False).decode()
    rows = np.concatenate([sample["rows.npy"] for sample in dataset])
    assert (rows == all_rows(Path(request.output), manifest)).all()


DIRT = [
    (b'{"text": "caf\xe9"}', "undecodable"),
    (b'{"text": "half \\ud83d"}', "undecodable"),
    (b'{"text": "cut o', "broken_json"),
    (b"17", "broken_json"),
    (b'{"title": "none"}', "no_text"),
    (b'{"text": 5}', "no_text"),
    (b"", "empty"),
    (b'{"text": "  "}', "empty"),
    ('{"text": "\u200b\u200e"}'.encode(), "no_tokens"),
]


@pytest.mark.parametrize("heldout_fraction", [0.0, 0.3])
def test_every_document_is_used_held_out_or_skipped_by_kind(
    make_request: Request, prose: Prose, tmp_path: Path, heldout_fraction: float
) -> None:
    good = [json.dumps({"text": text}).encode() for text in prose(200, 4)]
    lines = [line for number, text in enumerate(good) for line in (text, DIRT[number % len(DIRT)][0])]
    (tmp_path / "dirty.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    totals = build_corpus(make_request(tmp_path / "dirty.jsonl", heldout_fraction=heldout_fraction)).manifest.totals
    expected = Counter(DIRT[number % len(DIRT)][1] for number in range(200))
    assert totals["documents_skipped"] == expected
    assert totals["documents_in"] == 400
    assert totals["documents_used"] + totals["documents_heldout"] == 200
    assert (totals["documents_heldout"] > 0) == (heldout_fraction > 0)


def test_held_out_documents_are_a_corpus_of_their_own(
    make_request: Request, prose: Prose, jsonl: Jsonl, vocabulary: Vocabulary
) -> None:
    texts = prose(300, 5)
    request = make_request(jsonl(texts), heldout_fraction=0.25)
    result = build_corpus(request)
    assert result.heldout is not None
    heldout = read_manifest(open_store(request.output + "/heldout"))
    assert heldout == result.heldout
    held = all_rows(Path(request.output) / "heldout", heldout)
    train = all_rows(Path(request.output), result.manifest)
    tokenizer = WordPieceTokenizer(vocabulary, lowercase=True)
    expected = Counter(n for text in texts for line in tokenizer.encode([text]) for n in line)
    assert word_counts(held, vocabulary) + word_counts(train, vocabulary) == expected
    assert result.manifest.totals["documents_heldout"] == pytest.approx(75, abs=25)
    assert (Path(request.output) / "heldout/vocab.txt").read_text() == vocabulary.text


def test_a_text_goes_to_the_same_side_in_every_copy(make_request: Request, prose: Prose, jsonl: Jsonl) -> None:
    """By content: a duplicate never stands on both sides."""
    texts = prose(40, 6)
    once = build_corpus(make_request(jsonl(texts, "1.jsonl"), "once", heldout_fraction=0.5)).manifest.totals
    thrice = build_corpus(make_request(jsonl(texts * 3, "3.jsonl"), "thrice", heldout_fraction=0.5)).manifest.totals
    assert thrice["documents_heldout"] == 3 * once["documents_heldout"] > 0


def test_a_finished_corpus_is_left_alone(make_request: Request, inputs: list[Path]) -> None:
    request = make_request(inputs, heldout_fraction=0.1)
    first = build_corpus(request)
    stamps = {path: path.stat().st_mtime_ns for path in Path(request.output).rglob("*")}
    again = build_corpus(request)
    assert again.was_there
    assert not first.was_there
    assert (again.manifest, again.heldout) == (first.manifest, first.heldout)
    assert stamps == {path: path.stat().st_mtime_ns for path in Path(request.output).rglob("*")}


OTHERS = [
    ({"seq_len": 32}, "seq_len"),
    ({"seed": 4}, "seed"),
    ({"packing": "none"}, "packing"),
    ({"lowercase": False}, "lowercase"),
    ({"text_field": "body"}, "text_field"),
    ({"heldout_fraction": 0.2}, "heldout_fraction"),
]


class Stopped(Exception):
    """Thrown into a build in place of a kill."""


@pytest.fixture
def half_built(make_request: Request, inputs: list[Path], monkeypatch: pytest.MonkeyPatch) -> BuildRequest:
    """A build that ended after two shards."""
    request = make_request(inputs, heldout_fraction=0.1)
    with monkeypatch.context() as patch:
        from electra_dist.corpus.build_corpus import _Build

        finish = _Build._finish_shard

        def finish_two(self, number, chunks):  # type: ignore[no-untyped-def]
            if number == 2:
                raise Stopped
            return finish(self, number, chunks)

        patch.setattr(_Build, "_finish_shard", finish_two)
        with pytest.raises(Stopped):
            build_corpus(request)
    return request


def test_a_build_goes_on_where_it_was(half_built: BuildRequest, make_request: Request, inputs: list[Path]) -> None:
    whole = make_request(inputs, "whole", heldout_fraction=0.1)
    build_corpus(whole)
    done = {path: path.stat().st_mtime_ns for path in Path(half_built.output).glob("shard-*")}
    assert len(done) == 2
    result = build_corpus(half_built)
    assert result.resumed_shards == 2
    assert {path: path.stat().st_mtime_ns for path in done} == done
    assert files_of(Path(half_built.output)) == files_of(Path(whole.output))


def test_a_lost_shard_is_made_again(half_built: BuildRequest, make_request: Request, inputs: list[Path]) -> None:
    (Path(half_built.output) / "shard-000001.tar").unlink()
    assert build_corpus(half_built).resumed_shards == 1
    whole = make_request(inputs, "whole", heldout_fraction=0.1)
    build_corpus(whole)
    assert files_of(Path(half_built.output)) == files_of(Path(whole.output))


@pytest.mark.parametrize(("change", "key"), OTHERS)
@pytest.mark.parametrize("finished", [False, True])
def test_another_build_in_the_same_folder_is_refused(
    half_built: BuildRequest, make_request: Request, inputs: list[Path], change: dict, key: str, finished: bool
) -> None:
    if finished:
        build_corpus(half_built)
    before = files_of(Path(half_built.output))
    with pytest.raises(ManifestMismatch, match=f"with {key} = ") as error:
        build_corpus(make_request(inputs, **{"heldout_fraction": 0.1, **change}))
    assert "\n" not in str(error.value)
    assert files_of(Path(half_built.output)) == before


def test_another_vocabulary_is_refused(half_built: BuildRequest, vocabulary: Vocabulary) -> None:
    other = Vocabulary(vocabulary.text + "more\n", "other")
    with pytest.raises(ManifestMismatch, match="with tokenizer = "):
        build_corpus(dataclasses.replace(half_built, vocabulary=other))


@pytest.mark.parametrize("change", ["letter", "fewer"])
def test_text_that_changed_is_refused(
    half_built: BuildRequest, make_request: Request, inputs: list[Path], change: str
) -> None:
    if change == "letter":
        inputs[0].write_bytes(inputs[0].read_bytes().replace(b"document 3", b"document 4"))
    else:
        inputs[0].write_bytes(inputs[0].read_bytes()[:1000])
        inputs[1].write_bytes(b"")
    with pytest.raises(ManifestMismatch, match="half built from inputs that have changed since"):
        build_corpus(make_request(inputs, heldout_fraction=0.1))


def test_a_damaged_file_can_be_mended_on_the_way(
    make_request: Request, inputs: list[Path], prose: Prose, tmp_path: Path
) -> None:
    whole = gzip.compress(b"".join(json.dumps({"text": text}).encode() + b"\n" for text in prose(50, 8)))
    damaged = tmp_path / "z.jsonl.gz"
    damaged.write_bytes(whole[:-2000])
    with pytest.raises(UserError, match=r"z\.jsonl\.gz: cannot be read to its end"):
        build_corpus(make_request([*inputs, damaged]))
    damaged.write_bytes(whole)
    mended = build_corpus(make_request([*inputs, damaged]))
    assert mended.resumed_shards > 0
    assert mended.manifest == build_corpus(make_request([*inputs, damaged], "at_once")).manifest


def test_a_finished_corpus_of_other_inputs_is_refused(make_request: Request, inputs: list[Path]) -> None:
    build_corpus(make_request(inputs))
    with pytest.raises(ManifestMismatch, match="finished corpus that was built from other inputs"):
        build_corpus(make_request(inputs[:1]))


@pytest.mark.parametrize("content", [b"", b"\n\n", b'{"text": ""}\n{"body": "x"}\n'])
def test_nothing_usable_is_an_error_that_leaves_nothing(make_request: Request, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    request = make_request(tmp_path / "a.jsonl")
    with pytest.raises(UserError, match="no usable document among") as error:
        build_corpus(request)
    assert "\n" not in str(error.value)
    assert not Path(request.output).exists() or not files_of(Path(request.output))


def test_everything_held_out_is_an_error(make_request: Request, jsonl: Jsonl) -> None:
    request = make_request(jsonl(["some text"]), heldout_fraction=0.999999)
    with pytest.raises(UserError, match="held out 1"):
        build_corpus(request)


def test_an_output_that_cannot_be_written_is_an_error(
    make_request: Request, inputs: list[Path], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="file"):
        build_corpus(make_request(inputs, "file/corpus"))


def test_shards_of_unknown_origin_are_not_overwritten(
    make_request: Request, inputs: list[Path], tmp_path: Path
) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/shard-000000.tar").write_bytes(b"precious")
    with pytest.raises(UserError, match=r"holds shards but no corpus\.json"):
        build_corpus(make_request(inputs))
    assert (tmp_path / "corpus/shard-000000.tar").read_bytes() == b"precious"


def test_rows_too_short_for_an_example_are_refused(make_request: Request, inputs: list[Path]) -> None:
    with pytest.raises(UserError, match=r"data\.seq_len 7"):
        build_corpus(make_request(inputs, seq_len=7))


def test_s3_output_is_the_same_corpus(make_request: Request, inputs: list[Path], bucket: str, s3: S3Server) -> None:
    url, endpoint = bucket, s3.endpoint_url
    local = build_corpus(make_request(inputs, heldout_fraction=0.1))
    remote = build_corpus(make_request(inputs, f"{url}/deep/corpus", endpoint_url=endpoint, heldout_fraction=0.1))
    assert remote.manifest.fingerprint == local.manifest.fingerprint
    store = open_store(f"{url}/deep/corpus", endpoint)
    assert read_manifest(store) == local.manifest
    assert not store.list("progress/")
    for entry in local.manifest.shards:
        assert hashlib.sha256(store.read(entry.name)).hexdigest() == entry.sha256
    assert read_manifest(open_store(f"{url}/deep/corpus/heldout", endpoint)) == local.heldout
