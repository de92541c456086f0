"""What does a small cache of shards fetch again in each epoch?

    python benchmarks/run.py shard_cache

It measures the share of the corpus that one node fetches in each epoch after the first, beside a simulated cache that
deletes the least recently used shard.

Guarantee: every batch is compared with the rows that the run's row order gives for it; the benchmark ends if a batch
differs. Fetches are counted where they leave the store, a local folder.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import shutil
import tempfile
from pathlib import Path

import numpy as np
from measure import Found, Json, ResultLine, print_table
from random_corpus import write_corpus

from electra_dist.data.corpora import Corpora
from electra_dist.data.loader import RowLoader
from electra_dist.data.manifest import read_manifest
from electra_dist.data.order import CorpusOrder, RowOrder
from electra_dist.data.shard_cache import ShardCache
from electra_dist.store.atomic_files import replacing
from electra_dist.store.open_store import LocalStore

CACHE_SHARES = (0.5, 0.75, 0.9)  # size of the cache as a share of the corpus
_SEED = 42


class CountingStore(LocalStore):
    """Store in a local folder that pretends to be remote, so that its objects are copied, and counts the copies."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.num_fetched = 0

    def local_path(self, key: str) -> None:  # type: ignore[override]
        """Return None, so that the cache fetches objects instead of reading them in place."""
        return None

    def fetch(self, key: str, destination: Path, *, must_exist: bool = False) -> None:
        """Copy an object, and count it."""
        self.num_fetched += 1
        with replacing(destination) as out, super().local_path(key).open("rb") as stream:
            shutil.copyfileobj(stream, out)


def least_recently_used(order: RowOrder, num_shards: int, capacity: int, epochs: int) -> list[float]:
    """Simulate a cache of `capacity` shards that deletes the least recently used one.

    Return the share of the shards, all of one size, that each epoch fetches.
    """
    cached: collections.OrderedDict[int, None] = collections.OrderedDict()
    shares = []
    for epoch in range(epochs):
        num_fetched = 0
        for shard in order.phases[0].order.layout(epoch).shards.tolist():
            if shard not in cached:
                num_fetched += 1
                if len(cached) == capacity:
                    cached.popitem(last=False)
            cached[shard] = None
            cached.move_to_end(shard)
        shares.append(num_fetched / num_shards)
    return shares


def measure_eviction(folder: Path, num_shards: int, window: int, epochs: int) -> list[Json]:
    """Read some epochs of a corpus with each size of the cache; the first epoch fills it.

    `ours` and `least_recently_used` of a size are the shares of the corpus that each epoch after the first fetches.
    """
    batch = 64
    corpus = write_corpus(folder / "corpus", num_shards, batch, num_shards, seq_len=32)
    manifest = read_manifest(corpus)
    order = RowOrder([CorpusOrder([entry.rows for entry in manifest.shards], _SEED, window)])
    steps_per_epoch = order.num_rows // batch
    sizes = []
    for share in CACHE_SHARES:
        capacity = round(share * num_shards)
        store = CountingStore(folder / "corpus")
        limit_bytes = capacity * manifest.shards[0].bytes
        cache_folder = folder / f"cache-{share}"
        num_fetched = [0]
        with contextlib.closing(ShardCache(Corpora.of(store, manifest), cache_folder, 2, limit_bytes)) as cache:
            loader = RowLoader(cache, order, batch, rank=0, world_size=1, start_step=0)
            for step in range(epochs * steps_per_epoch):
                row_ids = loader.next().row_ids
                _, shards, rows = order.locate(np.arange(step * batch, (step + 1) * batch))
                if not np.array_equal(row_ids, order.row_ids(shards, rows)):
                    raise SystemExit(f"step {step} has other rows than the order gives it; correct the loader")
                if (step + 1) % steps_per_epoch == 0:
                    num_fetched.append(store.num_fetched)
            loader.close()
        ours = (np.diff(num_fetched) / num_shards).tolist()[1:]
        simulated = least_recently_used(order, num_shards, capacity, epochs)[1:]
        sizes.append({"cache": share, "ours": ours, "least_recently_used": simulated})
    return sizes


def report_eviction(sizes: list[Json], facts: str) -> ResultLine:
    """Print what an epoch fetches again with each size of the cache; return the row for docs/results.md."""
    ours = [float(np.mean(size["ours"])) for size in sizes]
    simulated = [float(np.mean(size["least_recently_used"])) for size in sizes]
    rows = [
        [f"{size['cache']:.0%}", f"{share:.1%}", f"{simulated_share:.1%}"]
        for size, share, simulated_share in zip(sizes, ours, simulated, strict=True)
    ]
    print(f"\nshare of the corpus that an epoch after the first one fetches, {facts}")
    print_table(["cache", "fixed part", "least recently used (simulated)"], rows)
    caches = ", ".join(f"{size['cache']:.0%}" for size in sizes)
    return ResultLine(
        f"share of the corpus fetched again in an epoch with a cache of {caches} of it, {facts}",
        ", ".join(f"{share:.0%}" for share in ours),
        "least recently used (simulated): " + ", ".join(f"{share:.0%}" for share in simulated),
    )


def measure(arguments: argparse.Namespace) -> Found:
    num_shards, window, epochs = (30, 1, 2) if arguments.smoke else (240, 4, 4)
    with tempfile.TemporaryDirectory(prefix="shard-cache-") as folder:
        sizes = measure_eviction(Path(folder), num_shards, window, epochs)
    line = report_eviction(sizes, f"{num_shards} shards, windows of {window}")
    return Found([line], {"eviction": sizes})
