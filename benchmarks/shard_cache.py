"""Measure the cache of shards: what a too small cache fetches again, and how nodes share one link to the store.

    python benchmarks/shard_cache.py

It measures two things:

1. The share of the corpus that one node fetches in each epoch after the first, with caches of 50, 75 and 90 % of the
   corpus. For comparison, a cache that deletes the least recently used shard is simulated on the same order of shards.
2. Eight nodes behind one link to the store (`shard_cache_nodes.py`). Each node is a process with its own cache folder
   and steps of a fixed length. It either fetches every shard from the store ("alone"), or the nodes pass shards to one
   another ("sharing"). Measured are the seconds to the first batch of the slowest node, the share of the time that the
   nodes wait, and the bytes that leave the store.

   The "need" is the rate of the link at which nodes alone would never wait in the first epoch: eight times the corpus
   in the time of the epoch's steps. Both kinds of nodes are measured with links of 100, 75 and 50 % of the need.
   Sharing nodes need an eighth of this rate, so they are also measured with 100, 75 and 50 % of this eighth. In one
   more run a node is killed in the middle of the epoch; in another, every cache holds half of the corpus.

Guarantee: every batch is compared with the rows that the run's row order gives for it; the script ends with an error
if a batch differs. Bytes are counted where they leave the store.

Limits: the store is a local HTTP server with a limited rate, not S3. The nodes do not wait for one another at each
step, and they share the processors of one machine, whose load average is in the record and in the table.
"""

from __future__ import annotations

import collections
import contextlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from first_batch import write_corpus
from measure import Json, ResultLine, finish, parser, print_table
from shard_cache_nodes import Cluster, CountingStore, measure_nodes

from electra_dist.data.corpora import Corpora
from electra_dist.data.loader import RowLoader
from electra_dist.data.manifest import read_manifest
from electra_dist.data.order import CorpusOrder, RowOrder
from electra_dist.data.shard_cache import ShardCache

CACHE_SHARES = (0.5, 0.75, 0.9)  # size of the cache as a share of the corpus
LINK_SHARES = (1.0, 0.75, 0.5)  # rate of the link as a share of the need, which the module's docstring defines
NUM_NODES = 8
_SEED = 42


def least_recently_used(order: RowOrder, num_shards: int, capacity: int, window: int, epochs: int) -> list[float]:
    """Simulate a cache that deletes the least recently used shard; return the share of the shards each epoch fetches.

    Args:
        order: Order of the rows, which gives the order of the shards in each epoch.
        num_shards: Shards of the corpus, all of one size.
        capacity: Shards that the cache holds.
        window: Shards of a window.
        epochs: Number of epochs.
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
    """Read some epochs of a corpus with caches of several sizes, and return what each epoch fetches.

    Args:
        folder: Empty folder for the corpus and the caches.
        num_shards: Shards of the corpus.
        window: Shards whose rows are shuffled together.
        epochs: Epochs to read; the first one fills the cache.

    Returns:
        One JSON object for each size. `cache` is the size as a share of the corpus. `ours` (our cache) and
        `least_recently_used` (simulated) are the shares of the corpus that each epoch after the first fetches.
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
        sizes.append(
            {
                "cache": share,
                "ours": (np.diff(num_fetched) / num_shards).tolist()[1:],
                "least_recently_used": least_recently_used(order, num_shards, capacity, window, epochs)[1:],
            }
        )
    return sizes


def report_eviction(sizes: list[Json], facts: str) -> ResultLine:
    """Print what an epoch fetches again with each size of the cache; return the row for docs/results.md.

    Args:
        sizes: Result of `measure_eviction`.
        facts: Sizes of the corpus, for the heading.
    """
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


