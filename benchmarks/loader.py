"""How fast is the data loader, beside three libraries, and how soon does it give its first batch?

    python benchmarks/run.py loader

It measures the rate of each reader of `loader_rivals.py` over one shuffled epoch of the same rows of 512 tokens, by
the CPU time of all threads of the process. The readers take turns. Then it measures the first batch of a rank at five
positions of a corpus of 64 M rows (33 B tokens), from the open store on, and the memory of Python and NumPy that its
loader then holds, without mapped shards. All files are in the page cache.

Guarantee: before anything is timed, all readers must give the same rows; otherwise the benchmark ends.

Limits: the readers run without worker processes, and no training step runs beside them.
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
from loader_rivals import BATCH, READERS, Reader, is_usable, our_loader
from measure import Found, Json, ResultLine, alternate, format_summary, print_table, ratio, summary
from random_corpus import write_corpus

from electra_dist.store.interface import Store

ROUNDS = 3
ROWS_PER_SHARD = 16_384  # A shard has 16.8 MB.
SHARDS_OF_33B = 3_907
GLOBAL_BATCH, NUM_RANKS = 2_048, 8
POSITIONS = (0.0, 0.1, 0.5, 0.99, 1000.5)  # in epochs


def add_options(parser: argparse.ArgumentParser) -> None:
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

    def timed_epoch(name: str, reader: Reader) -> Callable[[], float]:
        def read_epoch() -> float:
            begin = time.process_time()
            for _ in reader.read(store, folder / name):
                pass
            return time.process_time() - begin

        return read_epoch

    cpu_s = alternate({name: timed_epoch(name, reader) for name, reader in readers.items()}, rounds, warm_up=0)
    num_rows = read["ours"][0]
    return {
        name: {
            "cpu_s": cpu_s[name],
            "cpu_us_per_row": 1e6 * summary(cpu_s[name])["median"] / num_rows,
            "rows_per_core_s": num_rows / summary(cpu_s[name])["median"],
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
            format_summary(reader["ratio"]),
        ]
        for name, reader in found.items()
    ]
    missing = [name for name in READERS if name not in found]
    rows += [[name, "not importable", "", ""] for name in missing]
    print_table(["", "rows / s core", "CPU us a row", "CPU / ours"], rows)
    rivals = [f"{reader['ratio']['median']:.1f} x {name}" for name, reader in found.items() if name != "ours"]
    rivals += [f"{name} not importable" for name in missing]
    value = f"{found['ours']['rows_per_core_s']:,.0f} rows/s a core"
    return ResultLine(f"loader, shuffled rows of 512 in batches of {BATCH}, warm", value, ", ".join(rivals))


def first_batches(store: Store, folder: Path) -> list[Json]:
    """Return the seconds of rank 0's first batch at every position, and the memory that its loader then holds."""

    def read(epochs: float) -> int:
        with our_loader(store, folder, GLOBAL_BATCH, NUM_RANKS, epochs) as (loader, _):
            loader.next()
            return tracemalloc.get_traced_memory()[0]

    found = []
    for epochs in POSITIONS:
        (seconds,) = alternate({"first": lambda epochs=epochs: read(epochs)}, rounds=1)["first"]
        tracemalloc.start()  # in a run of its own, because tracing slows what it observes
        found.append({"epochs": epochs, "seconds": seconds, "memory_bytes": read(epochs)})
        tracemalloc.stop()
    return found


def report_first_batches(found: list[Json], facts: str) -> ResultLine:
    """Print the table of the first batches; return its row for docs/results.md."""
    rows = [[f"{row['epochs']:g}", f"{row['seconds']:.3f}", f"{row['memory_bytes'] / 1e6:.1f}"] for row in found]
    print(f"\n{facts}")
    print_table(["epochs in", "first batch, s", "MB"], rows)
    seconds = [row["seconds"] for row in found]
    most_mb = max(row["memory_bytes"] for row in found) / 1e6
    value = f"{min(seconds):.2f} to {max(seconds):.2f} s, {most_mb:.0f} MB"
    return ResultLine(f"first batch at 0, 10, 50, 99 % and epoch 1,000, {facts}", value, "")


def measure(arguments: argparse.Namespace) -> Found:
    shards, rows_per_shard = (2, 1024) if arguments.smoke else (arguments.shards, ROWS_PER_SHARD)
    many = 200 if arguments.smoke else SHARDS_OF_33B
    with tempfile.TemporaryDirectory(prefix="loader-") as name:
        folder = Path(name)
        rates = compare(write_corpus(folder / "corpus", shards, rows_per_shard, shards), folder, arguments.rounds)
        first = first_batches(write_corpus(folder / "many", many, rows_per_shard, shards), folder / "cache")
    facts = f"{many * rows_per_shard / 1e6:.1f} M rows in {many:,} shards"
    lines = [report_rates(rates), report_first_batches(first, facts)]
    packages = [reader.package for reader in READERS.values()]
    return Found(lines, {"ways": rates, "first_batches": first}, packages=packages)
