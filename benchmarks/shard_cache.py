"""What does a small cache of shards fetch again, and which link to the store do nodes need that share shards?

    python benchmarks/run.py shard_cache

It measures two things:

1. The share of the corpus that one node fetches in each epoch after the first, with caches of 50, 75 and 90 % of the
   corpus. For comparison, a cache that deletes the least recently used shard is simulated on the same order of shards.
2. Eight nodes behind one link to the store (`shard_cache_nodes.py`), which either fetch every shard from the store
   ("alone"), or pass shards to one another ("sharing"): the seconds to the first batch of the slowest node, the share
   of the time that the nodes wait, and the bytes that leave the store.

   The "need" is the rate of the link at which nodes alone would never wait in the first epoch: eight times the corpus
   in the time of the epoch's steps. Both kinds of nodes are measured with links of 100, 75 and 50 % of the need.
   Sharing nodes need an eighth of this rate, so they are also measured with 100, 75 and 50 % of this eighth. In one
   more run a node is killed in the middle of the epoch; in another, every cache holds half of the corpus.

Guarantee: every batch is compared with the rows that the run's row order gives for it; the benchmark ends if a batch
differs. Bytes are counted where they leave the store.

Limits: the store is a local HTTP server with a limited rate, not S3. The nodes do not wait for one another at each
step, and they share the processors of one machine, whose load average is in the record and in the table.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from measure import Found, Json, ResultLine, print_table
from random_corpus import write_corpus
from shard_cache_nodes import Cluster, CountingStore, Run, measure_nodes

from electra_dist.data.corpora import Corpora
from electra_dist.data.loader import RowLoader
from electra_dist.data.manifest import read_manifest
from electra_dist.data.order import CorpusOrder, RowOrder
from electra_dist.data.shard_cache import ShardCache

CACHE_SHARES = (0.5, 0.75, 0.9)  # size of the cache as a share of the corpus
LINK_SHARES = (1.0, 0.75, 0.5)  # rate of the link as a share of the need, which the module's docstring defines
_SEED = 42


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

    Return one object for each size. `cache` is the size as a share of the corpus; `ours` and `least_recently_used` are
    the shares of the corpus that each epoch after the first fetches.
    """
    batch = 64
    corpus = write_corpus(str(folder / "corpus"), num_shards, batch, num_shards, seq_len=32)
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


def runs_of(num_nodes: int, link_shares: Sequence[float]) -> list[Run]:
    """Return the runs of several nodes: all links alone and sharing, slower links, a killed node, small caches."""
    runs = []
    for share in link_shares:
        for kind in ("alone", "sharing"):
            runs.append(Run(f"{kind}, link {share:.0%} of the need", share, is_sharing=kind == "sharing"))
    for share in (link_share / num_nodes for link_share in link_shares):
        runs.append(Run(f"sharing, link {share:.1%} of the need", share))
    half = LINK_SHARES[-1]
    link = f"sharing, link {half:.0%} of the need"
    runs.append(Run(f"{link}, a node killed in the middle of epoch 1", half, kills_one=True))
    runs.append(Run(f"{link}, caches of half of the corpus, 3 epochs", half, cache_share=0.5, num_epochs=3))
    return runs


def report_nodes(runs: list[Json], facts: str) -> list[ResultLine]:
    """Print the table of the runs of several nodes; return the rows of the sharing runs for docs/results.md."""
    print(f"\n{facts}")
    rows = [
        [run["name"], f"{run['first_batch_s']:.2f}", f"{run['waiting_share']:.0%}", _shares_of_store(run)]
        for run in runs
    ]
    print_table(["nodes", "first batch s", "waiting", "bytes of the store / corpus, by epoch"], rows)
    by_name = {run["name"]: run for run in runs}
    lines = []
    for name, run in by_name.items():
        if "sharing" not in name:
            continue
        alone = by_name.get(name.replace("sharing", "alone"))
        comparison = "" if alone is None else f"{_figures(alone)} if each node fetches everything"
        lines.append(ResultLine(f"{facts}: {name}", _figures(run), comparison))
    return lines


def _shares_of_store(run: Json) -> str:
    return ", ".join(f"{share:.2f}" for share in run["store_share_by_epoch"])


def _figures(run: Json) -> str:
    return (
        f"first batch {run['first_batch_s']:.2f} s, waiting {run['waiting_share']:.0%} of the time, "
        f"{_shares_of_store(run)} x the corpus fetched from the store in each epoch"
    )


def measure(arguments: argparse.Namespace) -> Found:
    """Run both measurements in a temporary folder."""
    link_shares = LINK_SHARES
    num_shards, window, epochs = 240, 4, 4
    cluster = Cluster(num_nodes=8, num_shards=48, rows_per_shard=256, window_shards=6, step_s=0.1)
    if arguments.smoke:
        link_shares = LINK_SHARES[-1:]
        num_shards, window, epochs = 30, 1, 2
        cluster = Cluster(num_nodes=3, num_shards=12, rows_per_shard=32, window_shards=3, step_s=0.003)
    with tempfile.TemporaryDirectory(prefix="shard-cache-") as temporary:
        folder = Path(temporary)
        corpus = folder / "corpus"
        seq_len = cluster.seq_len
        write_corpus(str(corpus), cluster.num_shards, cluster.rows_per_shard, cluster.num_shards, seq_len=seq_len)
        # The nodes are forked, so they run before the other measurement starts threads.
        nodes = [
            measure_nodes(run, corpus, folder / run.name, cluster) for run in runs_of(cluster.num_nodes, link_shares)
        ]
        load, _, _ = os.getloadavg()
        sizes = measure_eviction(folder / "eviction", num_shards, window, epochs)
    lines = [report_eviction(sizes, f"{num_shards} shards, windows of {window}")]
    lines += report_nodes(nodes, f"{cluster.num_nodes} simulated nodes on a machine with a load average of {load:.0f}")
    return Found(lines, {"eviction": sizes, "nodes": nodes, "cluster": cluster._asdict(), "load": load})