def report_nodes(runs: list[Json], facts: str) -> list[ResultLine]:
    """Print the table of the runs of several nodes; return the rows of the sharing runs for docs/results.md.

    Args:
        runs: Result of `measure_links`.
        facts: Number of nodes and load of the machine, for the heading.
    """
    rows = [
        [
            run["name"],
            f"{run['first_batch_s']:.2f}",
            f"{run['waiting_share']:.0%}",
            ", ".join(f"{share:.2f}" for share in run["store_share_by_epoch"]),
        ]
        for run in runs
    ]
    print(f"\n{facts}")
    print_table(["nodes", "first batch s", "waiting", "bytes of the store / corpus, by epoch"], rows)
    by_name = {run["name"]: run for run in runs}
    lines = []
    for name, run in by_name.items():
        if "sharing" not in name:
            continue
        run_alone = by_name.get(name.replace("sharing", "alone"))
        comparison = "" if run_alone is None else f"{_figures(run_alone)} if each node fetches everything"
        lines.append(ResultLine(f"{facts}: {name}", _figures(run), comparison))
    return lines


def _figures(run: Json) -> str:
    """Return the first batch, the waiting and the fetched bytes of a run of several nodes as text."""
    shares = ", ".join(f"{share:.2f}" for share in run["store_share_by_epoch"])
    return (
        f"first batch {run['first_batch_s']:.2f} s, waiting {run['waiting_share']:.0%} of the time, "
        f"{shares} x the corpus fetched from the store in each epoch"
    )


def measure_links(folder: Path, cluster: Cluster, link_shares: Sequence[float]) -> list[Json]:
    """Measure the nodes at all rates of the link, with and without sharing, with a killed node and with small caches.

    Args:
        folder: Empty folder for the corpus and the caches.
        cluster: Sizes of the corpus and length of a step.
        link_shares: Rates of the link as shares of the need (see the module's docstring).

    Returns:
        Result of `measure_nodes` for each run.
    """
    corpus = folder / "corpus"
    write_corpus(str(corpus), cluster.num_shards, cluster.rows_per_shard, cluster.num_shards, seq_len=cluster.seq_len)
    runs = []
    for share in link_shares:
        for is_sharing in (False, True):
            name = f"{'sharing' if is_sharing else 'alone'}, link {share:.0%} of the need"
            runs.append(measure_nodes(name, corpus, folder / name, cluster, share, is_sharing=is_sharing))
    for share in (link_share / cluster.num_nodes for link_share in link_shares):
        name = f"sharing, link {share:.1%} of the need"
        runs.append(measure_nodes(name, corpus, folder / name, cluster, share, is_sharing=True))
    link = f"link {LINK_SHARES[-1]:.0%} of the need"
    name = f"sharing, {link}, a node killed in the middle of epoch 1"
    runs.append(measure_nodes(name, corpus, folder / name, cluster, LINK_SHARES[-1], is_sharing=True, kills_one=True))
    name = f"sharing, {link}, caches of half of the corpus, 3 epochs"
    runs.append(
        measure_nodes(
            name, corpus, folder / name, cluster, LINK_SHARES[-1], is_sharing=True, cache_share=0.5, num_epochs=3
        )
    )
    return runs


def main(argv: Sequence[str] | None = None) -> Json:
    """Run both measurements, print their tables and return the record; everything is written to a temporary folder."""
    arguments = parser(__doc__).parse_args(argv)
    link_shares = LINK_SHARES
    if arguments.smoke:
        link_shares = LINK_SHARES[-1:]
        num_shards, window, epochs = 30, 1, 2
        cluster = Cluster(num_nodes=3, num_shards=12, rows_per_shard=32, window_shards=3, step_s=0.003)
    else:
        num_shards, window, epochs = 240, 4, 4
        cluster = Cluster(num_nodes=NUM_NODES, num_shards=48, rows_per_shard=256, window_shards=6, step_s=0.1)
    with tempfile.TemporaryDirectory(prefix="shard-cache-") as temporary:
        folder = Path(temporary)
        (folder / "links").mkdir()
        # The nodes are forked, so they run before the other measurement starts threads.
        runs = measure_links(folder / "links", cluster, link_shares)
        load, _, _ = os.getloadavg()
        sizes = measure_eviction(folder / "eviction", num_shards, window, epochs)
    lines = [report_eviction(sizes, f"{num_shards} shards, windows of {window}")]
    lines += report_nodes(runs, f"{cluster.num_nodes} simulated nodes on a machine with a load average of {load:.0f}")
    cluster_sizes = cluster._asdict()
    return finish("shard_cache", arguments, argv, lines, eviction=sizes, nodes=runs, cluster=cluster_sizes, load=load)


if __name__ == "__main__":
    main()
