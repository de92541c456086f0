"""Bytes that change on the disk after a shard was verified are found before a row that has them is used."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from electra_kernels.native import cpu_library
from hypothesis import given, settings
from hypothesis import strategies as st
from support.remote_store import Remote

from electra_dist.data import shard_cache
from electra_dist.data.corpora import Corpora
from electra_dist.data.loader import RowLoader
from electra_dist.data.order import CorpusOrder, RowOrder
from electra_dist.data.shard import ChangedRow, rows_of
from electra_dist.data.shard_cache import ShardCache
from electra_dist.errors import ManifestMismatch, StoreExhausted
from electra_dist.store.open_store import LocalStore
from electra_dist.train.evaluator import Evaluator

GLOBAL_BATCH = 12
ROWS_OF_A_SHARD = 24
BLOCK_ROWS = 8


@pytest.fixture
def four_shards(build_corpus: Callable[..., Any], tmp_path: Path) -> Any:
    """A corpus of its own in a local folder, which a test may damage."""
    return build_corpus(LocalStore(tmp_path / "corpus"), [ROWS_OF_A_SHARD] * 4, BLOCK_ROWS)


@pytest.fixture(params=["C", "NumPy"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rows be copied and checked by the C library or, without it, by NumPy."""
    if request.param == "NumPy":
        monkeypatch.setattr(cpu_library, "gather_rows", None)
        monkeypatch.setattr(cpu_library, "row_checksums", None, raising=False)
    elif cpu_library.gather_rows is None:
        pytest.skip("the package was built without a C compiler")


def flip_last_token_of_every_row(path: Path, rows: np.ndarray) -> None:
    """Flip the lowest bit of the last token of each row, in place in the file of a shard."""
    data = path.read_bytes()
    with path.open("r+b") as stream:
        for row in rows:
            end = data.index(row.tobytes()) + row.nbytes
            stream.seek(end - 2)
            stream.write(bytes([data[end - 2] ^ 1]))


def order_of(corpus: Any) -> RowOrder:
    """Return a row order whose windows have two of the four shards."""
    return RowOrder([CorpusOrder([entry.rows for entry in corpus.manifest.shards], 5, 2)])


def test_a_cached_shard_that_changes_during_a_run_is_fetched_again(
    four_shards: Any, tmp_path: Path, implementation: None, capfd: pytest.CaptureFixture[str]
) -> None:
    corpus = four_shards
    order = order_of(corpus)
    cache_folder = tmp_path / "cache"
    store = Remote(Path(corpus.store.url))
    with (
        closing(ShardCache(Corpora.of(store, corpus.manifest), cache_folder, fetch_threads=2)) as cache,
        closing(RowLoader(cache, order, GLOBAL_BATCH, 0, 1, 0)) as loader,
    ):
        for step in range(24):  # three epochs
            batch = loader.next()
            first_position = step * GLOBAL_BATCH
            expected = order.row_ids(*order.locate(np.arange(first_position, first_position + GLOBAL_BATCH))[1:])
            assert (batch.row_ids == expected).all()
            assert (batch.ids == corpus.rows[expected]).all(), f"step {step} has a changed row"
            if step == 2:
                while not loader._queue.full():  # then the second window is open, and half of it is still to be read
                    time.sleep(0.001)
                for number, entry in enumerate(corpus.manifest.shards):
                    path = cache_folder / f"{entry.sha256}.tar"
                    first = number * ROWS_OF_A_SHARD
                    if path.exists():
                        flip_last_token_of_every_row(path, corpus.rows[first : first + ROWS_OF_A_SHARD])
        assert loader.refetches >= 1
    assert "has changed on the disk after the shard was verified; fetched again" in capfd.readouterr().err


def test_a_local_shard_that_changes_during_a_run_ends_it_with_shard_and_block(
    four_shards: Any, tmp_path: Path, implementation: None
) -> None:
    corpus = four_shards
    message = ""
    with (
        closing(ShardCache(corpus.corpora, tmp_path / "unused", fetch_threads=2)) as cache,
        closing(RowLoader(cache, order_of(corpus), GLOBAL_BATCH, 0, 1, 0)) as loader,
    ):
        loader.next()
        for number, entry in enumerate(corpus.manifest.shards):
            first = number * ROWS_OF_A_SHARD
            path = Path(corpus.store.url) / entry.name
            flip_last_token_of_every_row(path, corpus.rows[first : first + ROWS_OF_A_SHARD])
        for _ in range(24):
            try:
                batch = loader.next()
            except ManifestMismatch as error:
                message = str(error)
                break
            assert (batch.ids == corpus.rows[batch.row_ids]).all(), "a changed row reached a batch"
    assert message.startswith(corpus.store.url)
    assert "in block " in message or "not the shard that corpus.json lists" in message
    assert "restore the file" in message


