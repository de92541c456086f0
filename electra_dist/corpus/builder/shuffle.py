"""Shuffle the documents of all sources: a key gives each its place, and spill files bring it there.

Guarantee: the order depends on the seed, the position of a document's file among the inputs, and the document's number
in its file. It is a uniformly random order for the purposes of training: every stretch of the corpus has each source's
share up to sampling error.

How: a document's key is a 64-bit hash; documents are ordered by it. The range of keys is divided into `NUM_CELLS`
cells. A bucket is a range of cells; one worker turns it into shards. If a document is used several times
(`corpus.source_epochs`), each copy has a key of its own. The cell of a copy follows from the cell of the document's
key (`copy_key`), so a worker knows in which cells it finds the documents whose copies belong to its bucket.

A spill file holds the documents of some input files, sorted by their keys, on their way from the order of the inputs
to that of the corpus. It is an object of the corpus's store: a table of `NUM_CELLS + 1` offsets (uint64), then the
documents of each cell as one zstd frame. A reader fetches the table once and then only the cells that it needs. Spill
files take a third to a half of the text's bytes; they are deleted when the corpus is finished.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from hashlib import blake2b

import numpy as np
import zstandard
from numpy.typing import NDArray

from electra_dist.corpus.inputs.text_decoding import RawDocument
from electra_dist.errors import ManifestMismatch, UserError
from electra_dist.store.interface import Store, in_parallel

NUM_CELLS = 4096
_CELL_SHIFT = 52  # the cell of a 64-bit key is its upper 12 bits
_LOW_BITS = (1 << _CELL_SHIFT) - 1
_CELLS_PER_COPY = 2531  # odd, so that the first 4,096 copies of a document lie in different cells
_PAIR = struct.Struct("<QQ")
SPILLS_FOLDER = "progress/spills/"
_TABLE_BYTES = (NUM_CELLS + 1) * 8
_HEAD = struct.Struct("<QIQqB")  # key, file, number, bytes of the data (-1: no text), flags
_IS_JSON = 1  # flag: the data is a JSON line
_HAS_ID = 2  # flag: the data is followed by the id of the document
_ID_LENGTH = struct.Struct("<I")  # length of the id in bytes; the id follows
_LARGEST_CELL = 1 << 32  # most bytes of a decompressed cell, so that a damaged size does not allocate memory
_LEVEL = 1  # of zstd: the fastest; the files live for minutes to hours


def document_key(order_seed: int, file: int, number: int) -> int:
    """Return a document's shuffle key, a 64-bit hash: the documents of a corpus are in the order of their keys.

    `file` is the position of its file among the inputs, `number` its position in the file, both from 0. `order_seed`
    has 63 bits.
    """
    digest = blake2b(_PAIR.pack(file, number), digest_size=8, key=order_seed.to_bytes(8, "little")).digest()
    return int.from_bytes(digest, "little")


def chunk_seed(seed: int, bucket: int, chunk: int, stream: int) -> int:
    """Return the seed, of 63 bits, for the random draws in a chunk: some MB of consecutive documents in a bucket.

    A chunk has two streams of draws: `stream` 0 is for training examples, 1 for held-out ones.
    """
    digest = blake2b(struct.pack("<QQQQ", seed, bucket, chunk, stream), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def cell_of(key: int) -> int:
    """Return the cell of a document: its shuffle key's upper 12 bits, which divide all keys into 4,096 ranges."""
    return key >> _CELL_SHIFT


def copy_key(key: int, copy: int) -> int:
    """Return the shuffle key of one copy of a document that a corpus uses several times; copy 0 keeps `key`."""
    if copy == 0:
        return key
    cell = (cell_of(key) + copy * _CELLS_PER_COPY) % NUM_CELLS
    low = int.from_bytes(blake2b(_PAIR.pack(key, copy), digest_size=8).digest(), "little") & _LOW_BITS
    return (cell << _CELL_SHIFT) | low


def cell_of_original(cell: int, copy: int) -> int:
    """Return the cell (range of shuffle keys) of those documents whose copy number `copy` belongs to `cell`."""
    return (cell - copy * _CELLS_PER_COPY) % NUM_CELLS


def num_copies(key: int, epochs: float) -> int:
    """Return how often a corpus uses a document: `epochs` rounded up or down at random, with mean `epochs`.

    A hash of the document's `key` takes the place of the random draw.
    """
    whole = int(epochs)
    threshold = int((epochs - whole) * 2**64)
    draw = int.from_bytes(blake2b(key.to_bytes(8, "little"), digest_size=8, person=b"copies").digest(), "little")
    return whole + 1 if draw < threshold else whole


