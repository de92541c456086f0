"""The loader: each global step holds the same rows for any number of ranks, restarts, micro-batches and S3 faults."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.fault_server import DOWNLOAD_FAULTS, FaultPlan, FaultProxy

from electra_dist.data import shard_cache
from electra_dist.data.corpora import Corpora, StoredShard
from electra_dist.data.loader import RowLoader
from electra_dist.data.manifest import read_manifest
from electra_dist.data.order import CorpusOrder, RowOrder
from electra_dist.data.shard import Shard
from electra_dist.data.shard_cache import ShardCache, open_verified
from electra_dist.errors import ManifestMismatch, StoreAway, StoreMissing, UserError
from electra_dist.store.open_store import open_store
from electra_dist.store.patience import Pace, Patience

WORLD_SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
QUICK = Pace(first_pause_s=0.001, longest_pause_s=0.01, read_timeout_s=1.0)


def order_of(corpus: Any, seed: int = 5, window_shards: int = 2) -> RowOrder:
    """Return the row order of a corpus."""
    return RowOrder([CorpusOrder([entry.rows for entry in corpus.manifest.shards], seed, window_shards)])


def truth(corpus: Any, order: RowOrder, global_batch: int, num_steps: int) -> np.ndarray:
    """Return the rows that each step must hold, [num_steps, G, seq_len], taken from the corpus without a loader."""
    _, shards, rows = order.locate(np.arange(num_steps * global_batch))
    return corpus.rows[order.row_ids(shards, rows)].reshape(num_steps, global_batch, -1)


def steps_of(
    corpus: Any, order: RowOrder, global_batch: int, world_size: int, steps: range, micro_batch: int
) -> np.ndarray:
    """Return the rows of some steps, gathered from the loaders of all ranks, micro-batch by micro-batch."""
    found = np.zeros((len(steps), global_batch, corpus.manifest.seq_len), np.uint16)
    filled = np.zeros((len(steps), global_batch), int)
    for rank in range(world_size):
        cache = ShardCache(corpus.corpora, Path("unused"), fetch_threads=1)
        loader = RowLoader(cache, order, global_batch, rank, world_size, steps.start)
        for number, step in enumerate(steps):
            batch = loader.next()
            assert batch.step == step
            assert (corpus.rows[batch.row_ids] == batch.ids).all()
            for first in range(0, len(batch.ids), micro_batch):
                rows = slice(batch.row0 + first, batch.row0 + min(first + micro_batch, len(batch.ids)))
                found[number, rows] = batch.ids[first : first + micro_batch]
                filled[number, rows] += 1
        loader.close()
        cache.close()
    assert (filled == 1).all()
    return found


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=7),
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(1, 3), st.sampled_from(WORLD_SIZES), st.integers(1, 9)), min_size=2, max_size=5),
)
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_restarts_with_any_world_sizes_and_micro_batches_read_the_rows_of_the_order(
    build_corpus: Callable[..., Any],
    tmp_path_factory: pytest.TempPathFactory,
    rows_per_shard: Sequence[int],
    window_shards: int,
    legs: Sequence[tuple[int, int, int]],
) -> None:
    """There are up to four restarts with new world sizes and micro-batches, over several epochs of uneven shards."""
    corpus = build_corpus(open_store(str(tmp_path_factory.mktemp("elastic"))), rows_per_shard)
    global_batch = 48
    order = order_of(corpus, window_shards=window_shards)
    num_steps = sum(leg[0] for leg in legs)
    expected = truth(corpus, order, global_batch, num_steps)
    start = 0
    for length, world_size, micro_batch in legs:
        steps = range(start, start + length)
        assert (steps_of(corpus, order, global_batch, world_size, steps, micro_batch) == expected[steps]).all()
        start += length


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_world_size_reads_the_rows_of_the_order(corpus: Any, world_size: int) -> None:
    order = order_of(corpus)
    expected = truth(corpus, order, 48, 6)  # over two epochs
    assert (steps_of(corpus, order, 48, world_size, range(6), 5) == expected).all()


def test_an_epoch_is_read_exactly_once(corpus: Any) -> None:
    """The corpus has 123 rows and a step 41, so three steps are one epoch."""
    order = order_of(corpus)
    cache = ShardCache(corpus.corpora, Path("unused"))
    loader = RowLoader(cache, order, 41, 0, 1, 300)
    seen = np.concatenate([loader.next().row_ids for _ in range(3)])
    loader.close()
    cache.close()
    assert sorted(seen.tolist()) == list(range(123))


def test_a_number_of_ranks_that_does_not_divide_the_batch_is_refused(corpus: Any) -> None:
    with pytest.raises(UserError, match="global_batch 48 is not a multiple of the 5 ranks"):
        RowLoader(None, order_of(corpus), 48, 0, 5, 0)  # type: ignore[arg-type]


def test_shards_of_old_windows_are_closed(corpus: Any) -> None:
    cache = ShardCache(corpus.corpora, Path("unused"))
    loader = RowLoader(cache, order_of(corpus, window_shards=1), 1, 0, 1, 0)
    for _ in range(246):
        loader.next()
        assert len(cache._shards) <= 3  # the reader is up to two windows ahead of the step
    loader.close()
    cache.close()


def test_an_error_of_the_reader_is_raised_by_every_call_of_next(corpus: Any, tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    loader = RowLoader(ShardCache(Corpora.of(store, corpus.manifest), tmp_path), order_of(corpus), 48, 0, 1, 0)
    for _ in range(3):
        with pytest.raises(StoreMissing, match=r"shard-\d+.tar: no such file"):
            loader.next()
    loader.close()


def test_rows_that_a_disk_refused_for_a_while_are_those_of_the_order(
    corpus: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every shard fails twice, as on a disk that does not respond; the loader reads it again until it is there."""
    refusals: Counter[str] = Counter()

    def refuse_twice(shard: StoredShard, *arguments: Any) -> Shard:
        refusals[shard.url] += 1
        if refusals[shard.url] <= 2:
            raise StoreAway(f"{shard.url}: input/output error; check the disk")
        return open_verified(shard, *arguments)

    monkeypatch.setattr(shard_cache, "open_verified", refuse_twice)
    waits: list[float] = []
    patience = Patience(600.0, lambda line: None, pace=Pace(longest_pause_s=0.01))
    cache = ShardCache(Corpora.of(open_store(corpus.store.url, None, patience), corpus.manifest), tmp_path)
    loader = RowLoader(cache, order_of(corpus), 48, 0, 1, 0, on_wait=waits.append)
    rows = np.stack([loader.next().ids for _ in range(6)])
    loader.close()
    cache.close()
    assert (rows == truth(corpus, order_of(corpus), 48, 6)).all()
    assert min(refusals.values()) >= 3  # each shard was refused twice, and then read


