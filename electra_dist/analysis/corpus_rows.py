"""Read the rows of a corpus shard by shard, from a folder or from S3."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from electra_dist.data.corpus_manifest import CorpusManifest
from electra_dist.store.interface import Store


def rows_of_shards(
    store: Store, manifest: CorpusManifest, shards: Iterable[int]
) -> Iterator[tuple[int, NDArray[np.integer]]]:
    """Yield the index and the rows, [rows, seq_len], of each shard.

    A shard on S3 is downloaded to a temporary file first, which the next one replaces. Digests are not verified.

    Args:
        store: the corpus.
        manifest: its manifest.
        shards: indices of the shards in the manifest; taken one by one, so a progress bar may wrap them.

    Raises:
        StoreError: a shard cannot be read.
        ManifestMismatch: a shard does not hold the rows that the manifest lists.
    """
    from electra_dist.data.shard import Shard  # It imports torch, which takes seconds.

    with tempfile.TemporaryDirectory(prefix="electra-rows-") as folder:
        for index in shards:
            entry = manifest.shards[index]
            path = store.local_path(entry.name)
            if path is None:
                path = Path(folder) / "shard.tar"
                store.fetch(entry.name, path, must_exist=True)
            shard = Shard(path, manifest.seq_len, manifest.numpy_dtype)
            try:
                yield index, shard.rows(np.arange(shard.num_rows))
            finally:
                shard.close()
