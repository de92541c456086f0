"""Divide the ranks of a large run into groups, so that rank 0 reads one object per group and not one per rank.

A group is about the square root of the number of ranks: 32 groups of 32 ranks for 1,024. The last rank of a group, its
leader, merges the entries of the group's files. Rank 0 is never a leader. Up to 16 ranks there are no groups.
"""

from __future__ import annotations

import math
import re

_MOST_WITHOUT_GROUPS = 16
_ENTRY_NAME = re.compile(r"rank-\d+\.json|merged-\d+\.json|group-\d+/.+")


def group_size(world_size: int) -> int:
    """Return the number of ranks in a group, the last of which may be smaller; 1 stands for no groups."""
    if world_size <= _MOST_WITHOUT_GROUPS:
        return 1
    return math.isqrt(world_size - 1) + 1  # the square root, rounded up


def led_group(rank: int, world_size: int) -> int | None:
    """Return the number of the group that a rank leads; None if it leads none."""
    size = group_size(world_size)
    is_last = rank % size == size - 1 or rank == world_size - 1
    return rank // size if size > 1 and is_last else None


def entry_key(folder: str, rank: int, world_size: int) -> str:
    """Return the key of the object in which a rank stores the entry of its file.

    It is FOLDER/rank-00003.json without groups, and FOLDER/group-00000/rank-00003.json with groups.
    """
    size = group_size(world_size)
    if size == 1:
        return f"{folder}/rank-{rank:05d}.json"
    return f"{group_prefix(folder, rank // size)}rank-{rank:05d}.json"


def group_prefix(folder: str, group: int) -> str:
    """Return what the keys of the entries of a group begin with, for example FOLDER/group-00003/."""
    return f"{folder}/group-{group:05d}/"


def merged_key(folder: str, group: int) -> str:
    """Return the key of the object in which the leader of a group stores the merged entries of the group."""
    return f"{folder}/merged-{group:05d}.json"


def keys_of_group(folder: str, group: int, world_size: int) -> list[str]:
    """Return the keys of the entries of all ranks of a group, in the order of the ranks."""
    size = group_size(world_size)
    ranks = range(group * size, min((group + 1) * size, world_size))
    return [entry_key(folder, rank, world_size) for rank in ranks]


def keys_of_rank_0(folder: str, world_size: int) -> list[str]:
    """Return the keys that rank 0 reads for a commit, in the order of the ranks: of the entries, or of the groups."""
    size = group_size(world_size)
    if size == 1:
        return [entry_key(folder, rank, world_size) for rank in range(world_size)]
    num_groups = -(-world_size // size)  # rounded up
    return [merged_key(folder, group) for group in range(num_groups)]


def is_entry(name: str) -> bool:
    """Return whether a file of a checkpoint folder holds entries for the manifest, by its name in the folder."""
    return _ENTRY_NAME.fullmatch(name) is not None
