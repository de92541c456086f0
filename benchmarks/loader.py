"""How fast is the data loader, beside three libraries, and how soon does it give its first batch?

It measures the rate of each reader over one shuffled epoch of the same rows of 512 tokens, by the CPU time of all
threads of the process. The readers take turns, each in its own format and its fastest way:

    ours                 RowLoader over a local corpus, with digests, window shuffle and receipts
    webdataset           tar files with one row per sample, as its users write them; shuffle buffer, batches
    webdataset, blocks   our shards in its pipeline: blocks of 1,024 rows, split into rows; shuffle buffer, batches
    mosaicml-streaming   MDS files with one row per sample, shuffled by its default algorithm
    litdata              chunks of tokens and TokensLoader, shuffled

Then it measures the first batch of a rank at five positions of a corpus of 64 M rows (33 B tokens), from the open
store on, and the memory of Python and NumPy that its loader then holds, without mapped shards. All files are in the
page cache.

Guarantee: before anything is timed, all readers must give the same rows; otherwise the benchmark ends.

Limits: the readers run without worker processes, and no training step runs beside them. Only ours verifies the data
that it reads. A library that cannot be imported is not measured.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import io
import itertools
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from measure import Found, Json, ResultLine, alternate, format_summary, print_table, ratio, write_corpus

from electra_dist.data.corpora import Corpora
from electra_dist.data.loader import RowLoader
from electra_dist.data.manifest import read_manifest
from electra_dist.data.order import CorpusOrder, RowOrder
from electra_dist.data.shard import Shard
from electra_dist.data.shard_cache import ShardCache
from electra_dist.store.interface import Store

ROUNDS = 3
ROWS_PER_SHARD = 16_384  # A shard has 16.8 MB.
SHARDS_OF_33B = 3_907
GLOBAL_BATCH, NUM_RANKS = 2_048, 8
POSITIONS = (0.0, 0.1, 0.5, 0.99, 1000.5)  # in epochs
BATCH = 256
WINDOW_SHARDS = 64  # Shards whose rows our reader shuffles together.
BUFFER_ROWS = 10_000  # Size of webdataset's shuffle buffer.
Batches = Iterator[np.ndarray]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shards", type=int, default=3, help="shards of 16.8 MB that the readers read (3)")


def digest(batches: Batches) -> tuple[int, int]:
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
        if reader.write is not None:
            reader.write(store, folder / name)
    epochs = {name: functools.partial(reader.read, store, folder / name) for name, reader in readers.items()}
    read = {name: digest(read_epoch()) for name, read_epoch in epochs.items()}
    if len(set(read.values())) > 1:
        sys.exit(f"the readers do not give the same rows (number, digest): {read}; correct the reader that differs")

    def cpu_seconds(read_epoch: Callable[[], Batches]) -> float:
        begin = time.process_time()
        for _ in read_epoch():
            pass
        return time.process_time() - begin

    ways = {name: functools.partial(cpu_seconds, read_epoch) for name, read_epoch in epochs.items()}
    cpu_s = alternate(ways, rounds, warm_up=0)
    num_rows = read["ours"][0]
    return {
        name: {
            "cpu_s": cpu_s[name],
            "cpu_us_per_row": 1e6 * statistics.median(cpu_s[name]) / num_rows,
            "rows_per_core_s": num_rows / statistics.median(cpu_s[name]),
            "ratio": ratio(cpu_s[name], cpu_s["ours"]),
            "rows": read[name][0],
            "digest": read[name][1],
        }
        for name in readers
    }


def report_rates(found: Json) -> ResultLine:
    """Print the table of the readers' rates; return its row for docs/results.md."""
    rows, rivals = [], []
    for name, reader in found.items():
        rate, us = f"{reader['rows_per_core_s']:,.0f}", f"{reader['cpu_us_per_row']:.1f}"
        rows.append([name, rate, us, format_summary(reader["ratio"])])
        rivals.append(f"{reader['ratio']['median']:.1f} x {name}")
    for name in (name for name in READERS if name not in found):
        rows.append([name, "not importable", "", ""])
        rivals.append(f"{name} not importable")
    print_table(["", "rows / s core", "CPU us a row", "CPU / ours"], rows)
    value = f"{found['ours']['rows_per_core_s']:,.0f} rows/s a core"
    return ResultLine(f"loader, shuffled rows of 512 in batches of {BATCH}, warm", value, ", ".join(rivals[1:]))


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


class Reader(NamedTuple):
    """One reader of the comparison: it writes its data set once, and reads an epoch without other processes."""

    package: str  # Distribution whose version the record names.
    module: str  # Module that must be importable.
    # (corpus, folder): writes the data set into the folder, which is new; None: it reads the corpus's own shards.
    write: Callable[[Store, Path], None] | None
    read: Callable[[Store, Path], Batches]  # (corpus, folder): yields one shuffled epoch, [BATCH, seq_len] integers.


@contextlib.contextmanager
def our_loader(
    store: Store,
    folder: Path,
    batch: int,
    num_ranks: int = 1,
    epochs: float = 0.0,
    window: int = WINDOW_SHARDS,
    limit_bytes: int | None = None,
) -> Iterator[tuple[RowLoader, RowOrder]]:
    """Open a corpus as rank 0 of a run that has read `epochs` of it; yield its loader and the order of its rows."""
    corpora = Corpora.of(store, read_manifest(store))
    with contextlib.closing(ShardCache(corpora, folder, limit_bytes=limit_bytes)) as cache:
        order = RowOrder([CorpusOrder([shard.entry.rows for shard in corpora.shards], 42, window)])
        start_step = int(epochs * order.num_rows) // batch
        with contextlib.closing(RowLoader(cache, order, batch, 0, num_ranks, start_step=start_step)) as loader:
            yield loader, order


