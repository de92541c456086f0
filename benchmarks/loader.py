"""Rows to the training step: rows a second and core against three libraries; the first batch at any position.

    python benchmarks/loader.py
    python benchmarks/loader.py --s3 s3://bucket/prefix --endpoint-url http://host:9000    # first batch from S3

1. One shuffled epoch of the same rows of 512 tokens through each reader of `loader_rivals.py`, in turn, files in the
   page cache, from opening to the last batch: CPU microseconds a row, all threads of the process, and rows a second.
   Before, untimed: all readers give the same rows.
2. `first_batch.py`: seconds to a rank's first 256 rows at five positions of a manifest of 64 M rows (33 B tokens), and
   what the order of its rows takes in time and memory.
3. GET requests: a node fetches a shard whole, once, with one request if nothing fails.

Where it stops: readers run without worker processes; a training step beside them is not there.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from first_batch import WINDOW_SHARDS, time_positions, write_corpus
from loader_rivals import BATCH, VARIANTS, Variant, is_usable
from measure import Json, ResultLine, alternate, finish, installed, parser, print_table, ratio, summary, told

from electra_dist.data.manifest import read_manifest
from electra_dist.store.interface import Store

ROWS_PER_SHARD = 16_384  # 16.8 MB
SHARDS_OF_33B = 3_907  # 64 M rows


def digest(batches: Iterator[np.ndarray]) -> tuple[int, int]:
    """Number of rows and a sum that does not depend on their order, but on which tokens stand together."""
    rows, total = 0, 0
    for batch in batches:
        weight = np.arange(1, batch.shape[1] + 1, dtype=np.uint64)
        sums = batch.astype(np.uint64) @ weight
        rows, total = rows + len(batch), total + int((sums * sums % np.uint64(1_000_003)).sum())
    return rows, total


def compare(store: Store, folder: Path, rounds: int) -> Json:
    """An epoch of each reader that is installed, in turn."""
    ways = {name: way for name, way in VARIANTS.items() if is_usable(way)}
    for name, way in ways.items():
        way.write(store, folder / name)
    read = {name: digest(way.read(store, folder / name)) for name, way in ways.items()}
    if len(set(read.values())) > 1:
        sys.exit(f"the readers do not give the same rows: {read}")
    wall_s: dict[str, list[float]] = {name: [] for name in ways}

    def epoch(name: str, way: Variant) -> Callable[[], float]:
        def once() -> float:
            cpu, begin = time.process_time(), time.perf_counter()
            for _ in way.read(store, folder / name):
                pass
            wall_s[name].append(time.perf_counter() - begin)
            return time.process_time() - cpu

        return once

    cpu_s = alternate({name: epoch(name, way) for name, way in ways.items()}, rounds, warm_up=0)
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
        for name in ways
    }


def requests_per_million_rows(store: Store) -> float:
    """GETs of a node: one a shard."""
    shards = read_manifest(store).shards
    return 1e6 * len(shards) / sum(entry.rows for entry in shards)


def report_rates(found: Json, missing: Sequence[str]) -> ResultLine:
    rows = [
        [
            name,
            f"{way['rows_per_core_s']:,.0f}",
            f"{way['cpu_us_per_row']:.1f}",
            f"{way['rows_per_s']:,.0f}",
            told(way["ratio"]),
        ]
        for name, way in found.items()
    ]
    rows += [[name, "not usable here", "", "", ""] for name in missing]
    print_table(["", "rows / s core", "CPU us a row", "rows/s", "CPU / ours"], rows)
    rivals = [f"{way['ratio']['median']:.1f} x {name}" for name, way in found.items() if name != "ours"]
    rivals += [f"{name} not usable here" for name in missing]
    value = f"{found['ours']['rows_per_core_s']:,.0f} rows/s a core"
    return ResultLine(f"loader, shuffled rows of 512 in batches of {BATCH}, warm", value, ", ".join(rivals))


def report_positions(found: list[Json], facts: str) -> ResultLine:
    rows = [
        [
            f"{row['epochs']:g}",
            *(f"{row[key]:.3f}" for key in ("first_s", "again_s")),
            *(f"{row[key]:.1f}" for key in ("order_ms", "next_ms")),
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


def main(argv: Sequence[str] | None = None) -> Json:
    parse = parser(__doc__, rounds=3)
    parse.add_argument("--shards", type=int, default=8, help="shards of 16.8 MB that the readers read")
    parse.add_argument("--s3", help="read the first batches from S3, from as many shards")
    parse.add_argument("--endpoint-url")
    arguments = parse.parse_args(argv)
    shards, rows_per_shard = (2, 1024) if arguments.smoke else (arguments.shards, ROWS_PER_SHARD)
    many = 200 if arguments.smoke else SHARDS_OF_33B
    with tempfile.TemporaryDirectory(prefix="loader-") as name:
        folder = Path(name)
        store = write_corpus(str(folder / "corpus"), shards, rows_per_shard, shards)
        rates = compare(store, folder, arguments.rounds)
        missing = [name for name in VARIANTS if name not in rates]
        lines = [report_rates(rates, missing)]
        if arguments.s3:
            large = write_corpus(arguments.s3, shards, rows_per_shard, shards, endpoint_url=arguments.endpoint_url)
        else:
            large = write_corpus(str(folder / "large"), many, rows_per_shard, shards)
        entries = read_manifest(large).shards
        window = min(WINDOW_SHARDS, len(entries))
        num_rows = sum(entry.rows for entry in entries)
        facts = (
            f"{num_rows / 1e6:.1f} M rows in {len(entries):,} shards, window {window * entries[0].bytes / 1e6:.0f} MB"
        )
        positions = time_positions(large, folder / "cache", window)
        lines.append(report_positions(positions, facts))
        gets = requests_per_million_rows(store)
    print(f"GET requests a million rows: {gets:.0f} (a shard each, once a node)")
    lines.append(ResultLine("GET requests a million rows of 512", f"{gets:.0f}, one a shard and node", ""))
    packages = installed(*(way.package for way in VARIANTS.values()))
    return finish(
        "loader",
        arguments,
        argv,
        lines,
        packages=packages,
        ways=rates,
        positions=positions,
        gets_per_million_rows=gets,
    )


if __name__ == "__main__":
    main()
