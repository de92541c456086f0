"""Readers that `loader.py` compares: ours, and three libraries, each in its own format and its fastest way.

A reader writes its data set once. It then returns an iterator over one shuffled epoch of [BATCH, seq_len] integer
arrays. All of its work happens in this process, without workers, so the process's CPU time covers it.

    ours                 RowLoader over a local corpus, with digests, window shuffle and receipts
    webdataset           tar files with one row per sample, as its users write them; shuffle buffer, batches
    webdataset, blocks   our shards in its pipeline: blocks of 1,024 rows, split into rows; shuffle buffer, batches
    mosaicml-streaming   MDS files with one row per sample, shuffled by its default algorithm
    litdata              chunks of tokens and TokensLoader, shuffled

Limits: only ours verifies the data that it reads. A library that cannot be imported is not measured.
"""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from electra_dist.data.corpora import Corpora
from electra_dist.data.loader import RowLoader
from electra_dist.data.manifest import read_manifest
from electra_dist.data.order import CorpusOrder, RowOrder
from electra_dist.data.shard import Shard
from electra_dist.data.shard_cache import ShardCache
from electra_dist.store.interface import Store

BATCH = 256
WINDOW_SHARDS = 64  # Shards whose rows our reader shuffles together.
BUFFER_ROWS = 10_000  # Size of webdataset's shuffle buffer.
Batches = Iterator[np.ndarray]


class Reader(NamedTuple):
    """One reader of the comparison, with the functions that write its data set and read it."""

    package: str  # Distribution whose version the record names.
    module: str  # Module that must be importable.
    write: Callable[[Store, Path], None]  # (corpus, folder): writes the data set into the folder, which is new.
    read: Callable[[Store, Path], Batches]  # (corpus, folder): yields one shuffled epoch.


@contextlib.contextmanager
def our_loader(
    store: Store, folder: Path, batch: int, num_ranks: int = 1, epochs: float = 0.0
) -> Iterator[tuple[RowLoader, RowOrder]]:
    """Open a corpus as rank 0 of a run that has read `epochs` of it; yield its loader and the order of its rows."""
    with contextlib.closing(ShardCache(Corpora.of(store, read_manifest(store)), folder)) as cache:
        order = RowOrder([CorpusOrder([shard.entry.rows for shard in cache.corpora.shards], 42, WINDOW_SHARDS)])
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


def _nothing(store: Store, folder: Path) -> None:
    """Write nothing, for a reader of the corpus's own shards."""


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
    """Return the batches of one shuffled epoch over tar files with one row per sample."""

    def rows(samples: Iterator[dict[str, Any]]) -> Iterator[np.ndarray]:
        for sample in samples:
            yield np.load(io.BytesIO(sample["npy"]))

    return _webdataset(sorted(map(str, folder.glob("*.tar"))), rows)


def _read_webdataset_blocks(store: Store, folder: Path) -> Batches:
    """Return the batches of one shuffled epoch over our shards, whose samples are blocks of many rows."""

    def rows(samples: Iterator[dict[str, Any]]) -> Iterator[np.ndarray]:
        for sample in samples:
            yield from np.load(io.BytesIO(sample["rows.npy"]))

    return _webdataset([str(store.local_path(entry.name)) for entry in read_manifest(store).shards], rows)


def _webdataset(paths: list[str], rows: Callable[[Iterator[dict[str, Any]]], Iterator[np.ndarray]]) -> Batches:
    """Return the batches of a webdataset pipeline; `rows` turns the samples of a tar file into rows, [S] each."""
    import webdataset

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
    """Return the batches of one shuffled epoch of mosaicml-streaming, after removing stale shared memory."""
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory
    from torch.utils.data import DataLoader

    clean_stale_shared_memory()
    dataset = StreamingDataset(local=str(folder), shuffle=True, batch_size=BATCH)
    return iter(DataLoader(dataset, BATCH, collate_fn=lambda samples: np.stack([sample["ids"] for sample in samples])))


def _write_litdata(store: Store, folder: Path) -> None:
    """Write the rows as litdata's chunks of tokens, in files of 16 MiB."""
    import torch
    from litdata.streaming.cache import Cache
    from litdata.streaming.item_loader import TokensLoader

    seq_len = read_manifest(store).seq_len
    cache = Cache(str(folder), chunk_bytes=1 << 24, item_loader=TokensLoader(seq_len))
    number = 0
    for block in _rows(store):
        for row in torch.from_numpy(block):
            cache._add_item(number, row)
            number += 1
    cache.done()
    cache.merge()


def _read_litdata(store: Store, folder: Path) -> Batches:
    """Return the batches of one shuffled epoch of litdata."""
    import litdata
    from litdata.streaming.item_loader import TokensLoader

    loader = TokensLoader(read_manifest(store).seq_len)
    dataset = litdata.StreamingDataset(str(folder), item_loader=loader, shuffle=True)
    return (batch.numpy() for batch in litdata.StreamingDataLoader(dataset, batch_size=BATCH, num_workers=0))


READERS = {
    "ours": Reader("electra-dist", "electra_dist", _nothing, _read_ours),
    "webdataset": Reader("webdataset", "webdataset", _write_webdataset, _read_webdataset),
    "webdataset, blocks": Reader("webdataset", "webdataset", _nothing, _read_webdataset_blocks),
    "mosaicml-streaming": Reader("mosaicml-streaming", "streaming", _write_streaming, _read_streaming),
    "litdata": Reader("litdata", "litdata", _write_litdata, _read_litdata),
}
