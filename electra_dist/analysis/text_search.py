"""Find the rows of a corpus that contain a text, by its tokens.

Guarantee: exactly those rows are found that contain at least `least` consecutive tokens of the text. Special tokens in
a row are passed over, so a text may go on in the second segment.

Limits: a text that is divided between rows is found by its longer part only. Text within one word is not found.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class FoundRow(NamedTuple):
    """A row that contains a text, or a part of it."""

    shard: int  # index of its shard in the manifest
    row: int  # number within the shard
    num_tokens: int  # length of the longest run of consecutive tokens that the row and the text have in common


def rows_with_tokens(
    blocks: Iterable[tuple[int, NDArray[np.integer]]], tokens: list[int], special_ids: set[int], least: int
) -> Iterator[FoundRow]:
    """Yield rows with at least `least` consecutive tokens of a text; a block is (shard index, ids [rows, seq_len])."""
    assert 1 <= least <= len(tokens)
    for shard, rows in blocks:
        for row in _possible_rows(rows, tokens, least):
            kept = [token for token in rows[row].tolist() if token not in special_ids]
            longest = _longest_common_run(kept, tokens)
            if longest >= least:
                yield FoundRow(shard, int(row), longest)


def _possible_rows(rows: NDArray[np.integer], tokens: list[int], least: int) -> NDArray[np.int64]:
    """Return candidates: the numbers of rows that hold some `least` consecutive tokens of the text in any order."""
    num_rows = len(rows)
    has_token: dict[int, NDArray[np.bool_]] = {token: (rows == token).any(axis=1) for token in set(tokens)}
    found = np.zeros(num_rows, np.bool_)
    for start in range(len(tokens) - least + 1):
        has_all = np.ones(num_rows, np.bool_)
        for token in set(tokens[start : start + least]):
            has_all &= has_token[token]
        found |= has_all
    return np.flatnonzero(found)


def _longest_common_run(row: list[int], tokens: list[int]) -> int:
    longest = 0
    previous = [0] * (len(tokens) + 1)  # length of the common run that ends at each token, for the last row token
    for row_token in row:
        current = [0] * (len(tokens) + 1)
        for place, token in enumerate(tokens):
            if token == row_token:
                current[place + 1] = previous[place] + 1
                longest = max(longest, current[place + 1])
        previous = current
    return longest
