"""The corpus builder: equal bytes for any number of workers, every document counted, errors of one line.

Fixtures: `prose(num_documents, seed)` returns random documents, `jsonl_file(texts, name)` writes them to a JSON-lines
file, `inputs` is two such files, and `build_request(inputs, output, ...)` returns a request for rows of 64 ids in
shards of about 40 kB.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import webdataset
from support.folder_contents import file_contents
from support.raw_inputs import RAW_FORMATS, write_raw_inputs
from support.s3_server import S3Server

from electra_dist.corpus.builder.build_corpus import build_corpus
from electra_dist.corpus.builder.build_request import BuildRequest
from electra_dist.corpus.inputs.find_inputs import find_inputs
from electra_dist.data.manifest import CorpusManifest, read_manifest
from electra_dist.data.shard import Shard
from electra_dist.errors import StoreError, UserError
from electra_dist.store.open_store import open_store
from electra_dist.tokenizer import Vocabulary, WordPieceTokenizer

Prose = Callable[[int, int], list[str]]
JsonlFile = Callable[..., Path]
RequestFactory = Callable[..., BuildRequest]


def all_rows(folder: Path, manifest: CorpusManifest) -> np.ndarray:
    """Return the rows of all shards of a corpus, [rows, seq_len], in the order of the manifest."""
    rows_of_shards = []
    for entry in manifest.shards:
        shard = Shard(folder / entry.name, manifest.seq_len, manifest.numpy_dtype)
        rows_of_shards.append(shard.rows(np.arange(shard.num_rows)))
        shard.close()
    return np.concatenate(rows_of_shards)


def token_counts(texts: list[str], vocabulary: Vocabulary) -> Counter[int]:
    """Return how often each id occurs when the texts are tokenized on their own, without the builder."""
    tokenizer = WordPieceTokenizer(vocabulary.ids, lowercase=True)
    counts: Counter[int] = Counter()
    for text in texts:
        for line_ids in tokenizer.encode([text]):
            counts.update(line_ids)
    return counts


def text_token_counts(rows: np.ndarray, vocabulary: Vocabulary) -> Counter[int]:
    """Return how often each id occurs in the rows, without [PAD], [CLS] and [SEP]."""
    added_ids = {vocabulary.special[token] for token in ("[PAD]", "[CLS]", "[SEP]")}
    return Counter(token_id for token_id in rows.ravel().tolist() if token_id not in added_ids)


def examples_of_rows(rows: np.ndarray, vocabulary: Vocabulary) -> list[list[int]]:
    """Return the examples in the rows: each begins at a [CLS], and [PAD] is left out."""
    examples = []
    for row in rows:
        tokens = row[row != vocabulary.special["[PAD]"]]
        starts = np.flatnonzero(tokens == vocabulary.special["[CLS]"])
        examples += [example.tolist() for example in np.split(tokens, starts[1:])]
    return examples


@pytest.mark.parametrize("packing", ["rows", "none"])
def test_rows_hold_every_token_of_every_document(
    build_request: RequestFactory, jsonl_file: JsonlFile, vocabulary: Vocabulary, prose: Prose, packing: str
) -> None:
    """The independent truth is the tokenizer, called on the texts; the manifest must count the same tokens."""
    texts_a = prose(120, 1)
    texts_b = prose(150, 2)
    request = build_request([jsonl_file(texts_a, "a.jsonl"), jsonl_file(texts_b, "b.jsonl")], packing=packing)

    manifest = build_corpus(request).manifest

    rows = all_rows(Path(request.output), manifest)
    expected_counts = token_counts(texts_a + texts_b, vocabulary)
    assert text_token_counts(rows, vocabulary) == expected_counts

    is_pad = rows == vocabulary.special["[PAD]"]
    pad_before_token = is_pad[:, :-1] & ~is_pad[:, 1:]
    assert not pad_before_token.any()
    is_cls = rows == vocabulary.special["[CLS]"]
    assert is_cls[:, 0].all(), "a row does not begin with [CLS]"

    totals = manifest.totals
    num_tokens = (~is_pad).sum()
    assert totals["text_tokens"] == sum(expected_counts.values())
    assert totals["examples"] == is_cls.sum()
    assert totals["rows"] == len(rows)
    assert manifest.num_rows == len(rows)
    assert totals["tokens"] == num_tokens
    assert manifest.num_tokens == num_tokens
    if packing == "none":
        examples_per_row = is_cls.sum(1)
        assert (examples_per_row == 1).all()
        assert totals["rows"] == totals["examples"]


def test_texts_in_every_format_give_every_token_from_a_folder_and_from_s3(
    build_request: RequestFactory, vocabulary: Vocabulary, prose: Prose, tmp_path: Path, bucket: str, s3: S3Server
) -> None:
    """A prefix on S3 gives the same corpus as a folder with the same files."""
    folder = tmp_path / "raw"
    texts = prose(len(RAW_FORMATS) * 5, 1)
    write_raw_inputs(folder, texts)
    for path in (folder / "b").iterdir():
        open_store(f"{bucket}/raw", s3.endpoint_url).upload(path, path.name)
    request = build_request(folder)
    part_request = build_request(folder / "b", "part")
    s3_inputs = find_inputs([f"{bucket}/raw/"], s3.endpoint_url)
    s3_output = str(tmp_path / "part_from_s3")
    s3_request = dataclasses.replace(part_request, inputs=s3_inputs, endpoint_url=s3.endpoint_url, output=s3_output)

    result = build_corpus(request)
    part = build_corpus(part_request)
    part_from_s3 = build_corpus(s3_request)

    rows = all_rows(Path(request.output), result.manifest)
    assert text_token_counts(rows, vocabulary) == token_counts(texts, vocabulary)
    assert result.report is not None
    assert sum(counts.files for counts in result.report.files_read.values()) == len(RAW_FORMATS)
    assert part_from_s3.manifest == part.manifest


def test_archives_without_text_are_an_error_that_counts_their_members(
    build_request: RequestFactory, inputs: list[Path], tmp_path: Path
) -> None:
    """A corpus is no input: its shards hold rows of ids."""
    corpus = build_request(inputs, "corpus")
    build_corpus(corpus)

    with pytest.raises(UserError, match=r"no usable document among 0 \(left out: \.npy \d+ "):
        build_corpus(build_request(list(Path(corpus.output).glob("*.tar")), "again"))


def test_packed_rows_hold_the_same_examples_in_fewer_rows(
    build_request: RequestFactory, inputs: list[Path], vocabulary: Vocabulary
) -> None:
    packed_request = build_request(inputs, "packed", packing="rows")
    unpacked_request = build_request(inputs, "unpacked", packing="none")

    packed_manifest = build_corpus(packed_request).manifest
    unpacked_manifest = build_corpus(unpacked_request).manifest

    packed_rows = all_rows(Path(packed_request.output), packed_manifest)
    unpacked_rows = all_rows(Path(unpacked_request.output), unpacked_manifest)
    packed_examples = examples_of_rows(packed_rows, vocabulary)
    unpacked_examples = examples_of_rows(unpacked_rows, vocabulary)
    assert sorted(packed_examples) == sorted(unpacked_examples)
    assert len(packed_rows) < len(unpacked_rows)


def test_the_manifest_records_the_size_and_sha256_of_every_file(
    build_request: RequestFactory, inputs: list[Path], vocabulary: Vocabulary
) -> None:
    row_bytes = 64 * 2  # 64 ids of two bytes
    shard_bytes = 40_000  # `shard_size_mb` of the request; a shard holds about ten documents, so sizes differ
    request = build_request(inputs)
    folder = Path(request.output)

    manifest = build_corpus(request).manifest

    assert manifest == read_manifest(open_store(request.output))
    assert len(manifest.shards) >= 4
    for entry in manifest.shards:
        data = (folder / entry.name).read_bytes()
        assert entry.bytes == len(data)
        assert entry.sha256 == hashlib.sha256(data).hexdigest()
    mean_bytes = manifest.num_rows * row_bytes / len(manifest.shards)
    assert mean_bytes == pytest.approx(shard_bytes, rel=0.25)
    assert manifest.tokenizer.special == vocabulary.special
    assert manifest.tokenizer.sha256 == hashlib.sha256((folder / "vocab.txt").read_bytes()).hexdigest()
    shard_names = [entry.name for entry in manifest.shards]
    origin_files = {f"origins/{Path(name).stem}.parquet" for name in shard_names}
    other_files = {"build.json", "corpus.json", "origins.json", "vocab.txt"}
    assert set(file_contents(folder)) == {*other_files, *shard_names, *origin_files}


def test_four_workers_write_the_same_bytes_as_one(build_request: RequestFactory, inputs: list[Path]) -> None:
    request_of_one = build_request(inputs, "one", heldout_fraction=0.1)
    request_of_four = build_request(inputs, "four", heldout_fraction=0.1, num_workers=4)

    manifest_of_one = build_corpus(request_of_one).manifest
    manifest_of_four = build_corpus(request_of_four).manifest

    assert manifest_of_one.fingerprint == manifest_of_four.fingerprint
    assert file_contents(Path(request_of_one.output)) == file_contents(Path(request_of_four.output))


def test_an_input_gives_the_corpus_that_this_version_of_the_builder_always_gave(
    build_request: RequestFactory, prose: Prose, tmp_path: Path
) -> None:
    """The fingerprints are those of the first corpus of builder version 1; another one needs another version."""
    folder = tmp_path / "in"
    folder.mkdir()
    lines = [json.dumps({"text": text}).encode() for text in prose(60, 1)]
    lines.insert(7, b'{"text": "caf\xe9"}')
    (folder / "b.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    (folder / "a.txt").write_text("\n\n".join(prose(40, 2)))
    (folder / "linked.txt").symlink_to(folder / "a.txt")
    (folder / "page.html").write_text("left out")

    result = build_corpus(build_request(folder, heldout_fraction=0.1))

    assert result.heldout is not None
    assert result.manifest.fingerprint == "f55c9ba2e9759eab0dae3e8a7b5f96b0c0d0a69a42897246b535809beafe737f"
    assert result.heldout.fingerprint == "5e22152807329138d7e835d33153ac9639694763a653cf12f8b66367df151688"


def test_inputs_in_another_folder_give_the_same_manifest(
    build_request: RequestFactory, inputs: list[Path], tmp_path: Path
) -> None:
    other_folder = tmp_path / "elsewhere"
    other_folder.mkdir()
    for path in inputs:
        shutil.copy(path, other_folder)

    manifest = build_corpus(build_request(inputs, "first")).manifest
    manifest_of_copies = build_corpus(build_request(other_folder, "second")).manifest

    assert manifest_of_copies == manifest


def test_webdataset_streams_the_same_rows_as_a_user_would(build_request: RequestFactory, inputs: list[Path]) -> None:
    """A brace pattern of pipes, which cannot seek, and two workers of a DataLoader that share the shards."""
    request = build_request(inputs)
    folder = Path(request.output)
    manifest = build_corpus(request).manifest
    last_number = len(manifest.shards) - 1
    assert last_number >= 2

    url = f"pipe:cat {folder}/shard-{{000000..{last_number:06d}}}.tar"
    dataset = webdataset.WebDataset(url, shardshuffle=False).decode().to_tuple("rows.npy")
    loader = webdataset.WebLoader(dataset, batch_size=None, num_workers=2)
    streamed_rows = np.concatenate([rows for (rows,) in loader])

    # Each worker reads every second shard, so the blocks come in another order.
    expected_rows = all_rows(folder, manifest)
    assert sorted(map(bytes, streamed_rows)) == sorted(map(bytes, expected_rows))


def test_webdataset_reads_the_same_rows_from_the_shards(build_request: RequestFactory, inputs: list[Path]) -> None:
    """The shards are ordinary WebDataset tars: the library's own reader is the independent truth."""
    request = build_request(inputs)
    folder = Path(request.output)
    manifest = build_corpus(request).manifest

    urls = [str(folder / entry.name) for entry in manifest.shards]
    dataset = webdataset.WebDataset(urls, shardshuffle=False).decode()
    webdataset_rows = np.concatenate([sample["rows.npy"] for sample in dataset])

    assert (webdataset_rows == all_rows(folder, manifest)).all()


