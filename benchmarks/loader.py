"""How fast is the data loader, beside three libraries, and how soon does it give its first batch?

    python benchmarks/run.py loader
    python benchmarks/run.py loader --s3 s3://bucket/prefix --endpoint-url http://host:9000    # first batch from S3

It measures three things:

1. The rate of each reader of `loader_rivals.py` over one shuffled epoch of the same rows of 512 tokens, from opening
   the data to the last batch: CPU microseconds per row, over all threads of the process, and rows per second. The
   readers take turns; the files are in the page cache.
2. The seconds to a rank's first 256 rows at five positions of a manifest of 64 M rows (33 B tokens), first as it is,
   then with a filled cache; and the time and memory of computing their order.
3. The number of GET requests, computed: a node fetches each shard whole, once, with one request if nothing fails.

Guarantee: before anything is timed, all readers must give the same rows; otherwise the benchmark ends.

Limits: the readers run without worker processes, and no training step runs beside them. `--s3` leaves its corpus in
the bucket.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from loader_rivals import BATCH, READERS, WINDOW_SHARDS, Reader, is_usable, our_loader
from measure import Found, Json, ResultLine, alternate, format_summary, print_table, ratio, summary
from random_corpus import write_corpus

from electra_dist.data.manifest import read_manifest
from electra_dist.data.order import CorpusOrder, RowOrder
from electra_dist.store.interface import Store

ROUNDS = 3
ROWS_PER_SHARD = 16_384  # A shard has 16.8 MB.
SHARDS_OF_33B = 3_907  # These hold 64 M rows, or 33 B tokens.
GLOBAL_BATCH, RANKS = 2_048, 8  # A rank reads 256 rows per step.
SHARES = (0.0, 0.1, 0.5, 0.99, 1000.5)  # Start positions, in epochs.


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--shards", type=int, default=3, help="shards of 16.8 MB that the readers read (3)")
    parser.add_argument("--s3", metavar="URL", help="time the first batches from this address, and write it first")
    parser.add_argument("--endpoint-url", metavar="URL", help="address of the S3 service, unless it is AWS")


def digest(batches: Iterator[np.ndarray]) -> tuple[int, int]:
    """Return the number of rows, and a checksum that does not depend on the order of the rows.

    The checksum changes if tokens change places within a row, or if a row is lost, repeated or replaced. Collisions
    are possible but improbable.
    """
    num_rows = 0
    checksum = 0
    for batch in batches:
        position_weights = np.arange(1, batch.shape[1] + 1, dtype=np.uint64)
        row_sums = batch.astype(np.uint64) @ position_weights
        num_rows += len(batch)
        checksum += int((row_sums * row_sums % np.uint64(1_000_003)).sum())
    return num_rows, checksum


def compare(store: Store, folder: Path, rounds: int) -> Json:
    """Time an epoch of each usable reader, the readers in turn; return times, rates, rows and digest by reader."""
    readers = {name: reader for name, reader in READERS.items() if is_usable(reader)}
    for name, reader in readers.items():
        reader.write(store, folder / name)
    read = {name: digest(reader.read(store, folder / name)) for name, reader in readers.items()}
    if len(set(read.values())) > 1:
        sys.exit(
            f"the readers do not give the same rows (number, digest): {read}; "
            "correct the reader that differs, in benchmarks/loader_rivals.py"
        )
    wall_s: dict[str, list[float]] = {name: [] for name in readers}

    def timed_epoch(name: str, reader: Reader) -> Callable[[], float]:
        def read_epoch() -> float:
            cpu_begin = time.process_time()
            wall_begin = time.perf_counter()
            for _ in reader.read(store, folder / name):
                pass
            wall_s[name].append(time.perf_counter() - wall_begin)
            return time.process_time() - cpu_begin

        return read_epoch

    cpu_s = alternate({name: timed_epoch(name, reader) for name, reader in readers.items()}, rounds, warm_up=0)
    num_rows = read["ours"][0]
    return {
        name: {
            "cpu_s": cpu_s[name],
            "wall_s": wall_s[name],
            "cpu_us_per_row": 1e6 * summary(cpu_s[name])["median"] / num_rows,
            "rows_per_core_s": num_rows / summary(cpu_s[name])["median"],
            "rows_per_s": num_rows / summary(wall_s[name])["median"],
            "ratio": ratio(cpu_s[name], cpu_s["ours"]),
            "rows": read[name][0],
            "digest": read[name][1],
        }
        for name in readers
    }


def report_rates(found: Json) -> ResultLine:
    """Print the table of the readers' rates; return its row for docs/results.md."""
    rows = [
        [
            name,
            f"{reader['rows_per_core_s']:,.0f}",
            f"{reader['cpu_us_per_row']:.1f}",
            f"{reader['rows_per_s']:,.0f}",
            format_summary(reader["ratio"]),
        ]
        for name, reader in found.items()
    ]
    missing = [name for name in READERS if name not in found]
    rows += [[name, "not importable", "", "", ""] for name in missing]
    print_table(["", "rows / s core", "CPU us a row", "rows/s", "CPU / ours"], rows)
    rivals = [f"{reader['ratio']['median']:.1f} x {name}" for name, reader in found.items() if name != "ours"]
    rivals += [f"{name} not importable" for name in missing]
    value = f"{found['ours']['rows_per_core_s']:,.0f} rows/s a core"
    return ResultLine(f"loader, shuffled rows of 512 in batches of {BATCH}, warm", value, ", ".join(rivals))