def test_the_error_of_a_local_shard_names_row_and_block(four_shards: Any, tmp_path: Path) -> None:
    corpus = four_shards
    path = Path(corpus.store.url) / corpus.manifest.shards[1].name
    changed_row = ROWS_OF_A_SHARD + 17
    with closing(ShardCache(corpus.corpora, tmp_path / "unused", fetch_threads=1)) as cache:
        assert (cache.read_rows(np.array([1]), np.array([17])) == corpus.rows[changed_row]).all()
        flip_last_token_of_every_row(path, corpus.rows[changed_row : changed_row + 1])
        assert (cache.read_rows(np.array([1, 0]), np.array([16, 17])) == corpus.rows[[changed_row - 1, 17]]).all()
        with pytest.raises(ManifestMismatch, match=f"^{path}: row 17, in block 2 of this shard, has changed"):
            cache.read_rows(np.array([0, 1]), np.array([3, 17]))
        with pytest.raises(ManifestMismatch, match=r"not the shard that corpus\.json lists"):
            cache.count_tokens([1])


def test_held_out_rows_that_change_on_the_disk_are_fetched_again(four_shards: Any, tmp_path: Path) -> None:
    corpus = four_shards
    store = Remote(Path(corpus.store.url))
    special: Any = None
    with closing(ShardCache(Corpora.of(store, corpus.manifest), tmp_path / "cache", fetch_threads=1)) as cache:
        evaluator = Evaluator(cache=cache, num_rows=32, micro_batch=4, seed=1, special=special)
        rows = evaluator._read_rows(32)
        assert (rows == corpus.rows[::3]).all()
        for number, entry in enumerate(corpus.manifest.shards):
            first = number * ROWS_OF_A_SHARD
            path = tmp_path / "cache" / f"{entry.sha256}.tar"
            flip_last_token_of_every_row(path, corpus.rows[first : first + ROWS_OF_A_SHARD])
        assert (evaluator._read_rows(32) == rows).all()
        assert cache.node_cache.refetches == 4


@pytest.mark.parametrize("damage", ["row", "header of a block", "length"])
def test_a_cached_shard_that_changes_while_it_is_closed_is_fetched_again(
    four_shards: Any, tmp_path: Path, damage: str
) -> None:
    corpus = four_shards
    store = Remote(Path(corpus.store.url))
    path = tmp_path / "cache" / f"{corpus.manifest.shards[0].sha256}.tar"
    shard, rows = np.zeros(ROWS_OF_A_SHARD, np.int64), np.arange(ROWS_OF_A_SHARD)
    with closing(ShardCache(Corpora.of(store, corpus.manifest), tmp_path / "cache", fetch_threads=1)) as cache:
        assert (cache.read_rows(shard, rows) == corpus.rows[:ROWS_OF_A_SHARD]).all()
        cache.keep_only([])
        data = path.read_bytes()
        if damage == "row":
            flip_last_token_of_every_row(path, corpus.rows[7:8])
        elif damage == "length":
            path.write_bytes(data[:-512])
        else:
            path.write_bytes(data.replace(b"NUMPY", b"NUMPX", 1))
        assert (cache.read_rows(shard, rows) == corpus.rows[:ROWS_OF_A_SHARD]).all()
        assert cache.node_cache.refetches == 1
        assert path.read_bytes() == data


def test_a_change_that_is_gone_at_the_second_look_is_reported_and_the_reading_goes_on(
    four_shards: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    corpus = four_shards
    remaining = [1]

    def changed_at_first(*arguments: Any) -> np.ndarray:
        if remaining and remaining.pop():
            raise ChangedRow(0, 5)
        return rows_of(*arguments)

    monkeypatch.setattr(shard_cache, "rows_of", changed_at_first)
    with closing(ShardCache(corpus.corpora, tmp_path / "unused", fetch_threads=1)) as cache:
        assert (cache.read_rows(np.array([2]), np.array([5])) == corpus.rows[2 * ROWS_OF_A_SHARD + 5]).all()
        assert "verified again and good" in capfd.readouterr().err
        remaining += [1] * 5
        with pytest.raises(StoreExhausted, match=r"changed 5 times in a row .* test the memory and the disk"):
            cache.read_rows(np.array([2]), np.array([5]))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 40), st.integers(1, 50), st.sampled_from([np.uint16, np.uint32]), st.integers(0, 2**32), st.data()
)
def test_checksums_are_their_definition_and_every_flipped_bit_changes_them(
    seq_len: int, num_rows: int, dtype: type, seed: int, data: st.DataObject
) -> None:
    from electra_dist.data.receipt import checksum_keys, row_checksums

    rows = np.random.default_rng(seed).integers(0, np.iinfo(dtype).max, (num_rows, seq_len), dtype, endpoint=True)
    checksums = row_checksums(rows)
    keys = checksum_keys(rows[0].nbytes).tolist()
    assert len(set(keys)) == len(keys)
    for row, checksum in zip(rows, checksums.tolist()):
        text = row.tobytes()
        words = [int.from_bytes(text[first : first + 4], "little") for first in range(0, len(text), 4)]
        assert checksum == sum(word * key for word, key in zip(words, keys, strict=True)) % 2**64
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_library, "row_checksums", None)
        assert (row_checksums(rows) == checksums).all()
    row = data.draw(st.integers(0, num_rows - 1))
    bit = data.draw(st.integers(0, 8 * rows[0].nbytes - 1))
    rows[row].view(np.uint8)[bit // 8] ^= 1 << bit % 8
    assert np.flatnonzero(row_checksums(rows) != checksums).tolist() == [row]
