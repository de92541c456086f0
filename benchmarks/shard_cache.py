"""What does a small cache of shards fetch again in each epoch?

It measures the share of the corpus that one node fetches in each epoch after the first, beside a simulated cache that
deletes the least recently used shard.

Guarantee: every batch is compared with the rows that the run's row order gives for it; the benchmark ends if a batch
differs. Fetches are counted where they leave the store, a local folder.
"""

from __future__ import annotations

import argparse
import functools
import shutil
import tempfile
from pathlib import Path

import numpy as np
from loader import our_loader
from measure import Found, Json, ResultLine, print_table, write_corpus

from electra_dist.data.manifest import read_manifest
from electra_dist.data.order import RowOrder
from electra_dist.store.atomic_files import replacing
from electra_dist.store.open_store import LocalStore

CACHE_SHARES = (0.5, 0.75, 0.9)  # size of the cache as a share of the corpus


class CountingStore(LocalStore):
    """Store in a local folder that pretends to be remote, so that its shards are copied, and counts the copies."""

    num_fetched = 0

    def local_path(self, key: str) -> Path | None:  # type: ignore[override]
        """Return None for a shard, so that the cache fetches it instead of reading it in place."""
        return None if key.endswith(".tar") else super().local_path(key)

    def fetch(self, key: str, destination: Path, *, must_exist: bool = False) -> None:
        """Copy a shard, and count it."""
        self.num_fetched += 1
        with replacing(destination) as out, super().local_path(key).open("rb") as stream:
            shutil.copyfileobj(stream, out)


def least_recently_used(order: RowOrder, num_shards: int, capacity: int, epochs: int) -> list[float]:
    """Simulate a cache of `capacity` shards that deletes the least recently used one.

    Return the share of the shards, all of one size, that each epoch fetches.
    """
    fetch = functools.lru_cache(capacity)(lambda shard: None)
    num_fetched = [0]
    for epoch in range(epochs):
        for shard in order.phases[0].order.layout(epoch).shards.tolist():
            fetch(shard)
        num_fetched.append(fetch.cache_info().misses)
    return (np.diff(num_fetched) / num_shards).tolist()


def measure_eviction(folder: Path, num_shards: int, window: int, epochs: int) -> list[Json]:
    """Read some epochs of a corpus with each size of the cache; the first epoch fills it.

    `ours` and `least_recently_used` of a size are the shares of the corpus that each epoch after the first fetches.
    """
    batch = 64
    corpus = write_corpus(folder / "corpus", num_shards, batch, num_shards, seq_len=32)
    shard_bytes = read_manifest(corpus).shards[0].bytes
    sizes = []
    for share in CACHE_SHARES:
        capacity = round(share * num_shards)
        store = CountingStore(folder / "corpus")
        num_fetched = [0]
        cache = {"window": window, "limit_bytes": capacity * shard_bytes}
        with our_loader(store, folder / f"cache-{share}", batch, **cache) as (loader, order):
            steps_per_epoch = order.num_rows // batch
            for step in range(epochs * steps_per_epoch):
                row_ids = loader.next().row_ids
                _, shards, rows = order.locate(np.arange(step * batch, (step + 1) * batch))
                if not np.array_equal(row_ids, order.row_ids(shards, rows)):
                    raise SystemExit(f"step {step} has other rows than the order gives it; correct the loader")
                if (step + 1) % steps_per_epoch == 0:
                    num_fetched.append(store.num_fetched)
        ours = (np.diff(num_fetched) / num_shards).tolist()[1:]
        simulated = least_recently_used(order, num_shards, capacity, epochs)[1:]
        sizes.append({"cache": share, "ours": ours, "least_recently_used": simulated})
    return sizes


def report_eviction(sizes: list[Json], facts: str) -> ResultLine:
    """Print what an epoch fetches again with each size of the cache; return the row for docs/results.md."""
    ours, simulated = ([float(np.mean(size[way])) for size in sizes] for way in ("ours", "least_recently_used"))
    caches = [f"{size['cache']:.0%}" for size in sizes]
    rows = [[cache, f"{our_share:.1%}", f"{share:.1%}"] for cache, our_share, share in zip(caches, ours, simulated)]
    print(f"\nshare of the corpus that an epoch after the first one fetches, {facts}")
    print_table(["cache", "fixed part", "least recently used (simulated)"], rows)
    return ResultLine(
        f"share of the corpus fetched again in an epoch with a cache of {', '.join(caches)} of it, {facts}",
        ", ".join(f"{share:.0%}" for share in ours),
        "least recently used (simulated): " + ", ".join(f"{share:.0%}" for share in simulated),
    )


def measure(arguments: argparse.Namespace) -> Found:
    num_shards, window, epochs = (30, 1, 2) if arguments.smoke else (240, 4, 4)
    with tempfile.TemporaryDirectory(prefix="shard-cache-") as folder:
        sizes = measure_eviction(Path(folder), num_shards, window, epochs)
    line = report_eviction(sizes, f"{num_shards} shards, windows of {window}")
    return Found([line], {"eviction": sizes})
