"""Predict which fraction of a corpus a node fetches again in each epoch because its cache is too small.

Limits: the prediction is a mean. It assumes that the kept shards are spread evenly over the shuffle windows, so the
fraction of a single epoch differs by some shards (`benchmarks/shard_cache.py` measures it).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

GIGABYTE = 1e9  # bytes; the unit of data.cache_limit_gb


class CacheRoom(NamedTuple):
    """Sizes in bytes that decide how much of a corpus stays on a node."""

    capacity_bytes: int  # most bytes of shards that the folder can hold, including those that it holds already
    corpus_bytes: int  # all shards of the corpora on S3
    windows_bytes: int  # the two windows of shards that a node always holds: one in use, one being fetched ahead


def windows_bytes(shard_bytes: Sequence[int], window_shards: int) -> int:
    """Return the most bytes that two shuffle windows can have: the sum of the 2 * `window_shards` largest shards."""
    return sum(sorted(shard_bytes, reverse=True)[: 2 * window_shards])


def refetched_share(room: CacheRoom) -> float:
    """Return the fraction of the corpus that a node fetches again in each epoch, in [0, 1].

    A node keeps a fraction k of the shards for the whole run. It fetches the other shards in each epoch and deletes
    them after use. Rows are drawn from two shuffle windows (groups of shards) at a time, so that a full cache holds
    the kept shards and the other shards of two windows: capacity = k * corpus + (1 - k) * windows. Return 1 - k.
    """
    if room.capacity_bytes >= room.corpus_bytes:
        return 0.0
    if room.corpus_bytes <= room.windows_bytes or room.capacity_bytes <= room.windows_bytes:
        return 1.0
    kept_share = (room.capacity_bytes - room.windows_bytes) / (room.corpus_bytes - room.windows_bytes)
    return 1.0 - kept_share


def describe_room(room: CacheRoom) -> str:
    """Return one line for the log: how much of the corpus the cache can hold, and what to do if it is not all."""
    corpus = f"the corpus has {room.corpus_bytes / GIGABYTE:,.1f} GB"
    capacity = f"there is room for {room.capacity_bytes / GIGABYTE:,.1f} GB of shards"
    if room.capacity_bytes >= room.corpus_bytes:
        return f"{capacity}, {corpus}: later epochs fetch nothing"
    share = refetched_share(room)
    refetched = f"every epoch fetches {share:.0%} of it again, {share * room.corpus_bytes / GIGABYTE:,.1f} GB a node"
    advice = "for less, raise data.cache_limit_gb or set data.cache_dir to a larger disk"
    if room.capacity_bytes < room.windows_bytes:
        windows = f"two shuffle windows alone have {room.windows_bytes / GIGABYTE:,.1f} GB"
        advice += ", or lower data.shuffle_window_shards in a new run"
        return f"{capacity}, {corpus}: {refetched}, and {windows}; {advice}"
    return f"{capacity}, {corpus}: {refetched}; {advice}"
