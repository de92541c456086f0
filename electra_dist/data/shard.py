"""A shard: a WebDataset tar whose members `NNNNNN.rows.npy` hold blocks of rows; written once, read by mmap.

Guarantee: equal rows and block size give equal bytes, whoever writes them and when. The reader takes any tar with such
members, webdataset's own TarWriter and ShardWriter included, in the order in which they stand in the tar; members with
other endings are left alone. Nothing is unpacked to disk, no pickle is ever read.

How: an uncompressed tar keeps each member whole at a known offset, and an .npy file is a short header and the array,
so a row is a slice of the mapping. All rows lie on one lattice of offsets, whose step is the greatest common divisor
of their distances: one strided view of the mapping has every row as a line, and rows are had by one indexing of it.

Cost: opening reads one header a block (about 0.3 ms for 16 blocks); a row costs one copy of its own bytes.

Where it stops: compressed tars cannot be mapped and are refused.
"""

from __future__ import annotations

import fcntl
import io
import math
import mmap
import os
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from electra_kernels.native import host
from numpy.typing import NDArray

from electra_dist.errors import ManifestMismatch
from electra_dist.store.files import readable
from electra_dist.store.interface import check_key

MEMBER_SUFFIX = ".rows.npy"


def write_shard(target: Path | IO[bytes], rows: NDArray[Any], block_rows: int) -> None:
    """Write rows as a shard.

    Args:
        target: path or binary stream.
        rows: [n, seq_len] uint16 or uint32, n > 0.
        block_rows: rows per member; the last may have fewer.
    """
    assert rows.ndim == 2
    assert len(rows) > 0
    assert rows.dtype in (np.uint16, np.uint32)
    assert block_rows > 0
    if isinstance(target, Path):
        with target.open("wb") as stream:
            write_shard(stream, rows, block_rows)
        return
    with tarfile.open(fileobj=target, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for number, first in enumerate(range(0, len(rows), block_rows)):
            member = io.BytesIO()
            block = np.ascontiguousarray(rows[first : first + block_rows], dtype=rows.dtype.newbyteorder("<"))
            np.lib.format.write_array(member, block, version=(1, 0), allow_pickle=False)
            info = tarfile.TarInfo(f"{number:06d}{MEMBER_SUFFIX}")  # mtime, uid, gid 0 and mode 0644 by default
            info.size = member.tell()
            member.seek(0)
            tar.addfile(info, member)


class Shard:
    """A mapped shard."""

    def __init__(self, path: Path, seq_len: int, dtype: np.dtype[Any], *, lock: bool = False) -> None:
        """Map `path`.

        Args:
            lock: hold a shared flock on the file while it is open, by which a cache knows that it is in use.

        Raises:
            ManifestMismatch: not such a tar, or rows of another length or type.
            StoreError: missing or unreadable.
        """
        self.path = path
        self.kind = (seq_len, dtype.newbyteorder("<"))
        with readable(path), path.open("rb") as stream:
            if lock:
                fcntl.flock(stream, fcntl.LOCK_SH)
            self.is_linked = os.fstat(stream.fileno()).st_nlink > 0  # not evicted between opening and locking
            try:
                self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)  # its own descriptor keeps the lock
                blocks = self._index(stream)
            except (tarfile.TarError, ValueError) as error:
                raise self._mismatch(f"not a tar of *{MEMBER_SUFFIX} blocks ({error})") from None
        if not blocks:
            raise self._mismatch(f"has no *{MEMBER_SUFFIX} member")
        self._offsets, lengths = np.ascontiguousarray(np.array(blocks, np.int64).T)
        self._starts = np.concatenate([[0], np.cumsum(lengths)])
        self.num_rows = int(self._starts[-1])
        self._lines, self._first_line, self._row_lines = self._lattice(self._offsets, lengths)
        # For `host.gather_rows`: address of the mapping, number of blocks, addresses of where each
        # block begins, in rows and in bytes. Good until `close`.
        address = self._lines.ctypes.data - int(self._offsets.min())
        self.table = (address, len(self._offsets), self._starts.ctypes.data, self._offsets.ctypes.data)

    def rows(self, indices: NDArray[np.int64]) -> NDArray[Any]:
        """Copies of rows, [k, seq_len], in the order of `indices`, each in [0, num_rows)."""
        blocks = np.searchsorted(self._starts, indices, side="right") - 1
        return self._lines[self._first_line[blocks] + (indices - self._starts[blocks]) * self._row_lines]

    def close(self) -> None:
        """Unmap, and let go of the lock."""
        del self._lines
        self._map.close()

    def _lattice(
        self, offsets: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> tuple[NDArray[Any], NDArray[np.int64], int]:
        """The strided view, the line of each block's first row, and lines from a row to the next."""
        seq_len, dtype = self.kind
        row_bytes, first = seq_len * dtype.itemsize, int(offsets.min())
        step = math.gcd(row_bytes, *(offsets - first).tolist())
        first_line, row_lines = (offsets - first) // step, row_bytes // step
        num_lines = int((first_line + np.maximum(lengths - 1, 0) * row_lines).max()) + 1
        lines: NDArray[Any] = np.ndarray((num_lines, seq_len), dtype, self._map, first, (step, dtype.itemsize))
        return lines, first_line, row_lines

    def _index(self, stream: IO[bytes]) -> list[tuple[int, int]]:
        blocks = []
        with tarfile.open(fileobj=stream, mode="r:") as tar:
            for member in tar:
                check_key(member.name.removeprefix("./").rstrip("/"))
                if member.isreg() and member.name.endswith(MEMBER_SUFFIX):
                    blocks.append(self._block(member))
        return blocks

    def _block(self, member: tarfile.TarInfo) -> tuple[int, int]:
        """Where its first row is, and how many it has."""
        end = member.offset_data + member.size
        if end > len(self._map) or member.issparse():
            raise ValueError(f"{member.name} is cut short")
        head = io.BytesIO(self._map[member.offset_data : min(end, member.offset_data + 4096)])
        version = np.lib.format.read_magic(head)
        read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        if version not in read_header:
            raise ValueError(f"{member.name}: .npy version {version}")
        shape, fortran, dtype = read_header[version](head)
        seq_len, row_dtype = self.kind
        if len(shape) != 2 or shape[1] != seq_len or dtype != row_dtype or fortran:
            raise self._mismatch(f"{member.name} holds {dtype} {shape}, not {row_dtype} [rows, {seq_len}]")
        if head.tell() + shape[0] * seq_len * dtype.itemsize != member.size:
            raise ValueError(f"{member.name}: length and header disagree")
        return member.offset_data + head.tell(), shape[0]

    def _mismatch(self, reason: str) -> ManifestMismatch:
        return ManifestMismatch(f"{self.path}: {reason}; build this shard again")


def rows_of(shards: Sequence[Shard], which: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[Any]:
    """Copies of rows of several shards of one kind, [k, seq_len].

    Args:
        which: [k], the place in `shards` of each row's shard.
        rows: [k], each row's number within its shard.
    """
    seq_len, dtype = shards[0].kind
    out = np.empty((len(rows), seq_len), dtype)
    if host.gather_rows:
        host.gather_rows([shard.table for shard in shards], which, rows, out)
        return out
    for place, shard in enumerate(shards):
        chosen = np.flatnonzero(which == place)
        out[chosen] = shard.rows(rows[chosen])
    return out
