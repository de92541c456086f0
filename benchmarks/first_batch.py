"""How long the first batch takes at any position of a corpus of 33 B tokens, and what the order of its rows costs.

Part of `loader.py`. The manifest is real in all but its bytes: thousands of names on the local disk are hard links to
the same few shards, so that each is opened, hashed and mapped as any other, and 66 GB need not be written. On S3 the
corpus has as many shards as were asked for; it is written by the script and stays there.
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

from electra_dist.data.cache import ShardCache
from electra_dist.data.loader import RowLoader
from electra_dist.data.manifest import CorpusManifest, ShardEntry, TokenizerEntry, read_manifest, write_manifest
from electra_dist.data.order import RowOrder
from electra_dist.data.shard import write_shard
from electra_dist.store.interface import Store
from electra_dist.store.open import open_store

SEQ_LEN, VOCAB = 512, 30_522
GLOBAL_BATCH, RANKS = 2_048, 8  # a rank reads 256 rows a step
WINDOW_SHARDS = 64
SHARES = (0.0, 0.1, 0.5, 0.99, 1000.5)  # of an epoch


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
    """A corpus of random ids at `url`, unless it is there; on a local disk only `num_distinct` shards are files."""
    store = open_store(url, endpoint_url)
    if store.exists("corpus.json"):
        return store
    rng, entries = np.random.default_rng(0), []
    for number in range(num_shards):
        name = f"shard-{number:06d}.tar"
        path, original = store.local_path(name), store.local_path(f"shard-{number % num_distinct:06d}.tar")
        if number >= num_distinct and path is not None and original is not None:
            os.link(original, path)
            entries.append(entries[number % num_distinct].model_copy(update={"name": name}))
            continue
        file = io.BytesIO()
        write_shard(file, rng.integers(5, vocab_size, (rows_per_shard, seq_len), dtype=np.uint16), 1024)
        data = file.getvalue()
        store.write(name, data)
        digest, tokens = hashlib.sha256(data).hexdigest(), rows_per_shard * seq_len
        entries.append(ShardEntry(name=name, rows=rows_per_shard, tokens=tokens, bytes=len(data), sha256=digest))
    special = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4}
    vocab = "".join(f"{token}\n" for token in [*special, *range(5, vocab_size)]).encode()
    store.write("vocab.txt", vocab)
    digest = hashlib.sha256(vocab).hexdigest()
    tokenizer = TokenizerEntry(sha256=digest, vocab_size=vocab_size, lowercase=True, special=special)
    write_manifest(store, CorpusManifest(seq_len=seq_len, dtype="uint16", tokenizer=tokenizer, shards=tuple(entries)))
    return store


def time_order(rows_per_shard: list[int], share: float) -> Json:
    """A new order, as after a restart: milliseconds to a step's rows and to the next step's, and its peak memory."""
    position = int(share * sum(rows_per_shard))
    positions = np.arange(position, position + GLOBAL_BATCH)
    begin = time.perf_counter()
    order = RowOrder(rows_per_shard, seed=42, window_shards=WINDOW_SHARDS)
    order.locate(positions)
    middle = time.perf_counter()
    order.locate(positions + GLOBAL_BATCH)
    end = time.perf_counter()
    tracemalloc.start()  # apart: it slows what it watches
    RowOrder(rows_per_shard, seed=42, window_shards=WINDOW_SHARDS).locate(positions)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {"order_ms": 1e3 * (middle - begin), "next_ms": 1e3 * (end - middle), "order_peak_bytes": peak_bytes}


def time_first_batch(store: Store, cache_folder: Path, share: float, window_shards: int) -> float:
    """Seconds from nothing but an open store to the first batch of one rank, as after a restart."""
    begin = time.perf_counter()
    with contextlib.closing(ShardCache(store, read_manifest(store), cache_folder)) as cache:
        order = RowOrder([entry.rows for entry in cache.manifest.shards], 42, window_shards)
        step = int(share * order.rows_per_epoch) // GLOBAL_BATCH
        loader = RowLoader(cache, order, GLOBAL_BATCH, rank=0, world_size=RANKS, start_step=step)
        loader.next()
        seconds = time.perf_counter() - begin
        loader.close()
    return seconds


def time_positions(store: Store, folder: Path, window_shards: int) -> list[Json]:
    """Each position cold (which on a local disk is no different) and again from the warm cache."""
    rows_per_shard = [entry.rows for entry in read_manifest(store).shards]
    found = []
    for share in SHARES:
        cold_s, warm_s = (time_first_batch(store, folder, share, window_shards) for _ in range(2))
        found.append({"epochs": share, "first_s": cold_s, "again_s": warm_s, **time_order(rows_per_shard, share)})
    return found
