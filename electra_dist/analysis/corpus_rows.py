"""Read the rows of a corpus shard by shard, from a folder or from S3."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from electra_dist.data.corpora import Corpora, StoredShard
from electra_dist.data.verified_read import READINGS
from electra_dist.errors import ManifestMismatch
from electra_dist.store.atomic_files import file_sha256, readable


def rows_of_shards(corpora: Corpora, shards: Iterable[int]) -> Iterator[tuple[int, NDArray[np.integer]]]:
    """Yield for each shard, after a check of its SHA-256, (number in `corpora`, token ids [shard rows, seq_len]).
    A shard on S3 is downloaded to a temporary file, up to `READINGS` times if its SHA-256 is wrong; if it stays wrong,
    ManifestMismatch is raised. `shards` is consumed one by one, so a progress bar may wrap it.
    """
    from electra_dist.data.shard import Shard  # This module imports torch, which takes seconds.

    with tempfile.TemporaryDirectory(prefix="electra-rows-") as folder:
        for index in shards:
            path = _verified_file(corpora.shards[index], Path(folder))
            shard = Shard(path, corpora.seq_len, corpora.numpy_dtype)
            try:
                yield index, shard.rows(np.arange(shard.num_rows))
            finally:
                shard.close()


def _verified_file(shard: StoredShard, folder: Path) -> Path:
    """Check a shard's SHA-256 and return the path of its file; a shard on S3 is first downloaded to `folder`."""
    store, entry = shard
    path = shard.local_path
    is_fetched = path is None
    if path is None:
        path = folder / "shard.tar"
    for _ in range(READINGS if is_fetched else 1):
        if is_fetched:
            store.fetch(entry.name, path, must_exist=True)
        with readable(path):
            if file_sha256(path) == entry.sha256:
                return path
    raise ManifestMismatch(
        f"{shard.url}: its sha256 is not {entry.sha256[:12]}..., which corpus.json lists; restore this "
        f"shard or build the corpus again"
    )