def time_order(rows_per_shard: list[int], share: float) -> Json:
    """Measure a new row order at a position, as a restarted run builds it: first step, next step, memory."""
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
    """Return the seconds from an open store to the first batch of rank 0 at a position, as a restarted run needs them.

    They include reading the manifest, fetching and verifying the shards of the window, and computing the order.
    """
    begin = time.perf_counter()
    with our_loader(store, cache_folder, GLOBAL_BATCH, RANKS, window_shards, share) as (loader, _):
        loader.next()
        return time.perf_counter() - begin


def time_positions(store: Store, folder: Path, window_shards: int) -> list[Json]:
    """Measure the first batch at every position of `SHARES`, twice: as it is, then with a filled cache.

    A local store needs no cache, so there the two times differ only by the page cache.
    """
    rows_per_shard = [entry.rows for entry in read_manifest(store).shards]
    results = []
    for share in SHARES:
        first_s, again_s = (time_first_batch(store, folder, share, window_shards) for _ in range(2))
        results.append({"epochs": share, "first_s": first_s, "again_s": again_s, **time_order(rows_per_shard, share)})
    return results


def report_positions(found: list[Json], facts: str) -> ResultLine:
    """Print the table of the first batches; return its row for docs/results.md."""
    rows = [
        [
            f"{row['epochs']:g}",
            f"{row['first_s']:.3f}",
            f"{row['again_s']:.3f}",
            f"{row['order_ms']:.1f}",
            f"{row['next_ms']:.1f}",
            f"{row['order_peak_bytes'] / 1e6:.1f}",
        ]
        for row in found
    ]
    print(f"\n{facts}")
    print_table(["epochs in", "first batch s", "again s", "order ms", "next ms", "order's peak MB"], rows)
    again = [row["again_s"] for row in found]
    peak_mb = max(row["order_peak_bytes"] for row in found) / 1e6
    order_ms = max(row["order_ms"] for row in found)
    value = f"{min(again):.2f} to {max(again):.2f} s; of that the order at most {order_ms:.0f} ms, {peak_mb:.1f} MB"
    return ResultLine(f"first batch at 0, 10, 50, 99 % and epoch 1,000, {facts}", value, "")


def measure(arguments: argparse.Namespace) -> Found:
    """Run the three measurements."""
    shards, rows_per_shard = (2, 1024) if arguments.smoke else (arguments.shards, ROWS_PER_SHARD)
    num_large_shards = 200 if arguments.smoke else SHARDS_OF_33B
    with tempfile.TemporaryDirectory(prefix="loader-") as temporary:
        folder = Path(temporary)
        store = write_corpus(str(folder / "corpus"), shards, rows_per_shard, shards)
        rates = compare(store, folder, arguments.rounds)
        lines = [report_rates(rates)]
        if arguments.s3:
            large = write_corpus(arguments.s3, shards, rows_per_shard, shards, endpoint_url=arguments.endpoint_url)
        else:
            large = write_corpus(str(folder / "large"), num_large_shards, rows_per_shard, shards)
        entries = read_manifest(large).shards
        window = min(WINDOW_SHARDS, len(entries))
        num_rows = sum(entry.rows for entry in entries)
        window_mb = window * entries[0].bytes / 1e6
        positions = time_positions(large, folder / "cache", window)
    facts = f"{num_rows / 1e6:.1f} M rows in {len(entries):,} shards, window {window_mb:.0f} MB"
    lines.append(report_positions(positions, facts))
    gets = 1e6 / rows_per_shard
    print(f"GET requests per million rows: {gets:.0f} (a node fetches each shard once)")
    lines.append(ResultLine("GET requests a million rows of 512", f"{gets:.0f}, one a shard and node", ""))
    found = {"ways": rates, "positions": positions, "gets_per_million_rows": gets}
    return Found(lines, found, packages=[reader.package for reader in READERS.values()])
