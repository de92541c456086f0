"""Compute a checksum of each row of a shard, by which every copy of a row is verified when it is used.

The checksum of a row is the sum, modulo 2**64, of its 32-bit words times their keys. The keys are fixed odd numbers of
32 bits, one for each word of the row.

Guarantee: if one word of a row changes, in any of its bits, or if two different words of a row are exchanged, the
checksum of the row always changes. Other damage is missed with a probability of about 2**-64.

Limits: a checksum reveals damage, not forgery.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from electra_kernels.native import cpu_library
from numpy.typing import NDArray

from electra_dist.data.row_receipt import row_hash

Checksums = NDArray[np.uint64]
_WORD_BYTES = 4
_ROWS_AT_A_TIME = 1024  # Rows for which NumPy holds the products at once.


@functools.cache
def checksum_keys(row_bytes: int) -> NDArray[np.uint32]:
    """Return the factors for the checksum of a row of `row_bytes` bytes: an odd uint32 for each word of 4 bytes."""
    # They are the upper halves of the hashes of 0, 1, 2, ..., with the lowest bit set. If `row_bytes` is not a
    # multiple of 4, the remaining bytes, padded with zeros, are one more word.
    num_words = -(-row_bytes // _WORD_BYTES)
    upper_halves = row_hash(np.arange(num_words)) >> np.uint64(32)
    return (upper_halves | np.uint64(1)).astype(np.uint32)


def row_checksums(rows: NDArray[Any]) -> Checksums:
    """Return the checksum of each row, uint64 [k]; `rows` are contiguous little-endian integers [k, seq_len]."""
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
