"""Shards of webdataset's own writers are accepted; what cannot be trained on is refused."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import webdataset
from support.s3_server import S3Server

from electra_dist.corpus.index_shards import index_corpus
from electra_dist.data.corpus_manifest import read_manifest
from electra_dist.data.shard import Shard
from electra_dist.errors import ManifestMismatch, UserError
from electra_dist.store.open_store import open_store
from electra_dist.tokenizer import Vocabulary


@pytest.fixture
def rows(vocabulary: Vocabulary) -> np.ndarray:
    """100 rows of 16: [CLS] words [SEP] and some [PAD]."""
    special = vocabulary.special
    draw = np.random.default_rng(0)
    rows = draw.integers(special["[MASK]"] + 1, vocabulary.size, (100, 16)).astype(np.uint16)
    rows[:, 0] = special["[CLS]"]
    for row, end in zip(rows, draw.integers(3, 17, 100)):
        row[end - 1] = special["[SEP]"]
        row[end:] = special["[PAD]"]
    return rows


def write(folder: Path, rows: np.ndarray, name: str = "shard-000000.tar") -> None:
    folder.mkdir(exist_ok=True)
    with webdataset.TarWriter(str(folder / name)) as sink:
        for number, start in enumerate(range(0, len(rows), 30)):
            sink.write({"__key__": f"{number:06d}", "rows.npy": rows[start : start + 30]})


def test_shard_writer(tmp_path: Path, rows: np.ndarray, vocabulary: Vocabulary) -> None:
    pattern = str(tmp_path / "out-%04d.tar")
    with webdataset.ShardWriter(pattern, maxcount=2, verbose=0) as sink:
        for number, start in enumerate(range(0, 100, 30)):
            sink.write({"__key__": f"{number:06d}", "rows.npy": rows[start : start + 30]})
    manifest = index_corpus(open_store(str(tmp_path)), vocabulary, lowercase=True)
    assert manifest == read_manifest(open_store(str(tmp_path)))
    assert [entry.name for entry in manifest.shards] == ["out-0000.tar", "out-0001.tar"]
    assert (manifest.seq_len, manifest.dtype, manifest.num_rows) == (16, "uint16", 100)
    assert manifest.num_tokens == (rows != vocabulary.special["[PAD]"]).sum()
    assert manifest.tokenizer.sha256 == hashlib.sha256((tmp_path / "vocab.txt").read_bytes()).hexdigest()
    shard = Shard(tmp_path / "out-0001.tar", 16, np.dtype(np.uint16))
    assert (shard.rows(np.arange(40)) == rows[60:]).all()


def test_only_the_top_folder_is_indexed(tmp_path: Path, rows: np.ndarray, vocabulary: Vocabulary) -> None:
    write(tmp_path, rows)
    write(tmp_path / "heldout", rows)
    assert len(index_corpus(open_store(str(tmp_path)), vocabulary, lowercase=True).shards) == 1


def test_s3(tmp_path: Path, rows: np.ndarray, vocabulary: Vocabulary, bucket: str, s3: S3Server) -> None:
    write(tmp_path, rows)
    remote = open_store(f"{bucket}/indexed", s3.endpoint_url)
    remote.upload(tmp_path / "shard-000000.tar", "shard-000000.tar")
    there = index_corpus(remote, vocabulary, lowercase=True)
    assert there == index_corpus(open_store(str(tmp_path)), vocabulary, lowercase=True)


def test_rows_that_cannot_be_trained_on_are_refused(tmp_path: Path, rows: np.ndarray, vocabulary: Vocabulary) -> None:
    special = vocabulary.special
    no_start, inner_pad, foreign = rows.copy(), rows.copy(), rows.copy()
    no_start[50, 0] = special["[SEP]"]
    inner_pad[50, 1] = special["[PAD]"]
    foreign[50, 1] = vocabulary.size
    cases = {
        "does not begin with": no_start,
        "before its end": inner_pad,
        f"holds id {vocabulary.size}": foreign,
        "int32": rows.astype(np.int32),
        r"\(1600,\)": rows.reshape(-1),
    }
    for number, (message, bad) in enumerate(cases.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        with webdataset.TarWriter(str(folder / "a.tar")) as sink:
            sink.write({"__key__": "000000", "rows.npy": bad})
        with pytest.raises(ManifestMismatch, match=message) as error:
            index_corpus(open_store(str(folder)), vocabulary, lowercase=True)
        assert "\n" not in str(error.value)
        assert not (folder / "corpus.json").exists()


def test_folders_without_shards_or_with_a_corpus_are_refused(
    tmp_path: Path, rows: np.ndarray, vocabulary: Vocabulary
) -> None:
    store = open_store(str(tmp_path))
    with pytest.raises(UserError, match=r"no \*\.tar"):
        index_corpus(store, vocabulary, lowercase=True)
    (tmp_path / "a.tar").write_bytes(b"not a tar at all")
    with pytest.raises(ManifestMismatch, match=r"a\.tar: not a tar"):
        index_corpus(store, vocabulary, lowercase=True)
    (tmp_path / "a.tar").unlink()
    write(tmp_path, rows)
    write(tmp_path, rows[:, :8].copy(), "z.tar")
    with pytest.raises(ManifestMismatch, match=r"z\.tar"):
        index_corpus(store, vocabulary, lowercase=True)
    (tmp_path / "z.tar").unlink()
    index_corpus(store, vocabulary, lowercase=True)
    with pytest.raises(UserError, match=r"has a corpus\.json"):
        index_corpus(store, vocabulary, lowercase=True)
