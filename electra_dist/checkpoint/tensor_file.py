"""A safetensors file written in one pass: streamed, hashed while it is written, no second copy in memory.

The format is the safetensors library's (8-byte little-endian header length, JSON header, raw little-endian data), and
that library reads what is written here; its own writer copies the tensors, and the file would be read again to hash.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

_CHUNK_BYTES = 1 << 24


def write_tensor_file(path: Path, tensors: Mapping[str, torch.Tensor]) -> tuple[int, str]:
    """Write contiguous fp32 CPU tensors; fsync. Returns (size in bytes, sha256)."""
    header: dict[str, object] = {}
    offset = 0
    for name, tensor in tensors.items():
        assert tensor.dtype == torch.float32 and tensor.is_contiguous() and tensor.device.type == "cpu"
        end = offset + tensor.numel() * 4
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # keeps the data 8-byte aligned, as the format asks
    digest = hashlib.sha256()
    size = 0
    with path.open("wb") as file:
        for block in _blocks(len(text).to_bytes(8, "little") + text, tensors):
            file.write(block)
            digest.update(block)
            size += len(block)
        file.flush()
        os.fsync(file.fileno())
    return size, digest.hexdigest()


def _blocks(head: bytes, tensors: Mapping[str, torch.Tensor]) -> Iterator[memoryview]:
    yield memoryview(head)
    for tensor in tensors.values():
        view = memoryview(tensor.detach().numpy().data).cast("B") if tensor.numel() else memoryview(b"")
        for start in range(0, len(view), _CHUNK_BYTES):
            yield view[start : start + _CHUNK_BYTES]
