"""Pack examples into rows of exactly seq_len ids.

An example is a list of ids, [CLS] A [SEP] B [SEP], of at most seq_len ids; a row is what the model gets as one
sequence.

Guarantee: every example is whole in one row, once, with its ids unchanged; [PAD] occurs only at the end of a row. The
examples' lengths and order alone decide which examples share a row.

How: the packing "rows" works by best fit decreasing: it takes the longest example first, and puts each example into
the row with the least free space that is still enough for it. The packing "none" gives each example a row of its own,
as in the ELECTRA paper. In both, the rows are in the order of their first example.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np


def row_dtype(vocab_size: int) -> type[np.uint16] | type[np.uint32]:
    """Return the smallest type that holds all ids of a vocabulary: uint16 up to 65,536 entries, uint32 for more."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


def make_rows(
    examples: Sequence[Sequence[int]],
    seq_len: int,
    pad_id: int,
    dtype: type[np.uint16] | type[np.uint32],
    packing: Literal["rows", "none"],
) -> np.ndarray:
    """Pack examples (lists of token ids) into rows, and return the rows, [num_rows, seq_len].

    `packing` "rows" puts as many examples into a row as fit, "none" only one. `dtype` must hold every id.
    """
    lengths = [len(example) for example in examples]
    groups = group_examples(lengths, seq_len, packing)
    return fill_rows(examples, places_of_examples(lengths, groups), len(groups), seq_len, pad_id, dtype)


def group_examples(lengths: Sequence[int], seq_len: int, packing: Literal["rows", "none"]) -> list[list[int]]:
    """Choose which examples share a row; return the indices of each row's examples. No length may exceed `seq_len`."""
    if packing == "rows":
        return pack(lengths, seq_len)
    return [[index] for index in range(len(lengths))]


def places_of_examples(lengths: Sequence[int], groups: Sequence[Sequence[int]]) -> np.ndarray:
    """Return where each example lies, int64 [examples, 3]: row, position of the first token in the row, example index.

    `groups` lists the examples of each row (`group_examples`). The result is ordered by row, and within a row from
    left to right.
    """
    places = []
    for row, group in enumerate(groups):
        start = 0
        for index in group:
            places.append((row, start, index))
            start += lengths[index]
    return np.array(places, np.int64).reshape(-1, 3)


def fill_rows(
    examples: Sequence[Sequence[int]],
    places: np.ndarray,
    num_rows: int,
    seq_len: int,
    pad_id: int,
    dtype: type[np.uint16] | type[np.uint32],
) -> np.ndarray:
    """Copy the examples to their `places` (`places_of_examples`), fill up with `pad_id`, and return the rows."""
    rows = np.full((num_rows, seq_len), pad_id, dtype)
    for row, start, index in places.tolist():
        example = examples[index]
        rows[row, start : start + len(example)] = example
    return rows


def pack(lengths: Sequence[int], seq_len: int) -> list[list[int]]:
    """Group examples so that each group fits a row, by best fit decreasing; return groups of indices into `lengths`.

    For example, lengths [6, 5, 4, 3] in rows of 10 give [[0, 2], [1, 3]]: 6 and 5 begin groups with 4 and 5 ids of
    free space, 4 fills the first group, and 3 goes to the second. The indices of a group ascend; the groups are in the
    order of their first index. Each example takes constant time, because a bit set of the free spaces finds the best
    group.
    """
    groups: list[list[int]] = []
    groups_with_space: list[list[int]] = [[] for _ in range(seq_len + 1)]  # free space -> numbers of groups
    space_bits = 0  # set of free spaces: bit s is 1 if groups_with_space[s] is not empty
    longest_first = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    for index in longest_first:
        length = lengths[index]
        # Shifting out the bits below `length` leaves the spaces that hold the example; bit 0 now stands for `length`.
        fitting_bits = space_bits >> length
        if fitting_bits:
            # The lowest bit is the least sufficient space. Take a group with this space out of its list.
            lowest_bit = fitting_bits & -fitting_bits
            space = length + (lowest_bit.bit_length() - 1)
            group_number = groups_with_space[space].pop()
            if not groups_with_space[space]:
                space_bits ^= 1 << space
        else:
            # No group holds the example: begin one.
            space = seq_len
            group_number = len(groups)
            groups.append([])
        # Place the example, and file the group under the space that is left.
        groups[group_number].append(index)
        space_left = space - length
        groups_with_space[space_left].append(group_number)
        space_bits |= 1 << space_left

    # Restore the order of the text: within a group, and of the groups by their first example.
    for group in groups:
        group.sort()
    groups.sort(key=lambda group: group[0])
    return groups