def test_close_does_not_wait_for_a_full_queue(corpus: Any) -> None:
    before = threading.active_count()
    cache = ShardCache(corpus.corpora, Path("unused"))
    loader = RowLoader(cache, order_of(corpus), 48, 0, 1, 0)
    time.sleep(0.1)

    def close() -> None:
        loader.close()
        cache.close()

    closing = threading.Thread(target=close, daemon=True)
    closing.start()
    closing.join(60.0)  # nobody takes from the queue, so a wait for it has no end
    assert threading.active_count() == before


def test_waiting_for_rows_is_counted_in_seconds(corpus: Any) -> None:
    cache = ShardCache(corpus.corpora, Path("unused"))
    loader = RowLoader(cache, order_of(corpus), 48, 0, 1, 0)
    loader.next()
    assert 0 < loader.wait_s < 10
    loader.close()
    cache.close()


def read_s3(url: str, endpoint_url: str, folder: Path, num_steps: int) -> tuple[Any, ShardCache, np.ndarray]:
    """Read the first steps of a corpus on S3; return the store, the cache and the rows, [num_steps, 64, seq_len]."""
    store = open_store(url, endpoint_url, Patience(60.0, pace=QUICK))
    cache = ShardCache(Corpora.of(store, read_manifest(store)), folder, fetch_threads=4)
    order = RowOrder([CorpusOrder([shard.entry.rows for shard in cache.corpora.shards], 5, 4)])
    loader = RowLoader(cache, order, 64, 0, 1, 0)
    try:
        return store, cache, np.stack([loader.next().ids for _ in range(num_steps)])
    finally:
        loader.close()
        cache.close()


