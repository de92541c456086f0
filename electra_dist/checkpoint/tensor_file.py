"""A safetensors file written in one pass: streamed, each tensor hashed while it is written, no second copy in memory.

The format is the safetensors library's (8-byte little-endian header length, JSON header, raw little-endian data), and
that library reads what is written here; its own writer copies the tensors, and the file would be read again to hash.

Cost: a tensor of more than `PIECE` elements is cut, so that a rank that needs a part of it and must hash all that it
reads does not read much more than it needs.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from electra_dist.checkpoint.manifest import FileEntry, Kind, TensorEntry
from electra_dist.store.files import make_folder, sync_folder, writable

PIECE = 1 << 22  # elements: 16 MiB
_CHUNK_BYTES = 1 << 20  # written and hashed while it is in the processor's cache


@dataclass(frozen=True, kw_only=True)
class Fragment:
    """Elements [start, start + numel) of the flattened parameter `name`, as this rank holds them."""

    name: str
    start: int
    numel: int
    views: dict[Kind, torch.Tensor]  # kind -> writable 1-D fp32 view of `numel` elements


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """A 1-D fp32 CPU tensor to write: elements of one kind of a parameter from `start` on."""

    kind: Kind
    name: str
    start: int
    values: torch.Tensor

    def pieces(self) -> list[Tensor]:
        """Itself, cut to at most PIECE elements."""
        return [
            Tensor(kind=self.kind, name=self.name, start=self.start + at, values=self.values[at : at + PIECE])
            for at in range(0, len(self.values), PIECE)
        ]


def write_tensor_file(path: Path, tensors: Sequence[Tensor]) -> FileEntry:
    """Write, sync, and describe for the manifest.

    Raises:
        StoreError: the disk is full or refuses the write.
    """
    pieces = [piece for tensor in tensors for piece in tensor.pieces()]
    head = _header(pieces)
    entries, offset = [], len(head)
    with writable(path):
        make_folder(path.parent)
        with path.open("wb") as file:
            file.write(head)
            for piece in pieces:
                digest = hashlib.sha256()
                data = piece.values.numpy().data.cast("B")
                for at in range(0, len(data), _CHUNK_BYTES):
                    file.write(data[at : at + _CHUNK_BYTES])
                    digest.update(data[at : at + _CHUNK_BYTES])
                entries.append(
                    TensorEntry(
                        kind=piece.kind,
                        name=piece.name,
                        start=piece.start,
                        numel=len(piece.values),
                        offset=offset,
                        sha256=digest.hexdigest(),
                    )
                )
                offset += len(data)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(path.parent)
    return FileEntry(
        name=path.name,
        size_bytes=offset,
        header_bytes=len(head),
        header_sha256=hashlib.sha256(head).hexdigest(),
        tensors=tuple(entries),
    )


def _header(pieces: Sequence[Tensor]) -> bytes:
    table: dict[str, object] = {}
    offset = 0
    for piece in pieces:
        assert (
            piece.values.dtype == torch.float32 and piece.values.is_contiguous() and piece.values.device.type == "cpu"
        )
        end = offset + 4 * len(piece.values)
        name = f"{piece.kind}|{piece.name}|{piece.start}"
        table[name] = {"dtype": "F32", "shape": [len(piece.values)], "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # keeps the data 8-byte aligned, as the format asks
    return len(text).to_bytes(8, "little") + text