UNUSABLE_LINES = [  # a line of the input, and the reason for which the builder must skip it
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
def test_every_document_is_counted_as_used_held_out_or_skipped_for_its_reason(
    build_request: RequestFactory, prose: Prose, tmp_path: Path, heldout_fraction: float
) -> None:
    num_usable = 200
    lines = []
    expected_skips: Counter[str] = Counter()
    for number, text in enumerate(prose(num_usable, 4)):
        unusable_line, reason = UNUSABLE_LINES[number % len(UNUSABLE_LINES)]
        lines += [json.dumps({"text": text}).encode(), unusable_line]
        expected_skips[reason] += 1
    path = tmp_path / "dirty.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")

    totals = build_corpus(build_request(path, heldout_fraction=heldout_fraction)).manifest.totals

    assert totals["documents_skipped"] == expected_skips
    assert totals["documents_in"] == 2 * num_usable
    assert totals["documents_used"] + totals["documents_heldout"] == num_usable
    is_any_held_out = totals["documents_heldout"] > 0
    assert is_any_held_out == (heldout_fraction > 0)


def test_held_out_documents_make_a_second_corpus_and_no_token_is_lost(
    build_request: RequestFactory, prose: Prose, jsonl_file: JsonlFile, vocabulary: Vocabulary
) -> None:
    """The held-out corpus lies in the folder `heldout`; the tokens of both corpora are those of the texts."""
    texts = prose(300, 5)
    request = build_request(jsonl_file(texts), heldout_fraction=0.25)
    heldout_folder = Path(request.output) / "heldout"

    result = build_corpus(request)

    assert result.heldout is not None
    heldout_manifest = read_manifest(open_store(str(heldout_folder)))
    assert heldout_manifest == result.heldout
    heldout_counts = text_token_counts(all_rows(heldout_folder, heldout_manifest), vocabulary)
    train_counts = text_token_counts(all_rows(Path(request.output), result.manifest), vocabulary)
    assert heldout_counts + train_counts == token_counts(texts, vocabulary)
    expected_heldout = 75  # 0.25 of 300 documents, each held out or not by its hash
    assert result.manifest.totals["documents_heldout"] == pytest.approx(expected_heldout, abs=25)
    assert (heldout_folder / "vocab.txt").read_text() == vocabulary.text


