"""Write a safetensors file in one pass: each tensor is streamed and hashed at once, without a second copy in memory.

How: the format is that of the safetensors library (8-byte little-endian header length, JSON header, raw little-endian
data), which can read the files. The library's own writer is not used, because it copies the tensors, and because the
file would have to be read again to compute the digests.

A tensor of more than `PIECE` elements is stored in pieces, each with its own digest. A digest can only be checked over
the whole range that it covers. With pieces, a rank that needs a part of a tensor reads and hashes little more than
that part.

If the manifest does not list the tensors (format 3), the header of the file also holds their digests, under the key
`sha256` of its `__metadata__`: one string with the 64 hexadecimal digits of each tensor, in the order of the tensors.
The header is first written with zeros in place of the digests, and overwritten when they are known.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import torch

from electra_dist.checkpoint.checkpoint_manifest import FileEntry, Kind, TensorEntry
from electra_dist.store.atomic_files import create_file, sync_folder, writable

PIECE = 1 << 22  # elements of fp32: 16 MiB
_LENGTH_BYTES = 8  # of the number that precedes the JSON of a header
_NO_DIGEST = "0" * 64  # placeholder for a digest that is not known yet
_CHUNK_BYTES = 1 << 20  # small enough to be hashed while it is still in the processor's cache


@dataclass(frozen=True, kw_only=True)
class Fragment:
    """A range of one parameter that a rank holds: elements [start, start + numel) of the flattened parameter.
    The views share memory with the tensors of, for example, the training state.
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


def write_tensor_file(path: Path, tensors: Sequence[Tensor], *, digests_in_header: bool = False) -> FileEntry:
    """Write fp32 CPU tensors to a safetensors file in this order, sync it to the disk, and return its manifest entry.
    An existing file is overwritten in place: readers must not look at it before the checkpoint's manifest exists. With
    `digests_in_header` (format 3) the header holds the tensors' digests, too; the entry lists all tensors anyway.
    """
    pieces = [piece for tensor in tensors for piece in tensor.pieces()]
    header = _header(pieces, [_NO_DIGEST] * len(pieces) if digests_in_header else [])
    entries = []
    offset = len(header)  # at which the next piece begins in the file
    with writable(path):
        with create_file(path, "wb") as file:
            file.write(header)
            for piece in pieces:
                data = piece.values.numpy().data.cast("B")  # the bytes of the values, without a copy
                sha256 = _write_and_hash(file, data)
                entries.append(
                    TensorEntry(
                        kind=piece.kind,
                        name=piece.name,
                        start=piece.start,
                        numel=len(piece.values),
                        offset=offset,
                        sha256=sha256,
                    )
                )
                offset += len(data)
            if digests_in_header:
                header = _header(pieces, [entry.sha256 for entry in entries])
                file.seek(0)
                file.write(header)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(path.parent)
    return FileEntry(
        name=path.name,
        size_bytes=offset,
        header_bytes=len(header),
        header_sha256=hashlib.sha256(header).hexdigest(),
        tensors=tuple(entries),
    )


def parse_header(file: FileEntry, header: bytes) -> FileEntry:
    """Return a file's manifest entry with the tensors that the header lists. The caller has verified the header.
    Raises TornCheckpoint if header and tensors do not cover every byte of the file exactly once.
    """
    table = json.loads(header[_LENGTH_BYTES:])
    digests = table.pop("__metadata__")["sha256"]
    entries = []
    for number, (name, description) in enumerate(table.items()):
        kind, parameter, start = name.split("|")
        first_byte, _ = description["data_offsets"]  # counted from the end of the header
        sha256 = digests[number * len(_NO_DIGEST) : (number + 1) * len(_NO_DIGEST)]
        entries.append(
            TensorEntry(
                kind=cast(Kind, kind),
                name=parameter,
                start=int(start),
                numel=description["shape"][0],
                offset=file.header_bytes + first_byte,
                sha256=sha256,
            )
        )
    complete = file.model_copy(update={"tensors": tuple(entries)})
    complete.check_layout()
    return complete


def _write_and_hash(file: BinaryIO, data: memoryview) -> str:
    digest = hashlib.sha256()
    for begin in range(0, len(data), _CHUNK_BYTES):
        chunk = data[begin : begin + _CHUNK_BYTES]
        file.write(chunk)
        digest.update(chunk)
    return digest.hexdigest()


def _header(pieces: Sequence[Tensor], digests: Sequence[str]) -> bytes:
    """Return the header of a safetensors file that lists `pieces` as `KIND|PARAMETER|START`, and holds `digests`.
    The JSON is padded to a multiple of 8 bytes, as the format asks, so that the data after it are aligned.
    """
    table: dict[str, object] = {"__metadata__": {"sha256": "".join(digests)}} if digests else {}
    offset = 0  # of a tensor's data, counted from the end of the header
    for piece in pieces:
        assert piece.values.dtype == torch.float32
        assert piece.values.is_contiguous()
        assert piece.values.device.type == "cpu"
        end = offset + 4 * len(piece.values)
        name = f"{piece.kind}|{piece.name}|{piece.start}"
        table[name] = {"dtype": "F32", "shape": [len(piece.values)], "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(table, separators=(",", ":")).encode()
    num_spaces = -len(text) % 8  # up to the next multiple of 8
    text += b" " * num_spaces
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text
