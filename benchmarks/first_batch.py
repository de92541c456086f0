"""Time to the first batch at any position of a corpus of 33 B tokens, and the cost of computing its row order.

A part of `loader.py`.

How: on a local disk, thousands of shard names are hard links to a few shards. Each is opened, hashed and mapped like
any other shard, and the 66 GB of a full corpus need not be written. On S3 every shard is a separate object.

Limits: the corpus that is written to S3 is not deleted afterwards; delete it by hand.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import time
import tracemalloc
from pathlib import Path

import numpy as np
from measure import Json

from electra_dist.data.corpora import Corpora
from electra_dist.data.loader import RowLoader
from electra_dist.data.manifest import CorpusManifest, ShardEntry, TokenizerEntry, read_manifest, write_manifest
from electra_dist.data.order import CorpusOrder, RowOrder
from electra_dist.data.shard_cache import ShardCache
from electra_dist.data.shard_format import write_shard
from electra_dist.store.interface import Store
from electra_dist.store.open_store import open_store

SEQ_LEN, VOCAB = 512, 30_522
GLOBAL_BATCH, RANKS = 2_048, 8  # A rank reads 256 rows per step.
WINDOW_SHARDS = 64
SHARES = (0.0, 0.1, 0.5, 0.99, 1000.5)  # Start positions, in epochs.


def write_corpus(
    url: str,
    num_shards: int,
    rows_per_shard: int,
    num_distinct: int,
    *,
    endpoint_url: str | None = None,
    seq_len: int = SEQ_LEN,
    vocab_size: int = VOCAB,
) -> Store:
    """Write a corpus of random token ids to `url` and return its open store; an existing corpus is reused unchanged.

    Args:
        url: Folder or s3:// address of the corpus.
        num_shards: Shards in the manifest.
        rows_per_shard: Rows of each shard.
        num_distinct: On a local disk, shards that are written; the others are hard links to them. On S3, all are
            written.
        endpoint_url: Address of the S3 service; None for AWS and for local folders.
        seq_len: Tokens per row.
        vocab_size: Ids are drawn from [5, vocab_size); the first five are the special tokens.
    """
    store = open_store(url, endpoint_url)
    if store.exists("corpus.json"):
        return store
    rng = np.random.default_rng(0)
    entries: list[ShardEntry] = []
    for number in range(num_shards):
        name = f"shard-{number:06d}.tar"
        original_number = number % num_distinct
        path = store.local_path(name)
        original = store.local_path(f"shard-{original_number:06d}.tar")
        if number >= num_distinct and path is not None and original is not None:
            os.link(original, path)
            entries.append(entries[original_number].model_copy(update={"name": name}))
            continue
        file = io.BytesIO()
        write_shard(file, rng.integers(5, vocab_size, (rows_per_shard, seq_len), dtype=np.uint16), 1024)
        data = file.getvalue()
        store.write(name, data)
        digest = hashlib.sha256(data).hexdigest()
        tokens = rows_per_shard * seq_len
        entries.append(ShardEntry(name=name, rows=rows_per_shard, tokens=tokens, bytes=len(data), sha256=digest))
    special = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4}
    vocab = "".join(f"{token}\n" for token in [*special, *range(5, vocab_size)]).encode()
    store.write("vocab.txt", vocab)
    digest = hashlib.sha256(vocab).hexdigest()
    tokenizer = TokenizerEntry(sha256=digest, vocab_size=vocab_size, lowercase=True, special=special)
    write_manifest(store, CorpusManifest(seq_len=seq_len, dtype="uint16", tokenizer=tokenizer, shards=tuple(entries)))
    return store


def time_order(rows_per_shard: list[int], share: float) -> Json:
    """Measure a new row order, as a restarted run builds it.

    Args:
        rows_per_shard: Rows of each shard of the corpus.
        share: Start position, in epochs.

    Returns:
        `order_ms` to build the order and locate the rows of one step, `next_ms` to locate those of the next step, and
        `order_peak_bytes`, the peak of memory that Python allocated for the first step.
    """
    position = int(share * sum(rows_per_shard))
    positions = np.arange(position, position + GLOBAL_BATCH)
    begin = time.perf_counter()
    order = RowOrder([CorpusOrder(rows_per_shard, seed=42, window_shards=WINDOW_SHARDS)])
    order.locate(positions)
    middle = time.perf_counter()
    order.locate(positions + GLOBAL_BATCH)
    end = time.perf_counter()
    tracemalloc.start()  # In a run of its own, because tracing slows the code that it observes.
    RowOrder([CorpusOrder(rows_per_shard, seed=42, window_shards=WINDOW_SHARDS)]).locate(positions)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {"order_ms": 1e3 * (middle - begin), "next_ms": 1e3 * (end - middle), "order_peak_bytes": peak_bytes}


def time_first_batch(store: Store, cache_folder: Path, share: float, window_shards: int) -> float:
    """Return the seconds from an open store to the first batch of rank 0, as a restarted run needs them.

    The time includes reading the manifest, fetching and verifying the shards of the window, and computing the order.

    Args:
        store: Store of the corpus.
        cache_folder: Folder for fetched shards; shards that are in it are not fetched again.
        share: Start position, in epochs.
        window_shards: Shards whose rows are shuffled together.
    """
    begin = time.perf_counter()
    with contextlib.closing(ShardCache(Corpora.of(store, read_manifest(store)), cache_folder)) as cache:
        order = RowOrder([CorpusOrder([shard.entry.rows for shard in cache.corpora.shards], 42, window_shards)])
        step = int(share * order.num_rows) // GLOBAL_BATCH
        loader = RowLoader(cache, order, GLOBAL_BATCH, rank=0, world_size=RANKS, start_step=step)
        loader.next()
        seconds = time.perf_counter() - begin
        loader.close()
    return seconds


def time_positions(store: Store, folder: Path, window_shards: int) -> list[Json]:
    """Measure the first batch at every position of `SHARES`, twice: first as it is, then with a filled cache.

    A local store needs no cache, so there the two times differ only by the page cache.

    Args:
        store: Store of the corpus.
        folder: Cache folder, which all positions share.
        window_shards: Shards whose rows are shuffled together.

    Returns:
        One JSON object per position: `epochs`, `first_s`, `again_s`, and the fields of `time_order`.
    """
    rows_per_shard = [entry.rows for entry in read_manifest(store).shards]
    results = []
    for share in SHARES:
        first_s = time_first_batch(store, folder, share, window_shards)
        again_s = time_first_batch(store, folder, share, window_shards)
        order_costs = time_order(rows_per_shard, share)
        results.append({"epochs": share, "first_s": first_s, "again_s": again_s, **order_costs})
    return results
