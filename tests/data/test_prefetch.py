"""The shards of the next window are fetched while the steps of this one train, also across the end of an epoch."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.remote_store import Remote

from electra_dist.data import shard_cache
from electra_dist.data.corpora import Corpora
from electra_dist.data.loader import RowLoader
from electra_dist.data.order import CorpusOrder, RowOrder
from electra_dist.data.shard import Shard
from electra_dist.data.shard_cache import ShardCache, open_verified
from electra_dist.errors import StorageLost
from electra_dist.store.open_store import open_store

NUM_SHARDS = 12
ROWS = 64  # of each shard
WINDOW = 3
BATCH = 16
STEPS_PER_WINDOW = WINDOW * ROWS // BATCH
LONGEST_S = 60.0


def test_the_next_window_is_fetched_while_the_training_thread_does_not_ask(
    build_corpus: Callable[..., Any], tmp_path: Path
) -> None:
    """The next window arrives in the cache although the test asks for no further batch.

    This is checked after the first batch of each window, also of the first window of the second epoch. The cache has
    room for two windows only, so every window is fetched.
    """
    corpus = build_corpus(open_store(str(tmp_path / "corpus")), [ROWS] * NUM_SHARDS)
    remote = Remote(tmp_path / "corpus")
    limit_bytes = 2 * WINDOW * corpus.manifest.shards[0].bytes
    folder = tmp_path / "cache"
    order = RowOrder([CorpusOrder([ROWS] * NUM_SHARDS, seed=2, window_shards=WINDOW)])
    with closing(
        ShardCache(Corpora.of(remote, corpus.manifest), folder, fetch_threads=2, limit_bytes=limit_bytes)
    ) as cache:
        loader = RowLoader(cache, order, BATCH, rank=0, world_size=1, start_step=0)
        for window in range(NUM_SHARDS // WINDOW + 1):
            assert loader.next().step == window * STEPS_PER_WINDOW
            next_position = (window + 1) * STEPS_PER_WINDOW * BATCH
            names = {corpus.manifest.shards[shard].sha256 for shard in order.window_at(next_position).shards}
            deadline = time.monotonic() + LONGEST_S
            while not all((folder / f"{name}.tar").exists() for name in names):
                assert time.monotonic() < deadline, "the next window is not fetched"
                time.sleep(0.01)
            for _ in range(STEPS_PER_WINDOW - 1):
                loader.next()
        loader.close()
    assert len(remote.fetched) > NUM_SHARDS


class CountingCache(ShardCache):
    """Cache that notes the largest number of shards that were open or being fetched at a time."""

    most_shards = 0

    def prefetch(self, shard_indices: Iterable[int]) -> None:
        super().prefetch(shard_indices)
        self.most_shards = max(self.most_shards, len(self._shards))


@pytest.mark.parametrize("batch", [BATCH, 80])
def test_no_more_than_two_windows_are_open_also_if_a_batch_has_rows_of_two(
    build_corpus: Callable[..., Any], tmp_path: Path, batch: int
) -> None:
    """Batches of 80 rows do not divide a window of 192: some begin in one window and end in the next one."""
    corpus = build_corpus(open_store(str(tmp_path / "corpus")), [ROWS] * NUM_SHARDS)
    order = RowOrder([CorpusOrder([ROWS] * NUM_SHARDS, seed=2, window_shards=WINDOW)])
    with closing(CountingCache(corpus.corpora, tmp_path / "unused", fetch_threads=1)) as cache:
        loader = RowLoader(cache, order, batch, rank=0, world_size=1, start_step=0)
        for _ in range(2 * NUM_SHARDS * ROWS // batch):
            loader.next()
        loader.close()
    assert cache.most_shards == 2 * WINDOW


def test_an_error_of_the_disk_is_met_again_only_if_it_is_still_there(
    build_corpus: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = build_corpus(open_store(str(tmp_path / "corpus")), [ROWS])
    errors = [OSError(errno.EIO, "Input/output error")] * 2

    def failing(*arguments: Any) -> Shard:
        if errors:
            raise errors.pop()
        return open_verified(*arguments)

    monkeypatch.setattr(shard_cache, "open_verified", failing)
    with closing(ShardCache(Corpora.of(Remote(tmp_path / "corpus"), corpus.manifest), tmp_path / "cache")) as cache:
        for _ in range(len(errors)):
            with pytest.raises(StorageLost, match="Input/output error"):
                cache.open(0)
        shard = cache.open(0)
        assert shard.num_rows == ROWS
