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
    """Yield for each shard its index in the manifest and its token ids, [rows of the shard, seq_len].

    A shard on S3 is downloaded to a temporary file, which the next shard replaces. Digests are not verified.

    Args:
        store: store of the corpus.
        manifest: manifest of the corpus.
        shards: indices of the shards in the manifest; they are taken one by one, so a progress bar may wrap them.

    Raises:
        StoreError: a shard cannot be read.
        ManifestMismatch: a shard does not hold the rows that the manifest lists.
    """
    from electra_dist.data.shard import Shard  # This module imports torch, which takes seconds.

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
