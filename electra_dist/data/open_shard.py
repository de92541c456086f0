"""Open a shard of a corpus and verify it: in place for a local corpus, in the node's cache for one on S3.

Guarantee: an opened shard had the SHA-256 and the number of rows that the manifest lists, read through the descriptor
by which it is mapped; the checksums of its rows are made of the same bytes. A cached shard with other bytes is fetched
again; a local one is an error that names its file.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from electra_dist.data.corpora import Corpora, StoredShard
from electra_dist.data.manifest import ShardEntry
from electra_dist.data.node_cache import NodeCache
from electra_dist.data.shard import Shard
from electra_dist.errors import ManifestMismatch, StoreAway, StoreExhausted, StoreMissing
from electra_dist.store.atomic_files import file_sha256, readable

_TRIES = 5  # Times that a cached shard may have wrong bytes, or be deleted before it is open.


def open_verified(shard: StoredShard, corpora: Corpora, node_cache: NodeCache) -> Shard:
    """Open and verify a shard of `corpora`, which the caller must close; raise ManifestMismatch if it is another."""
    path = shard.local_path
    if path is None:
        return _open_in_node_cache(shard, corpora, node_cache)
    opened = _open_if_listed(path, shard.entry, corpora, is_cached=False)
    if opened is None:
        raise ManifestMismatch(
            f"{path}: not the shard that corpus.json lists, which has {shard.entry.bytes} bytes and sha256 "
            f"{shard.entry.sha256[:12]}...; restore the file or build the corpus again"
        )
    return opened


def _open_in_node_cache(shard: StoredShard, corpora: Corpora, node_cache: NodeCache) -> Shard:
    path = node_cache.path(shard.entry)
    num_wrong = 0
    num_deleted = 0  # times that another process has evicted the shard between its fetch and its opening
    while num_wrong < _TRIES and num_deleted < _TRIES:
        node_cache.ensure(shard, verify=num_wrong > 0)
        try:
            opened = _open_if_listed(path, shard.entry, corpora, is_cached=True)
        except StoreMissing:
            num_deleted += 1
            continue
        if opened is not None:
            return opened
        num_wrong += 1
    if num_deleted == _TRIES:
        raise StoreAway(
            f"{path}: deleted {_TRIES} times in a row before it could be opened, because other processes need "
            "its place; free space there, raise data.cache_limit_gb, or set data.cache_dir to a larger disk"
        )
    raise StoreExhausted(
        f"{path}: wrong bytes {_TRIES} times in a row, although those that were fetched were right; test the "
        "memory and the disk of this node, or set data.cache_dir to another disk"
    )


def _open_if_listed(path: Path, entry: ShardEntry, corpora: Corpora, *, is_cached: bool) -> Shard | None:
    """Open the shard in a file; return None if its size or SHA-256 differs from the manifest entry.

    Raises ManifestMismatch if the file is the listed one, but is no shard or has another number of rows. A file that
    `is_cached` is locked against deletion, and its time of last use is set.
    """
    with readable(path):
        if path.stat().st_size != entry.bytes:
            return None
    try:
        shard = Shard(path, corpora.seq_len, corpora.numpy_dtype, lock=is_cached, verify=True)
    except ManifestMismatch:
        if file_sha256(path) == entry.sha256:
            raise
        return None
    if shard.sha256 != entry.sha256:
        shard.close()
        return None
    if shard.num_rows != entry.rows:
        shard.close()
        raise ManifestMismatch(
            f"{path}: has {shard.num_rows} rows, but corpus.json lists {entry.rows}; build the corpus "
            f"again, or delete corpus.json and run `electra-dist corpus index`"
        )
    if is_cached:
        with contextlib.suppress(OSError):  # evicted meanwhile, or on a disk that is now read-only
            os.utime(path)  # the time of its last use
    return shard
