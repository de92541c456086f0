"""The receipt of a run: how many rows it has trained on, and a digest of which.

Guarantee: the digest is the sum, modulo 2**64, of one 64-bit hash per row consumed. It does not depend on order, ranks
or restarts, so each rank adds up its own rows, one integer all-reduce makes the step's receipt, and anybody who knows
the order can say afterwards what it must be (`analysis/row_audit.py`). A wrong multiset of rows passes with chance
2**-64.

How: the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), a bijection of 64-bit integers, so that two
different rows never have the same hash and a row can be found again from its hash.

Cost: 5 ns a row, in the loader's thread.

Where it stops: it finds mistakes, not forgeries: whoever wants to can make rows that add up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MASK64 = 2**64 - 1


@dataclass(frozen=True)
class Receipt:
    """`rows` rows, whose hashes add up to `digest` (in [0, 2**64))."""

    rows: int = 0
    digest: int = 0

    def __add__(self, other: Receipt) -> Receipt:
        return Receipt(self.rows + other.rows, (self.digest + other.digest) & _MASK64)

    def __sub__(self, other: Receipt) -> Receipt:
        return Receipt(self.rows - other.rows, (self.digest - other.digest) & _MASK64)

    def times(self, count: int) -> Receipt:
        """The receipt of `count` passes."""
        return Receipt(self.rows * count, self.digest * count & _MASK64)

    @property
    def words(self) -> tuple[int, int]:
        """Two int64 for a sum over ranks, which wraps as it should."""
        return self.rows, self.digest - (1 << 64) if self.digest >> 63 else self.digest

    @property
    def hex(self) -> str:
        """The digest as 16 hexadecimal digits."""
        return f"{self.digest:016x}"

    @classmethod
    def from_words(cls, rows: int, digest: int) -> Receipt:
        """The inverse of `words`."""
        return cls(rows, digest & _MASK64)

    @classmethod
    def of(cls, row_ids: NDArray[np.int64]) -> Receipt:
        """The receipt of these rows, each counted as often as it stands there."""
        return cls(len(row_ids), int(row_hash(row_ids).sum(dtype=np.uint64)))


def row_hash(row_ids: NDArray[Any]) -> NDArray[np.uint64]:
    """A 64-bit hash of each row id; equal ids and no others have equal hashes."""
    word = (row_ids.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))