def cells_of_bucket(bucket: int, num_buckets: int) -> range:
    """Return the cells (1/4096 of the shuffled documents each) of a bucket, which becomes shards as one task.

    The buckets, in order, divide all cells among them as evenly as possible.
    """
    return range(bucket * NUM_CELLS // num_buckets, (bucket + 1) * NUM_CELLS // num_buckets)


def source_epochs(
    source_bytes: Mapping[str, int], given_epochs: Mapping[str, float], given_shares: Mapping[str, float]
) -> dict[str, float]:
    """Return how often the documents of each source are used, on average: source -> epochs.

    A source that is not in `given_epochs` is used once. `given_shares` is empty, or has for each source a share of the
    corpus's bytes; only the ratios of the shares matter. The source with the largest share for its size in undecoded
    bytes is then used once and no source more often, so that no document repeats. Raises UserError for an unknown or
    missing source, or if all shares are 0.
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


def write_spill(store: Store, name: str, documents: list[RawDocument]) -> int:
    """Write documents to an intermediate (spill) file in the order of their shuffle keys; return its size in bytes.

    Sorts `documents` in place. Their `fields` are not written.
    """
    documents.sort(key=lambda document: document.place)
    compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
    cells: list[list[bytes]] = [[] for _ in range(NUM_CELLS)]
    for document in documents:
        cells[cell_of(document.key)] += _pack_document(document)
    frames = [compressor.compress(b"".join(cell)) if cell else b"" for cell in cells]
    offsets = np.zeros(NUM_CELLS + 1, np.uint64)
    offsets[1:] = np.cumsum([len(frame) for frame in frames])
    offsets += np.uint64(_TABLE_BYTES)
    content = b"".join([offsets.astype("<u8").tobytes(), *frames])
    store.write(name, content)
    return len(content)


def _pack_document(document: RawDocument) -> list[bytes]:
    """Return a document without its `fields` as pieces of bytes, which `_split_documents` reads."""
    length = -1 if document.data is None else len(document.data)
    flags = _IS_JSON if document.is_json else 0
    packed_id = b""
    if document.id is not None:
        flags |= _HAS_ID
        id_bytes = document.id.encode()
        packed_id = _ID_LENGTH.pack(len(id_bytes)) + id_bytes
    head = _HEAD.pack(document.key, document.file, document.number, length, flags)
    return [head, document.data or b"", packed_id]


class SpillFile:
    """Reader of a spill file: documents on their way from the inputs to the shuffled corpus, sorted by shuffle key.

    The table of offsets at the beginning of the file is kept in memory.
    """

    def __init__(self, store: Store, name: str, size: int) -> None:
        """Read the table of offsets of a file of `size` bytes; raise ManifestMismatch if the file is cut off."""
        self._store = store
        self._name = name
        self._size = size
        self._offsets = store.verified(name, self._read_table)

    @property
    def is_remote(self) -> bool:
        """Return whether the file is on S3 or the like, where each reading is a request."""
        return self._store.local_path(self._name) is None

    def _read_table(self) -> NDArray[np.int64]:
        table = self._store.read_range(self._name, 0, _TABLE_BYTES)
        if len(table) != _TABLE_BYTES:
            raise self._damaged()
        offsets = np.frombuffer(table, "<u8").astype(np.int64)
        is_rising = offsets[0] == _TABLE_BYTES and (np.diff(offsets) >= 0).all()
        if not is_rising or offsets[-1] != self._size:
            raise self._damaged()
        return offsets

    def documents(self, cells: range) -> Iterator[RawDocument]:
        """Yield the documents of consecutive cells (1/4096 of all shuffle keys each), in the order of their keys.
        Raises ManifestMismatch for a damaged file.
        """
        if cells and self._offsets[cells.stop] > self._offsets[cells.start]:
            for data in self._store.verified(self._name, lambda: self._read_cells(cells)):
                yield from _split_documents(data)

    def _read_cells(self, cells: range) -> list[bytes]:
        """Return the decompressed documents of each cell that has any, as bytes for `_split_documents`."""
        start = int(self._offsets[cells.start])
        length = int(self._offsets[cells.stop]) - start
        content = self._store.read_range(self._name, start, length)
        if len(content) != length:
            raise self._damaged()
        decompressor = zstandard.ZstdDecompressor()
        decompressed = []
        for cell in cells:
            first = int(self._offsets[cell]) - start
            end = int(self._offsets[cell + 1]) - start
            if first == end:
                continue  # a cell without documents
            frame = content[first:end]
            try:
                if zstandard.frame_content_size(frame) > _LARGEST_CELL:
                    raise self._damaged()
                decompressed.append(decompressor.decompress(frame))
            except zstandard.ZstdError:
                raise self._damaged() from None
        return decompressed

    def _damaged(self) -> ManifestMismatch:
        return ManifestMismatch(
            f"{self._store.url}/{self._name}: damaged (an intermediate file of the build); delete this folder's "
            "progress/ and start the build again"
        )


def open_spills(store: Store, names: Sequence[str]) -> list[SpillFile]:
    """Open spill files (shuffled documents between two stages of a build), whose keys in `store` are `names`.

    Their sizes come from one listing, and their tables of offsets are read in parallel.
    """
    sizes = store.sizes(SPILLS_FOLDER)
    return in_parallel(lambda name: SpillFile(store, name, sizes.get(name, 0)), names)


def documents_of_spills(spills: Sequence[SpillFile], cells: range) -> Iterator[RawDocument]:
    """Yield the documents of some cells (ranges of shuffle keys) from several spill files, one file after another.

    Files on S3 are read in parallel, and their documents held in memory.
    """
    if spills and spills[0].is_remote:
        for documents in in_parallel(lambda spill: list(spill.documents(cells)), spills):
            yield from documents
    else:
        for spill in spills:
            yield from spill.documents(cells)


def _split_documents(data: bytes) -> Iterator[RawDocument]:
    """Yield the documents of a decompressed cell, as `_pack_document` has packed them one after another."""
    position = 0
    while position < len(data):
        key, file, number, length, flags = _HEAD.unpack_from(data, position)
        position += _HEAD.size
        if length < 0:
            text = None
        else:
            text = data[position : position + length]
            position += length
        document_id = None
        if flags & _HAS_ID:
            [id_length] = _ID_LENGTH.unpack_from(data, position)
            position += _ID_LENGTH.size
            document_id = data[position : position + id_length].decode()
            position += id_length
        yield RawDocument(text, bool(flags & _IS_JSON), document_id, None, file, number, key)
