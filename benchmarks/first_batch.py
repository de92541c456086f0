"""How long the first batch takes at any position, and what storage, digest and order cost after it.

    python benchmarks/first_batch.py                  # order of 64 M rows; then shards of 16 MB on the local disk
    python benchmarks/first_batch.py --s3 s3://bucket/prefix --endpoint-url http://host:9000      # shards on S3

Prints a table and one line of JSON. The S3 corpus is written by the script and stays there.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import io
import json
import os
import platform
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np

from electra_dist.data.cache import ShardCache
from electra_dist.data.loader import RowLoader
from electra_dist.data.manifest import CorpusManifest, ShardEntry, TokenizerEntry, read_manifest, write_manifest
from electra_dist.data.order import RowOrder
from electra_dist.data.shard import write_shard
from electra_dist.store import Store, open_store

SEQ_LEN, ROWS, BLOCK = 512, 16_384, 1_024  # a shard of 16.8 MB
GLOBAL_BATCH = 2_048
POSITIONS = (0, 12_345_678, 63_000_000, 640_000_123, 64_000_000_000)


def time_order(num_rows: int) -> list[dict[str, float]]:
    """A new order object for each position, as after a restart."""
    found = []
    for position in POSITIONS:
        start = time.perf_counter()
        order = RowOrder([ROWS] * (num_rows // ROWS), seed=42, window_shards=64)
        order.locate(np.arange(position, position + GLOBAL_BATCH))
        first_ms = 1e3 * (time.perf_counter() - start)
        start = time.perf_counter()
        order.locate(np.arange(position + GLOBAL_BATCH, position + 2 * GLOBAL_BATCH))
        found.append({"position": position, "first_ms": first_ms, "next_ms": 1e3 * (time.perf_counter() - start)})
    return found


def build(store: Store, num_shards: int) -> None:
    """A corpus of random ids, unless it is there already."""
    if store.exists("corpus.json"):
        return
    rng = np.random.default_rng(0)
    entries = []
    for number in range(num_shards):
        file = io.BytesIO()
        write_shard(file, rng.integers(0, 30_522, (ROWS, SEQ_LEN), dtype=np.uint16), BLOCK)
        data, name = file.getvalue(), f"shard-{number:06d}.tar"
        store.write(name, data)
        digest = hashlib.sha256(data).hexdigest()
        entries.append(ShardEntry(name=name, rows=ROWS, tokens=ROWS * SEQ_LEN, bytes=len(data), sha256=digest))
    special = {"[PAD]": 0, "[UNK]": 100, "[CLS]": 101, "[SEP]": 102, "[MASK]": 103}
    tokenizer = TokenizerEntry(sha256="0" * 64, vocab_size=30_522, lowercase=True, special=special)
    write_manifest(store, CorpusManifest(seq_len=SEQ_LEN, dtype="uint16", tokenizer=tokenizer, shards=tuple(entries)))


def time_loader(store: Store, folder: Path, position: int, num_steps: int, window_shards: int) -> dict[str, float]:
    """Open everything anew, as after a restart, and read on from a position."""
    start = time.perf_counter()
    with contextlib.closing(ShardCache(store, read_manifest(store), folder)) as cache:
        order = RowOrder([entry.rows for entry in cache.manifest.shards], 42, window_shards)
        loader = RowLoader(cache, order, GLOBAL_BATCH, 0, 8, position // GLOBAL_BATCH)
        loader.next()
        first_s = time.perf_counter() - start
        start = time.perf_counter()
        for _ in range(num_steps):
            loader.next()
        step_ms = 1e3 * (time.perf_counter() - start) / num_steps
        loader.close()
    return {"position": position, "first_s": first_s, "step_ms": step_ms}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=16, help="shards of 16.8 MB to read")
    parser.add_argument("--steps", type=int, default=50, help="steps to read on, of 256 rows for this rank")
    parser.add_argument("--s3", help="read through S3 instead of a local folder")
    parser.add_argument("--endpoint-url")
    args = parser.parse_args()
    order = time_order(64_000_000)
    print("position         order, first ms   order, next ms   (2,048 rows of 64 M in 3,906 shards)")
    for row in order:
        print(f"{row['position']:<16,d} {row['first_ms']:>10.2f} {row['next_ms']:>16.2f}")
    folder = Path(tempfile.mkdtemp(prefix="first-batch-"))
    try:
        store = open_store(args.s3 or str(folder / "corpus"), args.endpoint_url)
        build(store, args.shards)
        loader = []
        for number, position in enumerate(POSITIONS):
            cache = folder / f"cache-{number}"
            cold = time_loader(store, cache, position, args.steps, args.shards // 2)
            warm = time_loader(store, cache, position, args.steps, args.shards // 2)
            loader.append({**cold, "again_s": warm["first_s"]})
            shutil.rmtree(cache, ignore_errors=True)
    finally:
        shutil.rmtree(folder)
    megabytes = args.shards // 2 * ROWS * SEQ_LEN * 2 / 1e6
    print(f"position         first batch s    again s   next steps ms   (256 rows; windows of {megabytes:.0f} MB)")
    for row in loader:
        print(f"{row['position']:<16,d} {row['first_s']:>10.3f} {row['again_s']:>12.3f} {row['step_ms']:>12.2f}")
    facts = {
        "date": datetime.date.today().isoformat(),
        "cpu": f"{os.cpu_count()} x {platform.machine()}",
        "numpy": np.__version__,
        "python": platform.python_version(),
        "storage": "s3" if args.s3 else "local",
    }
    print(json.dumps({**facts, "order": order, "loader": loader}))


if __name__ == "__main__":
    main()