def test_rows_read_through_s3_faults_equal_the_local_ones(
    build_corpus: Callable[..., Any], bucket: str, proxy: FaultProxy, tmp_path: Path
) -> None:
    """Every kind of download fault is injected many times, including flipped bytes."""
    rows_per_shard = [100 + 7 * number for number in range(60)]
    local = build_corpus(open_store(str(tmp_path / "local")), rows_per_shard)
    remote = build_corpus(open_store(bucket, proxy.endpoint_url), rows_per_shard)
    assert remote.manifest == local.manifest
    order = order_of(local, window_shards=4)
    num_steps = order.num_rows // 64 + 1  # the last step needs every shard, so no download is open at the end
    kinds = tuple(kind for kind in DOWNLOAD_FAULTS if kind != "stall")
    proxy.plan = FaultPlan(seed=2, rate=0.8, faults=kinds, only="shard-")
    store, cache, rows = read_s3(bucket, proxy.endpoint_url, tmp_path / "cache", num_steps)
    assert (rows == truth(local, order, 64, num_steps)).all()
    assert set(proxy.plan.counts) == set(kinds)
    assert proxy.plan.counts.total() >= 100
    assert store.patience.retries > 0
    assert cache.node_cache.refetches == proxy.plan.counts["flip"]
    names = {f"{entry.sha256}.tar" for entry in local.manifest.shards}
    assert {path.name for path in (tmp_path / "cache").glob("*.tar")} <= names


@pytest.mark.parametrize(
    ("fault", "error", "reason"),
    [("flip", ManifestMismatch, "wrong bytes 5 times"), ("missing", StoreMissing, "no such object")],
)
def test_a_shard_that_can_never_be_read_is_named(
    build_corpus: Callable[..., Any],
    bucket: str,
    proxy: FaultProxy,
    tmp_path: Path,
    fault: str,
    error: type[Exception],
    reason: str,
) -> None:
    build_corpus(open_store(bucket, proxy.endpoint_url), [50, 60, 70])
    proxy.plan = FaultPlan(rate=1.0, faults=(fault,), only="shard-000001", in_a_row=10**9)
    with pytest.raises(error, match=f"shard-000001.tar.*{reason}"):
        read_s3(bucket, proxy.endpoint_url, tmp_path, 10)


def test_the_rows_of_existing_runs_never_change(corpus: Any) -> None:
    """The digest of ten steps is frozen; it depends on file format, order and loader."""
    rows = truth(corpus, order_of(corpus), 48, 10)
    found = steps_of(corpus, order_of(corpus), 48, 2, range(10), 4)
    assert hashlib.sha256(found.tobytes()).hexdigest() == hashlib.sha256(rows.tobytes()).hexdigest()
    assert hashlib.sha256(found.tobytes()).hexdigest() == (
        "c2985224345f85698e9077aaaa10d98b7a8c465f17e3ed3a47a4b0d0dfb721d5"
    )


@pytest.mark.parametrize("above", [0, 1])
def test_a_token_id_outside_the_vocabulary_ends_the_run_with_shard_and_row(corpus: Any, above: int) -> None:
    """Also the id that equals the size of the vocabulary is outside: the last valid one is one less."""
    row = int(corpus.rows.max(axis=1).argmax())
    largest = int(corpus.rows[row].max())
    tokenizer = corpus.manifest.tokenizer.model_copy(update={"vocab_size": largest - above})
    manifest = corpus.manifest.model_copy(update={"tokenizer": tokenizer})
    cache = ShardCache(Corpora.of(corpus.store, manifest), Path("unused"))
    loader = RowLoader(cache, order_of(corpus), len(corpus.rows), 0, 1, 0)
    place = corpus.manifest.row_name(row)
    with pytest.raises(ManifestMismatch, match=f"{place}: token id {largest} is outside the vocabulary"):
        loader.next()
    loader.close()
    cache.close()
