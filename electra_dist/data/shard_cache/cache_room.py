"""Predict which share of a corpus a node fetches again in each epoch because its cache is too small.

How: pure functions of the sizes of the cache, of the corpus and of the two windows that a node always holds.

Limits: shards that are in use count as if all of them were outside the kept part in proportion to its share; the share
of a single epoch differs by some shards (`benchmarks/shard_cache.py` measures it).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

GIGABYTE = 1e9  # bytes; the unit of data.cache_limit_gb


class CacheRoom(NamedTuple):
    """Sizes in bytes that decide how much of a corpus stays on a node."""

    capacity_bytes: int  # shards that the folder can hold, those that it holds already included
    corpus_bytes: int  # all shards of the corpora on S3
    windows_bytes: int  # the two windows of shards that a node always holds: one in use, one that is fetched ahead


def windows_bytes(shard_bytes: Sequence[int], window_shards: int) -> int:
    """Return the size of the two largest windows that a corpus can have, in bytes.

    Args:
        shard_bytes: Size of each shard.
        window_shards: `data.shuffle_window_shards`, the number of shards whose rows are shuffled together.
    """
    return sum(sorted(shard_bytes, reverse=True)[: 2 * window_shards])


def refetched_share(room: CacheRoom) -> float:
    """Return the share of the corpus that a node fetches again in each epoch, in [0, 1].

    The kept part and the streamed shards of two windows fill the cache: with the kept share k, the capacity is
    k * corpus + (1 - k) * windows. An epoch fetches the rest, 1 - k.
    """
    if room.capacity_bytes >= room.corpus_bytes:
        return 0.0
    if room.corpus_bytes <= room.windows_bytes or room.capacity_bytes <= room.windows_bytes:
        return 1.0
    kept_share = (room.capacity_bytes - room.windows_bytes) / (room.corpus_bytes - room.windows_bytes)
    return 1.0 - kept_share


def describe_room(room: CacheRoom) -> str:
    """Return one phrase for the log: how much of the corpus the cache holds, and what to do if that is not all."""
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
