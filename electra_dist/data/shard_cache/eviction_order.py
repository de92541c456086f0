"""Decide in which order a node's cache deletes shards when it is full.

Guarantee: a cache that is smaller than the corpus keeps the same shards of it in every epoch: those with the lowest
`keep_rank`, as many as fit in addition to the shards in use. `keep_rank` depends only on the shards, so all ranks of a
node delete the same shards first, also after a restart.

How: a shard is ranked by its SHA-256, which is uniformly distributed and unrelated to the order in which a run reads
the shards. Deleting the least recently used shard would be a bad rule, because an epoch uses every shard once: the
shard that was used last is the one that is needed again latest. With room for half of the corpus, that rule fetches
six of seven shards again in each epoch; this module fetches half of them (`benchmarks/shard_cache.py`).

Limits: shards of other corpora in the same folder are deleted first, the least recently used one before the others.
Two runs on different corpora that share a folder with too little room therefore fetch more than with separate folders.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path


def keep_rank(digest: str, preferred: Collection[str] = ()) -> tuple[bool, str]:
    """Return a shard's sort key: a full cache keeps the lowest keys. Digests in `preferred` have the lowest keys."""
    is_other = digest not in preferred
    return is_other, digest


def eviction_order(
    paths: Iterable[Path],
    *,
    corpus: Collection[str],
    wanted: Collection[str],
    last_used: Callable[[Path], float],
    preferred: Collection[str] = (),
) -> list[Path]:
    """Return the shards (`<sha256>.tar`) among `paths` that may be deleted, the one to delete first in front.

    Shards of other corpora (digest not in `corpus`) come first, the least recently used one in front. Digests in
    `wanted` are left out.
    """
    deletable = [path for path in paths if path.stem not in wanted]
    foreign = sorted((path for path in deletable if path.stem not in corpus), key=last_used)
    own = [path for path in deletable if path.stem in corpus]
    own.sort(key=lambda path: keep_rank(path.stem, preferred), reverse=True)
    return foreign + own
