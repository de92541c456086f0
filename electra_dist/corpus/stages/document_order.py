"""Give every document of a corpus its place in a keyed shuffle of all documents of all sources.

Guarantee: the order depends on the seed, the position of a document's file among the inputs, and the document's number
in its file. It is a uniformly random order for the purposes of training: every stretch of the corpus has each source's
share up to sampling error.

How: a document's key is a 64-bit hash; documents are ordered by it. The range of keys is divided into `NUM_CELLS`
cells. A bucket is a range of cells; one worker turns it into shards. If a document is used several times
(`corpus.source_epochs`), each copy has a key of its own. The cell of a copy follows from the cell of the document's
key (`copy_key`), so a worker knows in which cells it finds the documents whose copies belong to its bucket.
"""

from __future__ import annotations

import struct
from hashlib import blake2b

NUM_CELLS = 4096
_CELL_SHIFT = 52  # the cell of a 64-bit key is its upper 12 bits
_LOW_BITS = (1 << _CELL_SHIFT) - 1
_CELLS_PER_COPY = 2531  # odd, so that the first 4,096 copies of a document lie in different cells
_PAIR = struct.Struct("<QQ")


def document_key(order_seed: int, file: int, number: int) -> int:
    """Return the shuffle key, in [0, 2**64), of document `number` in file `file`, from 0; `order_seed` has 63 bits."""
    digest = blake2b(_PAIR.pack(file, number), digest_size=8, key=order_seed.to_bytes(8, "little")).digest()
    return int.from_bytes(digest, "little")


def chunk_seed(seed: int, bucket: int, chunk: int, stream: int) -> int:
    """Return the seed, in [0, 2**63), of a chunk's random draws; `stream` 0 is for training, 1 for held-out rows."""
    digest = blake2b(struct.pack("<QQQQ", seed, bucket, chunk, stream), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def cell_of(key: int) -> int:
    """Return the cell of a shuffle key, in [0, NUM_CELLS): its upper 12 bits, so a cell is a range of keys."""
    return key >> _CELL_SHIFT


def copy_key(key: int, copy: int) -> int:
    """Return the shuffle key of a document's copy number `copy`; copy 0 has the document's own key, `key`."""
    if copy == 0:
        return key
    cell = (cell_of(key) + copy * _CELLS_PER_COPY) % NUM_CELLS
    low = int.from_bytes(blake2b(_PAIR.pack(key, copy), digest_size=8).digest(), "little") & _LOW_BITS
    return (cell << _CELL_SHIFT) | low


def cell_of_original(cell: int, copy: int) -> int:
    """Return the cell of the documents whose copy number `copy` lies in `cell`; this inverts `copy_key`."""
    return (cell - copy * _CELLS_PER_COPY) % NUM_CELLS


def num_copies(key: int, epochs: float) -> int:
    """Return how often a document is used: `epochs` rounded up or down by a hash of its key, with mean `epochs`."""
    whole = int(epochs)
    threshold = int((epochs - whole) * 2**64)
    draw = int.from_bytes(blake2b(key.to_bytes(8, "little"), digest_size=8, person=b"copies").digest(), "little")
    return whole + 1 if draw < threshold else whole


def cells_of_bucket(bucket: int, num_buckets: int) -> range:
    """Return the cells (ranges of shuffle keys) of a bucket; all buckets, in order, have nearly equally many cells."""
    return range(bucket * NUM_CELLS // num_buckets, (bucket + 1) * NUM_CELLS // num_buckets)