def is_usable(reader: Reader) -> bool:
    """Return whether the reader's module can be imported; an installed one may not fit the installed torch."""
    try:
        importlib.import_module(reader.module)
    except (ImportError, RuntimeError, OSError):
        return False
    return True


def _rows(store: Store) -> Iterator[np.ndarray]:
    """Yield all rows of a local corpus in order, [rows, S] of one shard at a time."""
    manifest = read_manifest(store)
    for entry in manifest.shards:
        path = store.local_path(entry.name)
        assert path is not None, f"the shard {entry.name} is not on a local disk; write the corpus to a folder"
        shard = Shard(path, manifest.seq_len, manifest.numpy_dtype)
        yield shard.rows(np.arange(shard.num_rows))
        shard.close()


def _read_ours(store: Store, folder: Path) -> Batches:
    """Yield one epoch through our `RowLoader`, as rank 0 of 1; an incomplete last batch is left out."""
    with our_loader(store, folder, BATCH) as (loader, order):
        for _ in range(order.num_rows // BATCH):
            yield loader.next().ids


def _write_webdataset(store: Store, folder: Path) -> None:
    """Write one tar file per shard, with each row as a sample of its own in NumPy's format."""
    import webdataset

    folder.mkdir()
    for number, block in enumerate(_rows(store)):
        with webdataset.TarWriter(str(folder / f"{number:06d}.tar")) as writer:
            for index, row in enumerate(block):
                writer.write({"__key__": f"{index:08d}", "npy": row})


def _read_webdataset(store: Store, folder: Path) -> Batches:
    return _webdataset(sorted(map(str, folder.glob("*.tar"))), "npy")


def _read_webdataset_blocks(store: Store, folder: Path) -> Batches:
    return _webdataset([str(store.local_path(entry.name)) for entry in read_manifest(store).shards], "rows.npy")


def _webdataset(paths: list[str], key: str) -> Batches:
    """Return the batches of a webdataset pipeline; a sample has one row or a block of rows as its file `key`."""
    import webdataset

    def rows(samples: Iterator[dict[str, Any]]) -> Iterator[np.ndarray]:
        for sample in samples:
            yield from np.atleast_2d(np.load(io.BytesIO(sample[key])))

    return iter(
        webdataset.DataPipeline(
            webdataset.SimpleShardList(paths),
            webdataset.shuffle(len(paths)),
            webdataset.tarfile_to_samples(),
            rows,
            webdataset.shuffle(BUFFER_ROWS, initial=BUFFER_ROWS),
            webdataset.batched(BATCH, collation_fn=np.stack),
        )
    )


def _write_streaming(store: Store, folder: Path) -> None:
    """Write the rows in mosaicml-streaming's MDS format, one per sample, in files of 16 MiB."""
    from streaming import MDSWriter

    seq_len = read_manifest(store).seq_len
    with MDSWriter(out=str(folder), columns={"ids": f"ndarray:uint16:{seq_len}"}, size_limit=1 << 24) as writer:
        for block in _rows(store):
            for row in block:
                writer.write({"ids": row})


def _read_streaming(store: Store, folder: Path) -> Batches:
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory
    from torch.utils.data import DataLoader

    clean_stale_shared_memory()  # Of a run that was killed.
    dataset = StreamingDataset(local=str(folder), shuffle=True, batch_size=BATCH)
    return iter(DataLoader(dataset, BATCH, collate_fn=lambda samples: np.stack([sample["ids"] for sample in samples])))


def _write_litdata(store: Store, folder: Path) -> None:
    """Write the rows as litdata's chunks of tokens, in files of 16 MiB."""
    import torch
    from litdata.streaming.cache import Cache
    from litdata.streaming.item_loader import TokensLoader

    seq_len = read_manifest(store).seq_len
    cache = Cache(str(folder), chunk_bytes=1 << 24, item_loader=TokensLoader(seq_len))
    rows = itertools.chain.from_iterable(torch.from_numpy(block) for block in _rows(store))
    for number, row in enumerate(rows):
        cache._add_item(number, row)
    cache.done()
    cache.merge()


def _read_litdata(store: Store, folder: Path) -> Batches:
    import litdata
    from litdata.streaming.item_loader import TokensLoader

    loader = TokensLoader(read_manifest(store).seq_len)
    dataset = litdata.StreamingDataset(str(folder), item_loader=loader, shuffle=True)
    return (batch.numpy() for batch in litdata.StreamingDataLoader(dataset, batch_size=BATCH, num_workers=0))


READERS = {
    "ours": Reader("electra-dist", "electra_dist", None, _read_ours),
    "webdataset": Reader("webdataset", "webdataset", _write_webdataset, _read_webdataset),
    "webdataset, blocks": Reader("webdataset", "webdataset", None, _read_webdataset_blocks),
    "mosaicml-streaming": Reader("mosaicml-streaming", "streaming", _write_streaming, _read_streaming),
    "litdata": Reader("litdata", "litdata", _write_litdata, _read_litdata),
}
