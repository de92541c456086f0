"""Make safetensors files whose headers hold the digests of their tensors, without a second copy in memory.

Guarantee: equal tensors give equal files.

How: the format is that of the safetensors library (8-byte little-endian header length, JSON header, raw little-endian
data), which can read the files. The library's own writer is not used, because it copies the tensors, and because the
name of the file, with the digest of the header, must be known before the file is written. Under the key `sha256` of
its `__metadata__`, the header holds the tensors' digests: one string with 64 hexadecimal digits for each tensor, in
their order.

A tensor of more than `PIECE` elements is stored in pieces, each with its own digest. A digest can only be checked over
the whole range that it covers. With pieces, a rank that needs a part of a tensor reads and hashes little more than
that part.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from electra_dist.checkpoint.manifest import LENGTH_BYTES, FileEntry, Kind

PIECE = 1 << 22  # elements of fp32: 16 MiB


@dataclass(frozen=True, kw_only=True)
class Fragment:
    """A range of one parameter that a rank holds: elements [start, start + numel) of the flattened parameter.
    Its weights and optimizer moments are views, which share memory with the tensors of the training state.
    """

    name: str  # of the parameter
    start: int  # first element, counted in the flattened parameter
    numel: int  # number of elements
    views: dict[Kind, torch.Tensor]  # kind -> writable 1-D fp32 view of `numel` elements


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """Values to write to a tensor file: consecutive elements of a flattened parameter, or of one of its moments."""

    kind: Kind  # master weight, or first or second moment of the optimizer
    name: str  # of the parameter
    start: int  # element of the parameter at which `values` begins
    values: torch.Tensor  # 1-D, fp32, contiguous, on the CPU

    def pieces(self) -> list[Tensor]:
        """Cut the tensor into pieces of at most `PIECE` elements, in order, which share its memory."""
        return [
            Tensor(kind=self.kind, name=self.name, start=self.start + begin, values=self.values[begin : begin + PIECE])
            for begin in range(0, len(self.values), PIECE)
        ]


class TensorFile:
    """A rank's tensor file, ready to be written: a header with the digests of `tensors`, then these in their order."""

    def __init__(self, rank: int, tensors: Sequence[Tensor]) -> None:
        """Compute the digests; the tensors must not change before the file is stored."""
        self._pieces = [piece for tensor in tensors for piece in tensor.pieces()]
        self.header = _header(self._pieces)
        self.entry = FileEntry(
            rank=rank,
            size_bytes=len(self.header) + sum(4 * len(piece.values) for piece in self._pieces),
            header_bytes=len(self.header),
            header_sha256=hashlib.sha256(self.header).hexdigest(),
        )

    @property
    def pieces(self) -> list[bytes | memoryview]:
        """Return the bytes of the file in pieces, in their order: the header, and the memory of the tensors."""
        return [self.header, *map(_bytes_of, self._pieces)]


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor's values, without a copy."""
    assert tensor.values.dtype == torch.float32
    assert tensor.values.is_contiguous()
    assert tensor.values.device.type == "cpu"
    return tensor.values.numpy().data.cast("B")


def _header(pieces: Sequence[Tensor]) -> bytes:
    """Return the header of a safetensors file that lists `pieces` as `KIND|PARAMETER|START`, with their digests.
    The JSON is padded to a multiple of 8 bytes, as the format asks, so that the data after it are aligned.
    """
    digests = "".join(hashlib.sha256(_bytes_of(piece)).hexdigest() for piece in pieces)
    table: dict[str, object] = {"__metadata__": {"sha256": digests}}
    offset = 0  # of a tensor's data, counted from the end of the header
    for piece in pieces:
        end = offset + 4 * len(piece.values)
        name = f"{piece.kind}|{piece.name}|{piece.start}"
        table[name] = {"dtype": "F32", "shape": [len(piece.values)], "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(table, separators=(",", ":")).encode()
    num_spaces = -len(text) % 8  # up to the next multiple of 8
    text += b" " * num_spaces
    return len(text).to_bytes(LENGTH_BYTES, "little") + text