def test_copies_of_a_document_are_all_held_out_or_all_used(
    build_request: RequestFactory, prose: Prose, jsonl_file: JsonlFile
) -> None:
    """The content of a document decides, so that training never sees a duplicate of a held-out document."""
    texts = prose(40, 6)
    request_of_one_copy = build_request(jsonl_file(texts, "1.jsonl"), "once", heldout_fraction=0.5)
    request_of_three_copies = build_request(jsonl_file(texts * 3, "3.jsonl"), "thrice", heldout_fraction=0.5)

    heldout_of_one_copy = build_corpus(request_of_one_copy).manifest.totals["documents_heldout"]
    heldout_of_three_copies = build_corpus(request_of_three_copies).manifest.totals["documents_heldout"]

    assert heldout_of_one_copy > 0
    assert heldout_of_three_copies == 3 * heldout_of_one_copy


@pytest.mark.parametrize("content", [b"", b"\n\n", b'{"text": ""}\n{"body": "x"}\n'])
def test_inputs_without_a_usable_document_are_an_error_that_leaves_no_file(
    build_request: RequestFactory, tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    request = build_request(path)

    with pytest.raises(UserError, match="no usable document among") as error:
        build_corpus(request)

    assert "\n" not in str(error.value)
    assert file_contents(Path(request.output)) == {}


def test_holding_out_every_document_is_an_error(build_request: RequestFactory, jsonl_file: JsonlFile) -> None:
    request = build_request(jsonl_file(["some text"]), heldout_fraction=0.999999)

    with pytest.raises(UserError, match="held out 1"):
        build_corpus(request)


def test_an_output_folder_that_cannot_be_created_is_an_error(
    build_request: RequestFactory, inputs: list[Path], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("x")

    with pytest.raises(StoreError, match="file"):
        build_corpus(build_request(inputs, "file/corpus"))


def test_shards_in_a_folder_without_a_manifest_are_not_overwritten(
    build_request: RequestFactory, inputs: list[Path], tmp_path: Path
) -> None:
    shard = tmp_path / "corpus/shard-000000.tar"
    shard.parent.mkdir()
    shard.write_bytes(b"precious")

    with pytest.raises(UserError, match=r"holds shards but no corpus\.json"):
        build_corpus(build_request(inputs))

    assert shard.read_bytes() == b"precious"


def test_rows_too_short_for_an_example_are_refused(build_request: RequestFactory, inputs: list[Path]) -> None:
    with pytest.raises(UserError, match=r"data\.seq_len 7"):
        build_corpus(build_request(inputs, seq_len=7))


def test_a_corpus_on_s3_equals_the_local_one(
    build_request: RequestFactory, inputs: list[Path], bucket: str, s3: S3Server
) -> None:
    url = f"{bucket}/deep/corpus"
    local_request = build_request(inputs, heldout_fraction=0.1)
    s3_request = build_request(inputs, url, endpoint_url=s3.endpoint_url, heldout_fraction=0.1)

    local = build_corpus(local_request)
    remote = build_corpus(s3_request)

    assert remote.manifest.fingerprint == local.manifest.fingerprint
    store = open_store(url, s3.endpoint_url)
    assert read_manifest(store) == local.manifest
    assert not store.list("progress/"), "the records of progress are not deleted"
    for entry in local.manifest.shards:
        assert hashlib.sha256(store.read(entry.name)).hexdigest() == entry.sha256
    origin_files = [key for key in file_contents(Path(local_request.output)) if "origins" in key]
    assert len(origin_files) > len(local.manifest.shards)
    for key in origin_files:
        assert store.read(key) == (Path(local_request.output) / key).read_bytes()
    heldout_store = open_store(f"{url}/heldout", s3.endpoint_url)
    assert read_manifest(heldout_store) == local.heldout
