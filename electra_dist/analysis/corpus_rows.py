"""Read the rows of a corpus shard by shard, from a folder or from S3."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from electra_dist.data.corpora import Corpora


def rows_of_shards(corpora: Corpora, shards: Iterable[int]) -> Iterator[tuple[int, NDArray[np.integer]]]:
    """Yield for each shard its number in `corpora` and its verified token ids, [rows of the shard, seq_len].

    A shard on S3 is in a temporary folder until the next one is read. A progress bar may wrap `shards`.
    """
    from electra_dist.data.shard_cache import ShardCache  # It imports torch, which takes seconds.

    with (
        tempfile.TemporaryDirectory(prefix="electra-rows-") as folder,
        contextlib.closing(ShardCache(corpora, Path(folder), fetch_threads=1, limit_bytes=0)) as cache,
    ):
        yield from cache.whole_shards(shards)
