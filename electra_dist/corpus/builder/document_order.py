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
from collections.abc import Collection, Mapping
from hashlib import blake2b

from electra_dist.errors import UserError

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


def source_epochs(
    source_bytes: Mapping[str, int], given_epochs: Mapping[str, float], given_shares: Mapping[str, float]
) -> dict[str, float]:
    """Return how often the documents of each source are used, on average: source -> epochs.

    A source that is not in `given_epochs` is used once. `given_shares` is empty, or has for each source a share of the
    corpus's bytes; only the ratios of the shares matter. The source with the largest share for its size in undecoded
    bytes is then used once and no source more often, so that no document repeats.
    """
    refuse_unknown_sources("corpus.source_epochs", given_epochs, source_bytes)
    refuse_unknown_sources("corpus.source_shares", given_shares, source_bytes)
    if not given_shares:
        return {source: float(given_epochs.get(source, 1.0)) for source in source_bytes}
    missing = sorted(set(source_bytes) - set(given_shares))
    if missing:
        raise UserError(
            f"corpus.source_shares: no share for the source {missing[0]}; add one (0 leaves the source out)"
        )
    ratios = {source: given_shares[source] / max(num_bytes, 1) for source, num_bytes in source_bytes.items()}
    largest = max(ratios.values())
    if largest == 0:
        raise UserError("corpus.source_shares: all shares are 0; give at least one source a share")
    return {source: ratio / largest for source, ratio in ratios.items()}


def refuse_unknown_sources(key: str, given: Collection[str], sources: Collection[str]) -> None:
    """Raise UserError if the config's `key` (such as corpus.licences) names a source that the inputs do not have."""
    unknown = sorted(set(given) - set(sources))
    if unknown:
        all_sources = ", ".join(sorted(sources))
        raise UserError(f"{key}: {unknown[0]} is not a source of these inputs; use one of {all_sources}")
