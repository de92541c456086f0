"""Measure the data loader: its rate against three libraries, and its time to the first batch.

    python benchmarks/loader.py
    python benchmarks/loader.py --s3 s3://bucket/prefix --endpoint-url http://host:9000    # first batch from S3

It measures three things:

1. The rate of each reader of `loader_rivals.py` over one shuffled epoch of the same rows of 512 tokens, from opening
   the data to the last batch: CPU microseconds per row, over all threads of the process, and rows per second. The
   readers take turns; the files are in the page cache.
2. The seconds to a rank's first 256 rows at five positions of a manifest of 64 M rows (33 B tokens), and the time and
   memory of computing their order (`first_batch.py`).
3. The number of GET requests, computed: a node fetches each shard whole, once, with one request if nothing fails.

Guarantee: before anything is timed, the script checks that all readers give the same rows, and exits if they do not.

Limits: the readers run without worker processes, and no training step runs beside them.
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
from measure import Json, ResultLine, alternate, finish, format_summary, installed, parser, print_table, ratio, summary

from electra_dist.data.manifest import read_manifest
from electra_dist.store.interface import Store

ROWS_PER_SHARD = 16_384  # A shard has 16.8 MB.
SHARDS_OF_33B = 3_907  # These hold 64 M rows, or 33 B tokens.


def digest(batches: Iterator[np.ndarray]) -> tuple[int, int]:
    """Return the number of rows, and a checksum that does not depend on the order of the rows.

    The checksum changes if tokens change places within a row, or if a row is lost, repeated or replaced. Two readers
    with equal results gave the same rows; collisions are possible but improbable.

    Args:
        batches: [rows, S] arrays of token ids; the iterator is consumed.
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
    """Time an epoch of each usable reader, the readers in turn.

    The program exits before any timing if the readers do not give the same rows.

    Args:
        store: Store of the corpus that all read.
        folder: Folder in which each reader writes its data set.
        rounds: Timed epochs of each reader.

    Returns:
        By name of the reader: CPU and wall seconds of each epoch, the rates that follow from their medians, its CPU
        time relative to ours, and the number and digest of its rows.
    """
    ways = {name: way for name, way in VARIANTS.items() if is_usable(way)}
    for name, way in ways.items():
        way.write(store, folder / name)
    read = {name: digest(way.read(store, folder / name)) for name, way in ways.items()}
    if len(set(read.values())) > 1:
        sys.exit(
            f"the readers do not give the same rows (number, digest): {read}; "
            "correct the reader that differs, in benchmarks/loader_rivals.py"
        )
    wall_s: dict[str, list[float]] = {name: [] for name in ways}

    def timed_epoch(name: str, way: Variant) -> Callable[[], float]:
        """Return a function that reads one epoch, records its wall time and returns its CPU seconds."""

        def read_epoch() -> float:
            cpu_begin = time.process_time()
            wall_begin = time.perf_counter()
            for _ in way.read(store, folder / name):
                pass
            wall_s[name].append(time.perf_counter() - wall_begin)
            return time.process_time() - cpu_begin

        return read_epoch

    cpu_s = alternate({name: timed_epoch(name, way) for name, way in ways.items()}, rounds, warm_up=0)
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
    """Return the GET requests of a node per million rows, computed from the manifest: one request per shard."""
    shards = read_manifest(store).shards
    return 1e6 * len(shards) / sum(entry.rows for entry in shards)


def report_rates(found: Json, missing: Sequence[str]) -> ResultLine:
    """Print the table of the readers' rates and return its row for docs/results.md.

    Args:
        found: Result of `compare`.
        missing: Names of the readers that could not be imported.
    """
    rows = [
        [
            name,
            f"{way['rows_per_core_s']:,.0f}",
            f"{way['cpu_us_per_row']:.1f}",
            f"{way['rows_per_s']:,.0f}",
            format_summary(way["ratio"]),
        ]
        for name, way in found.items()
    ]
    rows += [[name, "not importable", "", "", ""] for name in missing]
    print_table(["", "rows / s core", "CPU us a row", "rows/s", "CPU / ours"], rows)
    rivals = [f"{way['ratio']['median']:.1f} x {name}" for name, way in found.items() if name != "ours"]
    rivals += [f"{name} not importable" for name in missing]
    value = f"{found['ours']['rows_per_core_s']:,.0f} rows/s a core"
    return ResultLine(f"loader, shuffled rows of 512 in batches of {BATCH}, warm", value, ", ".join(rivals))


def report_positions(found: list[Json], facts: str) -> ResultLine:
    """Print the table of the first batches and return its row for docs/results.md.

    Args:
        found: Result of `time_positions`, one entry per position.
        facts: Size of the corpus and of the window, as text.
    """
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


def main(argv: Sequence[str] | None = None) -> Json:
    """Run the three measurements, print their tables and return the record.

    Everything is written to a temporary folder, except that `--s3` leaves its corpus in the bucket.
    """
    parse = parser(__doc__, rounds=3)
    parse.add_argument(
        "--shards", type=int, default=8, help="shards of 16.8 MB that the readers read (default: %(default)s)"
    )
    parse.add_argument(
        "--s3",
        metavar="URL",
        help="time the first batches from S3: write `--shards` shards to this address, read them",
    )
    parse.add_argument("--endpoint-url", metavar="URL", help="address of the S3 service, unless it is AWS")
    arguments = parse.parse_args(argv)
    shards, rows_per_shard = (2, 1024) if arguments.smoke else (arguments.shards, ROWS_PER_SHARD)
    num_large_shards = 200 if arguments.smoke else SHARDS_OF_33B
    with tempfile.TemporaryDirectory(prefix="loader-") as temporary:
        folder = Path(temporary)
        store = write_corpus(str(folder / "corpus"), shards, rows_per_shard, shards)
        rates = compare(store, folder, arguments.rounds)
        missing = [name for name in VARIANTS if name not in rates]
        lines = [report_rates(rates, missing)]
        if arguments.s3:
            large = write_corpus(arguments.s3, shards, rows_per_shard, shards, endpoint_url=arguments.endpoint_url)
        else:
            large = write_corpus(str(folder / "large"), num_large_shards, rows_per_shard, shards)
        entries = read_manifest(large).shards
        window = min(WINDOW_SHARDS, len(entries))
        num_rows = sum(entry.rows for entry in entries)
        facts = (
            f"{num_rows / 1e6:.1f} M rows in {len(entries):,} shards, window {window * entries[0].bytes / 1e6:.0f} MB"
        )
        positions = time_positions(large, folder / "cache", window)
        lines.append(report_positions(positions, facts))
        gets = requests_per_million_rows(store)
    print(f"GET requests per million rows: {gets:.0f} (a node fetches each shard once)")
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
