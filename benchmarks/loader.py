"""How fast is the data loader, beside three libraries?

    python benchmarks/run.py loader

It measures the rate of each reader of `loader_rivals.py` over one shuffled epoch of the same rows of 512 tokens, from
opening the data to the last batch: CPU microseconds per row, over all threads of the process, and rows per second. The
readers take turns; the files are in the page cache.

Guarantee: before anything is timed, all readers must give the same rows; otherwise the benchmark ends.

Limits: the readers run without worker processes, and no training step runs beside them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from loader_rivals import BATCH, READERS, Reader, is_usable, write_corpus
from measure import Found, Json, ResultLine, alternate, format_summary, print_table, ratio, summary

from electra_dist.store.interface import Store

ROUNDS = 3
ROWS_PER_SHARD = 16_384  # A shard has 16.8 MB.


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--shards", type=int, default=3, help="shards of 16.8 MB that the readers read (3)")


def digest(batches: Iterator[np.ndarray]) -> tuple[int, int]:
    """Return the number of rows, and a checksum that does not depend on the order of the rows.

    It changes if tokens change places within a row, or if a row is lost, repeated or replaced.
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


def measure(arguments: argparse.Namespace) -> Found:
    """Measure all readers."""
    shards, rows_per_shard = (2, 1024) if arguments.smoke else (arguments.shards, ROWS_PER_SHARD)
    with tempfile.TemporaryDirectory(prefix="loader-") as folder:
        store = write_corpus(Path(folder) / "corpus", shards, rows_per_shard)
        rates = compare(store, Path(folder), arguments.rounds)
    return Found([report_rates(rates)], {"ways": rates}, packages=[reader.package for reader in READERS.values()])
