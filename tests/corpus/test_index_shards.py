"""Indexing of shards that webdataset's own writers made; shards that cannot be trained on are refused.

Fixtures: `vocabulary` is small, and its special tokens are not at the front; `rows` is valid rows of its ids.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import webdataset
from support.s3_server import S3Server

from electra_dist.corpus.index_shards import index_corpus
from electra_dist.data.manifest import read_manifest
from electra_dist.data.shard import Shard
from electra_dist.errors import ManifestMismatch, UserError
from electra_dist.store.open_store import open_store
from electra_dist.tokenizer import Vocabulary

NUM_ROWS = 100
SEQ_LEN = 16
BLOCK_ROWS = 30  # rows of a member of a shard; the last block has fewer


@pytest.fixture
def rows(vocabulary: Vocabulary) -> np.ndarray:
    """100 rows of 16 ids, uint16: [CLS], 1 to 14 words, [SEP] and, in shorter rows, [PAD]."""
    special = vocabulary.special
    draw = np.random.default_rng(0)
    first_word_id = special["[MASK]"] + 1
    rows = draw.integers(first_word_id, vocabulary.size, (NUM_ROWS, SEQ_LEN)).astype(np.uint16)
    rows[:, 0] = special["[CLS]"]
    lengths = draw.integers(3, SEQ_LEN + 1, NUM_ROWS)
    for row, length in zip(rows, lengths):
        row[length - 1] = special["[SEP]"]
        row[length:] = special["[PAD]"]
    return rows


def samples(rows: np.ndarray) -> list[dict]:
    """Return the rows as samples for a webdataset writer, each a block of 30 rows."""
    blocks = [rows[start : start + BLOCK_ROWS] for start in range(0, len(rows), BLOCK_ROWS)]
    return [{"__key__": f"{number:06d}", "rows.npy": block} for number, block in enumerate(blocks)]


def write_shard(path: Path, rows: np.ndarray) -> None:
    """Write the rows to one shard with webdataset's TarWriter."""
    path.parent.mkdir(exist_ok=True)
    with webdataset.TarWriter(str(path)) as sink:
        for sample in samples(rows):
            sink.write(sample)


def test_shards_of_webdatasets_shard_writer_are_indexed_with_their_rows_and_tokens(
    tmp_path: Path, rows: np.ndarray, vocabulary: Vocabulary
) -> None:
    """ShardWriter puts two blocks of 30 rows into each shard: 60 rows and 40 rows."""
    with webdataset.ShardWriter(str(tmp_path / "out-%04d.tar"), maxcount=2, verbose=0) as sink:
        for sample in samples(rows):
            sink.write(sample)
    store = open_store(str(tmp_path))

    manifest = index_corpus(store, vocabulary, lowercase=True)

    assert manifest == read_manifest(store)
    assert [entry.name for entry in manifest.shards] == ["out-0000.tar", "out-0001.tar"]
    assert manifest.seq_len == SEQ_LEN
    assert manifest.dtype == "uint16"
    assert manifest.num_rows == NUM_ROWS
    assert manifest.num_tokens == (rows != vocabulary.special["[PAD]"]).sum()
    vocab_bytes = (tmp_path / "vocab.txt").read_bytes()
    assert manifest.tokenizer.sha256 == hashlib.sha256(vocab_bytes).hexdigest()
    second_shard = Shard(tmp_path / "out-0001.tar", SEQ_LEN, np.dtype(np.uint16))
    assert (second_shard.rows(np.arange(40)) == rows[60:]).all()


def test_only_the_top_folder_is_indexed(tmp_path: Path, rows: np.ndarray, vocabulary: Vocabulary) -> None:
    write_shard(tmp_path / "shard-000000.tar", rows)
    write_shard(tmp_path / "heldout" / "shard-000000.tar", rows)

    manifest = index_corpus(open_store(str(tmp_path)), vocabulary, lowercase=True)

    assert len(manifest.shards) == 1


def test_shards_on_s3_get_the_manifest_of_the_same_shards_in_a_folder(
    tmp_path: Path, rows: np.ndarray, vocabulary: Vocabulary, bucket: str, s3: S3Server
) -> None:
    write_shard(tmp_path / "shard-000000.tar", rows)
    s3_store = open_store(f"{bucket}/indexed", s3.endpoint_url)
    s3_store.upload(tmp_path / "shard-000000.tar", "shard-000000.tar")

    s3_manifest = index_corpus(s3_store, vocabulary, lowercase=True)

    local_manifest = index_corpus(open_store(str(tmp_path)), vocabulary, lowercase=True)
    assert s3_manifest == local_manifest


def test_rows_that_cannot_be_trained_on_are_refused_and_no_manifest_is_written(
    tmp_path: Path, rows: np.ndarray, vocabulary: Vocabulary
) -> None:
    """Each case is a shard of one block with one fault, and the words that its error must hold."""
    special = vocabulary.special
    without_cls = rows.copy()
    without_cls[50, 0] = special["[SEP]"]
    with_inner_pad = rows.copy()
    with_inner_pad[50, 1] = special["[PAD]"]
    with_unknown_id = rows.copy()
    with_unknown_id[50, 1] = vocabulary.size
    cases = {
        "does not begin with": without_cls,
        "before its end": with_inner_pad,
        f"holds id {vocabulary.size}": with_unknown_id,
        "int32": rows.astype(np.int32),
        r"\(1600,\)": rows.reshape(-1),
    }

    for number, (message, faulty_block) in enumerate(cases.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        with webdataset.TarWriter(str(folder / "a.tar")) as sink:
            sink.write({"__key__": "000000", "rows.npy": faulty_block})

        with pytest.raises(ManifestMismatch, match=message) as error:
            index_corpus(open_store(str(folder)), vocabulary, lowercase=True)

        assert "\n" not in str(error.value)
        assert not (folder / "corpus.json").exists()


def test_folders_without_valid_shards_or_with_a_manifest_are_refused(
    tmp_path: Path, rows: np.ndarray, vocabulary: Vocabulary
) -> None:
    store = open_store(str(tmp_path))

    # The folder is empty.
    with pytest.raises(UserError, match=r"no \*\.tar"):
        index_corpus(store, vocabulary, lowercase=True)

    # The only shard is no tar.
    (tmp_path / "a.tar").write_bytes(b"not a tar at all")
    with pytest.raises(ManifestMismatch, match=r"a\.tar: not a tar"):
        index_corpus(store, vocabulary, lowercase=True)
    (tmp_path / "a.tar").unlink()

    # The rows of the second shard are half as long as those of the first.
    write_shard(tmp_path / "shard-000000.tar", rows)
    short_rows = rows[:, : SEQ_LEN // 2].copy()
    write_shard(tmp_path / "z.tar", short_rows)
    with pytest.raises(ManifestMismatch, match=r"z\.tar"):
        index_corpus(store, vocabulary, lowercase=True)
    (tmp_path / "z.tar").unlink()

    # The folder is indexed already.
    index_corpus(store, vocabulary, lowercase=True)
    with pytest.raises(UserError, match=r"has a corpus\.json"):
        index_corpus(store, vocabulary, lowercase=True)
