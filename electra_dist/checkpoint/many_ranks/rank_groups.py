"""Divide the ranks of a large run into groups, so that rank 0 reads one object per group and not one per rank.

The size of a group is about the square root of the number of ranks: 1,024 ranks form 32 groups of 32. The last rank of
a group is its leader. It merges the manifest entries that the ranks of the group have stored for their tensor files.
Rank 0 is never a leader. A run with at most 16 ranks has no groups.
"""

from __future__ import annotations

import math
import re

_MOST_WITHOUT_GROUPS = 16
_ENTRY_NAME = re.compile(r"rank-\d+\.json|merged-\d+\.json|group-\d+/.+")


def group_size(world_size: int) -> int:
    """Return the number of ranks in each group (the last may have fewer); 1 means that there are no groups."""
    if world_size <= _MOST_WITHOUT_GROUPS:
        return 1
    return math.isqrt(world_size - 1) + 1  # the square root, rounded up


def led_group(rank: int, world_size: int) -> int | None:
    """Return the number of the group that a rank leads, because it is the group's last rank; None if it leads none."""
    size = group_size(world_size)
    if size == 1:
        return None
    is_last_of_group = rank % size == size - 1 or rank == world_size - 1
    return rank // size if is_last_of_group else None


def entry_key(folder: str, rank: int, world_size: int) -> str:
    """Return the key of a rank's manifest entry, FOLDER/rank-00003.json or FOLDER/group-00000/rank-00003.json."""
    size = group_size(world_size)
    if size == 1:
        return f"{folder}/rank-{rank:05d}.json"
    return f"{group_prefix(folder, rank // size)}rank-{rank:05d}.json"


def group_prefix(folder: str, group: int) -> str:
    """Return the folder in which the ranks of a group store their manifest entries: FOLDER/group-00003/."""
    return f"{folder}/group-{group:05d}/"


def merged_key(folder: str, group: int) -> str:
    """Return the key of the object with the merged manifest entries of a group: FOLDER/merged-00003.json."""
    return f"{folder}/merged-{group:05d}.json"


def keys_of_group(folder: str, group: int, world_size: int) -> list[str]:
    """Return the keys under which the ranks of a group store their entries, in the order of the ranks."""
    size = group_size(world_size)
    ranks = range(group * size, min((group + 1) * size, world_size))
    return [entry_key(folder, rank, world_size) for rank in ranks]


def keys_of_rank_0(folder: str, world_size: int) -> list[str]:
    """Return the keys of the objects that rank 0 reads for a commit, one per rank or per group, in rank order."""
    size = group_size(world_size)
    if size == 1:
        return [entry_key(folder, rank, world_size) for rank in range(world_size)]
    num_groups = -(-world_size // size)  # rounded up
    return [merged_key(folder, group) for group in range(num_groups)]


def is_entry(name: str) -> bool:
    """Return whether a file, named relative to the checkpoint's folder, holds manifest entries of ranks."""
    return _ENTRY_NAME.fullmatch(name) is not None
