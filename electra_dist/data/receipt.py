"""Hash rows: receipts of the row ids that a run has trained on, and checksums of the bytes of rows.

A receipt is the number of rows and their digest: the sum, modulo 2**64, of one 64-bit hash per row id. The checksum of
a row, by which every copy of a row is verified when it is used, is the sum, modulo 2**64, of its 32-bit words times
their keys. The keys are fixed odd numbers of 32 bits, one for each word of the row.

Guarantee: a receipt does not depend on the order of the rows, on ranks or on restarts. Each rank therefore adds up its
own rows, and one integer all-reduce gives the receipt of a step. The order of rows (`order.py`) gives the receipt that
a run should have, so `electra-dist verify` can compare them (`row_audit.py`). If a run used other rows, or
used some of them another number of times, the digest is right by chance with probability 2**-64. If one word of a row
changes, in any of its bits, or if two different words of a row are exchanged, the checksum of the row always changes.
Other damage is missed with a probability of about 2**-64.

How: the hash is the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), a bijection of 64-bit integers.
Different rows therefore never have the same hash, and a row can be identified from its hash.

Limits: receipts and checksums reveal mistakes, not forgeries: a set of wrong row ids with the right sum of hashes can
be constructed on purpose.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from electra_kernels.native import cpu_library
from numpy.typing import NDArray

Checksums = NDArray[np.uint64]
_MASK64 = 2**64 - 1
# Constants of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
_STATE_INCREMENT = np.uint64(0x9E3779B97F4A7C15)
_FIRST_FACTOR = np.uint64(0xBF58476D1CE4E5B9)
_SECOND_FACTOR = np.uint64(0x94D049BB133111EB)
_WORD_BYTES = 4  # of a word of a row
_ROWS_AT_A_TIME = 1024  # rows for which NumPy holds the products of a checksum at once


@dataclass(frozen=True)
class Receipt:
    """Number and summed hashes of rows that a run has trained on; a row that was used twice counts twice.

    `a + b` is the receipt of all rows of a and b. `a - b` is the receipt of the rows of a without the rows of b.
    """

    rows: int = 0
    digest: int = 0  # sum of the rows' hashes modulo 2**64, in [0, 2**64)

    def __add__(self, other: Receipt) -> Receipt:
        return Receipt(self.rows + other.rows, (self.digest + other.digest) & _MASK64)

    def __sub__(self, other: Receipt) -> Receipt:
        return Receipt(self.rows - other.rows, (self.digest - other.digest) & _MASK64)

    def times(self, count: int) -> Receipt:
        """Return the receipt of using each row of this one `count` times, for example in `count` whole epochs."""
        return Receipt(self.rows * count, (self.digest * count) & _MASK64)

    @property
    def words(self) -> tuple[int, int]:
        """Return (rows, digest) as two signed 64-bit integers, which an all-reduce may add up over the ranks.

        Sums of int64 wrap around modulo 2**64, as the digest does. `from_words` makes a receipt of the sums.
        """
        signed_digest = self.digest
        if signed_digest >= 1 << 63:
            signed_digest -= 1 << 64
        return self.rows, signed_digest

    @property
    def hex(self) -> str:
        """Return the digest, without the number of rows, as 16 lower-case hexadecimal digits, as in metrics.jsonl."""
        return f"{self.digest:016x}"

    @classmethod
    def from_words(cls, rows: int, digest: int) -> Receipt:
        """Return the receipt for two integers that `words` returned, or for their sums over ranks."""
        return cls(rows, digest & _MASK64)

    @classmethod
    def of(cls, row_ids: NDArray[np.int64]) -> Receipt:
        """Return the receipt of rows, their number and the sum of the hashes of their ids; `row_ids` is int64 [k]."""
        return cls(len(row_ids), int(row_hash(row_ids).sum(dtype=np.uint64)))


def row_hash(row_ids: NDArray[Any]) -> NDArray[np.uint64]:
    """Return a 64-bit hash of each row id (integers >= 0), in an array of the same shape."""
    # Products wrap at 2**64. Every step can be undone: the factors are odd, and word ^ (word >> n) is invertible.
    word = (row_ids.astype(np.uint64) + np.uint64(1)) * _STATE_INCREMENT
    word = (word ^ (word >> np.uint64(30))) * _FIRST_FACTOR
    word = (word ^ (word >> np.uint64(27))) * _SECOND_FACTOR
    return word ^ (word >> np.uint64(31))


@functools.cache
def checksum_keys(row_bytes: int) -> NDArray[np.uint32]:
    """Return the factors for the checksum of a row of `row_bytes` bytes: an odd uint32 for each word of 4 bytes."""
    # They are the upper halves of the hashes of 0, 1, 2, ..., with the lowest bit set. If `row_bytes` is not a
    # multiple of 4, the remaining bytes, padded with zeros, are one more word.
    num_words = -(-row_bytes // _WORD_BYTES)
    upper_halves = row_hash(np.arange(num_words)) >> np.uint64(32)
    return (upper_halves | np.uint64(1)).astype(np.uint32)


def row_checksums(rows: NDArray[Any]) -> Checksums:
    """Return each row's checksum, uint64 [k]: the sum of its 4-byte words times `checksum_keys`, modulo 2**64.

    `rows` are contiguous little-endian integers [k, seq_len].
    """
    row_bytes = rows.shape[1] * rows.itemsize
    keys = checksum_keys(row_bytes)
    if cpu_library.row_checksums:
        return cpu_library.row_checksums(rows, keys)
    checksums = np.empty(len(rows), np.uint64)
    wide_keys = keys.astype(np.uint64)
    padding = len(keys) * _WORD_BYTES - row_bytes
    for first in range(0, len(rows), _ROWS_AT_A_TIME):
        part = rows[first : first + _ROWS_AT_A_TIME]
        row_text = part.view(np.uint8).reshape(len(part), row_bytes)
        words = np.pad(row_text, ((0, 0), (0, padding))).view("<u4").astype(np.uint64)
        checksums[first : first + len(part)] = (words * wide_keys).sum(axis=1, dtype=np.uint64)
    return checksums
