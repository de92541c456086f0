"""The shards that a cache smaller than its corpus keeps, and how many it fetches again in each epoch."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.remote_store import Remote

from electra_dist.data.corpora import Corpora
from electra_dist.data.loader import RowLoader
from electra_dist.data.node_cache import eviction_order
from electra_dist.data.order import CorpusOrder, RowOrder
from electra_dist.data.shard_cache import ShardCache
from electra_dist.store.open_store import open_store

NUM_SHARDS = 40
ROWS = 16  # of each shard
WINDOW = 2
BATCH = 8


def digest_of(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def test_the_order_is_a_function_of_the_shards_alone() -> None:
    """Ranks list the files in different orders and see different times of use; the result must not depend on them."""
    corpus = {digest_of(number) for number in range(20)}
    names = sorted(corpus)
    orders = []
    for seed in range(3):
        random.Random(seed).shuffle(names)
        used_at = dict(zip(names, range(len(names))))
        paths = [Path(f"{name}.tar") for name in names]
        orders.append(
            eviction_order(paths, corpus=corpus, wanted=(), last_used=lambda path, times=used_at: times[path.stem])
        )
    assert orders[0] == orders[1] == orders[2]
    assert [path.stem for path in orders[0]] == sorted(corpus, reverse=True)


def test_wanted_shards_are_left_out_and_preferred_ones_come_last() -> None:
    corpus = sorted(digest_of(number) for number in range(6))
    order = eviction_order(
        [Path(f"{name}.tar") for name in [*corpus, "foreign"]],
        corpus=corpus,
        wanted={corpus[0], corpus[5]},
        last_used=lambda path: 0.0,
        preferred={corpus[3], corpus[5]},
    )
    assert [path.stem for path in order] == ["foreign", corpus[4], corpus[2], corpus[1], corpus[3]]


def bytes_in(folder: Path) -> int:
    """Return the size of the files in a folder, without subfolders and hidden files, while others change it."""
    size_bytes = 0
    for path in folder.glob("[!.]*"):
        with contextlib.suppress(FileNotFoundError):
            size_bytes += path.stat().st_size if path.is_file() else 0
    return size_bytes


@pytest.mark.parametrize("share", [0.5, 0.75, 0.9])
def test_a_cache_fetches_only_what_it_does_not_hold_again(
    build_corpus: Callable[..., Any], tmp_path: Path, share: float
) -> None:
    """In each of three epochs the rows are right, the folder is within its limit, and only some shards are fetched.

    They are those for which there is no room in addition to the two windows in use.
    """
    corpus = build_corpus(open_store(str(tmp_path / "corpus")), [ROWS] * NUM_SHARDS)
    remote = Remote(tmp_path / "corpus")
    folder = tmp_path / "cache"
    shard_bytes = corpus.manifest.shards[0].bytes
    limit_bytes = round(share * NUM_SHARDS) * shard_bytes
    order = RowOrder([CorpusOrder([ROWS] * NUM_SHARDS, seed=7, window_shards=WINDOW)])
    steps_per_epoch = order.num_rows // BATCH
    num_fetched = [0]
    with contextlib.closing(
        ShardCache(Corpora.of(remote, corpus.manifest), folder, fetch_threads=2, limit_bytes=limit_bytes)
    ) as cache:
        loader = RowLoader(cache, order, BATCH, rank=0, world_size=1, start_step=0)
        for step in range(4 * steps_per_epoch):
            batch = loader.next()
            assert (batch.ids == corpus.rows[batch.row_ids]).all()
            _, shards, rows = order.locate(np.arange(step * BATCH, (step + 1) * BATCH))
            assert (batch.row_ids == order.row_ids(shards, rows)).all()
            assert bytes_in(folder) <= limit_bytes
            if (step + 1) % steps_per_epoch == 0:
                num_fetched.append(len(remote.fetched))
        loader.close()
    per_epoch = np.diff(num_fetched)
    assert per_epoch[0] >= NUM_SHARDS
    num_missing = NUM_SHARDS - round(share * NUM_SHARDS)
    for fetched in per_epoch[1:]:
        # Beside the kept part there must be room for two windows. Some of their shards belong to the kept part.
        assert num_missing - WINDOW <= fetched <= num_missing + 3 * WINDOW
