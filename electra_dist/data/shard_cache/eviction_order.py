"""Decide in which order a node's cache gives up shards when its room is short.

Guarantee: a cache that is smaller than the corpus keeps the same part of it in every epoch: the shards that stand
first in `keep_rank`, as many as fit beside the shards in use. The others are streamed: each is fetched when its window
comes, and deleted when room is needed after its window. `keep_rank` depends on nothing but the shards, so all ranks of
a node delete the same shards first, also after a restart.

How: a shard's rank is its SHA-256, which is uniformly distributed and unrelated to the order in which a run reads the
shards. The order of use would be a bad rank, because an epoch uses every shard once: the shard that was used last is
the one that is needed again latest. A cache of half of the corpus that deletes the least recently used shards fetches
six of seven shards again in each epoch; this one fetches half of them (`benchmarks/shard_cache.py`).

Cost: one sort of the folder's names for each fetch that needs room.

Limits: the shards of other corpora that share the folder are deleted first, the least recently used ones before the
others. Two runs on different corpora in one folder with too little room therefore fetch more than with a folder each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path


def keep_rank(digest: str, preferred: Collection[str] = ()) -> tuple[bool, str]:
    """Return the rank of a shard; a cache that is too small keeps the shards of the least ranks.

    Args:
        digest: SHA-256 of the shard in hexadecimal.
        preferred: Digests of the shards that stand before all others.
    """
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
    """Return the shards of a cache folder that may be deleted, in the order in which to delete them.

    Shards of other corpora come first, the least recently used one before the others. Then come those of the corpus,
    the one with the largest `keep_rank` (a key that is computed from its digest) first, and the preferred ones last.

    Args:
        paths: Files of the folder, each named `<sha256>.tar`.
        corpus: Digests of all shards of this process's corpus.
        wanted: Digests of the shards that this process has open or will read soon; they are left out.
        last_used: Returns the Unix time at which a file was opened last.
        preferred: Digests of the shards of the corpus that are kept before all others.
    """
    deletable = [path for path in paths if path.stem not in wanted]
    foreign = sorted((path for path in deletable if path.stem not in corpus), key=last_used)
    own = [path for path in deletable if path.stem in corpus]
    own.sort(key=lambda path: keep_rank(path.stem, preferred), reverse=True)
    return foreign + own
