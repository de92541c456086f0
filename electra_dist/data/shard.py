"""Write and read shards; a shard is a WebDataset tar with blocks of rows in `NNNNNN.rows.npy` members.

A row is a training sequence of token ids; each member is a NumPy array of rows, called a block.

Guarantee: equal rows are written as equal bytes. Every tar with these members can be read, also those of webdataset's
TarWriter and ShardWriter. The members are taken in their order in the tar, and members with other endings are ignored.
Nothing is unpacked to disk, no pickle is ever read, and no memory is allocated for what a damaged header announces. A
tar that is opened with `CheckedTarInfo` ends with an error at a member of a negative size; without it, reading such a
tar with the versions of Python before 3.11.14 and 3.13.6 never ends. Huge extended headers are an error, too.

How: an uncompressed tar holds each member in one piece at a known offset, and an .npy file is a short header followed
by the array, so a row is a slice of the memory-mapped file. The greatest common divisor of the distances between rows
is the stride of a NumPy view of the file. Every row is then one element of that view, and one indexing operation
copies any set of rows. A shard that is opened with `verify` verifies each copy of a row.

Limits: a compressed tar cannot be mapped and is refused.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import itertools
import math
import mmap
import os
import re
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from electra_kernels.native import cpu_library
from numpy.typing import NDArray

from electra_dist.data.receipt import Checksums, checksum_keys, row_checksums
from electra_dist.errors import ManifestMismatch, StoreMissing
from electra_dist.store.atomic_files import open_regular, readable
from electra_dist.store.interface import check_key

MEMBER_SUFFIX = ".rows.npy"
_EXTENDED_HEADERS = (
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
)
_MOST_EXTENDED_BYTES = 1 << 20  # of such a header, which is read as a whole
MAX_HEADER_BYTES = 4096  # The header of an .npy file must end within this many bytes.
_LENGTH_BYTES = {(1, 0): 2, (2, 0): 4}  # .npy version -> size in bytes of the field with the header's length
# Header in the form in which NumPy writes it. NumPy itself evaluates a header as Python. This module does not, because
# CPython 3.11 may then fail in threads at a good header (SystemError, "AST constructor recursion depth mismatch").
_HEADER = re.compile(
    r"\{'descr': '(?P<dtype>[<>|=][a-zA-Z][0-9]{0,3})', 'fortran_order': (?P<order>True|False), "
    r"'shape': \((?P<shape>(?:-?[0-9]{1,19}, ?)*(?:-?[0-9]{1,19})?)\),? ?\} *\n?"
)
_BYTES_AT_A_TIME = 1 << 18  # a whole shard is read in pieces of this size, which fit into the cache of a core


def write_shard(stream: IO[bytes], rows: NDArray[Any], block_rows: int) -> None:
    """Write rows of token ids as a shard: an uncompressed tar of .npy files with `block_rows` rows each.

    Equal `rows` ([n, seq_len] uint16 or uint32, n > 0) and `block_rows` give equal bytes, on any machine, at any time.
    """
    assert rows.ndim == 2
    assert len(rows) > 0
    assert rows.dtype in (np.uint16, np.uint32)
    assert block_rows > 0
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for block_number, first_row in enumerate(range(0, len(rows), block_rows)):
            _add_block(tar, block_number, rows[first_row : first_row + block_rows])


def _add_block(tar: tarfile.TarFile, block_number: int, rows: NDArray[Any]) -> None:
    little_endian_rows = np.ascontiguousarray(rows, dtype=rows.dtype.newbyteorder("<"))
    content = io.BytesIO()
    np.lib.format.write_array(content, little_endian_rows, version=(1, 0), allow_pickle=False)
    # TarInfo's defaults do not depend on time or user: mtime, uid and gid are 0, the mode is 0644.
    info = tarfile.TarInfo(f"{block_number:06d}{MEMBER_SUFFIX}")
    info.size = content.tell()
    content.seek(0)
    tar.addfile(info, content)


class CheckedTarInfo(tarfile.TarInfo):
    """Class for `tarfile.open(tarinfo=...)`: damaged or huge headers and negative sizes raise ReadError."""

    def _proc_member(self, tar: tarfile.TarFile) -> Any:
        if self.type in _EXTENDED_HEADERS and self.size > _MOST_EXTENDED_BYTES:
            raise tarfile.ReadError(f"an extended header of {self.size} bytes")
        try:
            return super()._proc_member(tar)  # type: ignore[misc]
        except RecursionError:  # one level for each extended header
            raise tarfile.ReadError("too many extended headers in a row") from None
        except (ArithmeticError, LookupError, ValueError) as error:  # what tarfile raises for some damages
            raise tarfile.ReadError(f"a damaged header ({type(error).__name__})") from None

    def _block(self, count: int) -> int:
        if count < 0:
            raise tarfile.ReadError(f"a member has a size of {count} bytes")
        return int(super()._block(count))  # type: ignore[misc]


def read_array_header(header: io.BytesIO) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read the header of an .npy file (version 1 or 2): shape, whether the array is in Fortran order, and dtype.

    `header` holds the first `MAX_HEADER_BYTES` bytes of the file, or more. Afterwards it is at the array's first byte.
    Raises ValueError if the header is damaged.
    """
    version = np.lib.format.read_magic(header)
    if version not in _LENGTH_BYTES:
        raise ValueError(f"it has .npy version {version}; only (1, 0) and (2, 0) can be read")
    num_bytes = int.from_bytes(header.read(_LENGTH_BYTES[version]), "little")
    if num_bytes > MAX_HEADER_BYTES:
        raise ValueError(f"its .npy header has {num_bytes} bytes; at most {MAX_HEADER_BYTES} are read")
    text = header.read(num_bytes).decode("latin1")
    match = _HEADER.fullmatch(text)
    if match is None or len(text) < num_bytes:
        raise ValueError("its .npy header is damaged")
    try:
        dtype = np.dtype(match["dtype"])
    except TypeError:
        raise ValueError(f"its .npy header has the type {match['dtype']}, which is unknown") from None
    shape = tuple(int(length) for length in match["shape"].split(",") if length.strip())
    if any(length < 0 for length in shape):
        raise ValueError(f"its .npy header has the shape {shape}")
    return shape, match["order"] == "True", dtype


def parse_array(data: bytes) -> NDArray[Any]:
    """Return the array in `data`, the content of an .npy file, as a read-only view.

    Raises ValueError unless `data` holds plain numbers in C order and has the size that its header states.
    """
    stream = io.BytesIO(data)
    shape, is_fortran_order, dtype = read_array_header(stream)
    if dtype.hasobject or is_fortran_order:
        raise ValueError(f"it holds {dtype}, not plain numbers in C order")
    num_bytes = math.prod(shape) * dtype.itemsize
    if stream.tell() + num_bytes != len(data):
        raise ValueError(f"it has {len(data)} bytes, which contradicts its header of shape {shape} and {dtype}")
    return np.frombuffer(data, dtype, math.prod(shape), stream.tell()).reshape(shape)


class _Block(NamedTuple):
    offset: int  # byte offset of the block's first row in the file
    num_rows: int


class ChangedRow(Exception):
    """Error for a row whose checksum differs from the one that it had when its shard was verified."""

    def __init__(self, shard_index: int, row: int) -> None:
        """Name the changed row: number `row` of the shard at place `shard_index` in the list that was being read."""
        super().__init__(f"row {row} of shard {shard_index} has changed")
        self.shard_index = shard_index
        self.row = row


class Shard:
    """Shard (file of corpus rows) that is open: a memory-mapped tar of .npy arrays. The caller must call `close`."""

    def __init__(
        self, path: Path, seq_len: int, dtype: np.dtype[Any], *, lock: bool = False, verify: bool = False
    ) -> None:
        """Map the file into memory; raise ManifestMismatch unless its rows have `seq_len` token ids of type `dtype`.

        With `lock`, a shared flock is held until `close`, so that no cache deletes the file; StoreMissing is raised if
        one has deleted it meanwhile. With `verify`, the whole file is read once: `sha256` is its digest, and each copy
        of a row is compared with the checksum that the row had then, so a right digest vouches for the copies, too.
        """
        self.path = path
        self.kind = (seq_len, dtype.newbyteorder("<"))  # tokens per row, and type of the token ids in the file
        self.sha256 = ""  # in hexadecimal; empty without `verify`
        self._checksums: Checksums | None = None
        with readable(path), open_regular(path) as stream:
            if lock:
                fcntl.flock(stream, fcntl.LOCK_SH)
                if os.fstat(stream.fileno()).st_nlink == 0:
                    raise StoreMissing(f"{path}: deleted while it was opened")
            # The map has a descriptor of its own, which keeps the lock after `stream` is closed.
            self._map = self._map_file(stream)
            try:
                blocks = self._find_blocks(stream)
                # Byte offset of each block's first row in the file.
                self._offsets = np.array([block.offset for block in blocks], np.int64)
                rows_per_block = np.array([block.num_rows for block in blocks], np.int64)
                # Number of each block's first row in the shard, and the number of all rows as the last element.
                self._block_starts = np.concatenate([[0], np.cumsum(rows_per_block)])
                self.num_rows = int(self._block_starts[-1])
                if verify:
                    self.sha256, self._checksums = self._digest_and_checksums(stream)
            except BaseException:
                self._map.close()
                raise
        self.has_checksums = self._checksums is not None
        self._view_all_rows(rows_per_block)
        # For the C function `cpu_library.gather_rows`, valid until `close`. The view of all rows begins at the first
        # block in the file, so the mapping begins that block's offset before it.
        self.table = (
            self._view.ctypes.data - int(self._offsets.min()),
            len(self._offsets),
            self._block_starts.ctypes.data,
            self._offsets.ctypes.data,
            0 if self._checksums is None else self._checksums.ctypes.data,
        )

    def rows(self, indices: NDArray[np.int64]) -> NDArray[Any]:
        """Return copies of the rows with these numbers in the shard, [k, seq_len].

        Raises ChangedRow if a copy has another checksum than the row had when the shard was verified.
        """
        block_of_row = np.searchsorted(self._block_starts, indices, side="right") - 1
        row_in_block = indices - self._block_starts[block_of_row]
        # The rows are elements of one strided view, but not evenly spaced in it: see `_view_all_rows`.
        elements = self._first_element[block_of_row] + row_in_block * self._elements_per_row
        copies = self._view[elements]
        if self._checksums is not None:
            has_changed = row_checksums(copies) != self._checksums[indices]
            if has_changed.any():
                raise ChangedRow(0, int(indices[np.flatnonzero(has_changed)[0]]))
        return copies

    def block_of_row(self, row: int) -> int:
        """Return the number of the block (member of the tar) that holds a row, both counted from 0."""
        return int(np.searchsorted(self._block_starts, row, side="right")) - 1

    def close(self) -> None:
        """Unmap the file and release its lock. The shard cannot be read afterwards; copies of its rows stay valid."""
        del self._view
        self._map.close()

    def _map_file(self, stream: IO[bytes]) -> mmap.mmap:
        try:
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:  # an empty file
            raise self._not_a_tar(error) from None

    def _find_blocks(self, stream: IO[bytes]) -> list[_Block]:
        """Return the blocks of rows (.npy members of the tar); raise ManifestMismatch if the tar is damaged."""
        blocks = []
        try:
            with tarfile.open(fileobj=stream, mode="r:", tarinfo=CheckedTarInfo) as tar:
                for member in tar:
                    check_key(member.name.removeprefix("./").rstrip("/"))
                    if member.isreg() and member.name.endswith(MEMBER_SUFFIX):
                        blocks.append(self._read_block_header(member))
        except (tarfile.TarError, ValueError) as error:
            raise self._not_a_tar(error) from None
        if not blocks:
            raise self._mismatch(f"the tar has no *{MEMBER_SUFFIX} member; build this shard again")
        return blocks

    def _digest_and_checksums(self, stream: IO[bytes]) -> tuple[str, Checksums]:
        """Read the whole file; return its SHA-256 in hexadecimal and the checksum of each row, uint64 [num_rows].

        If the file has become shorter since it was mapped, the checksums of the missing rows are 0.
        """
        seq_len, dtype = self.kind
        row_bytes = seq_len * dtype.itemsize
        rows_at_a_time = max(1, _BYTES_AT_A_TIME // row_bytes)
        digest = hashlib.sha256()
        checksums = np.zeros(self.num_rows, np.uint64)
        stream.seek(0)
        for offset, (start, end) in zip(self._offsets.tolist(), itertools.pairwise(self._block_starts.tolist())):
            _hash_bytes(digest, stream, offset - stream.tell())
            for first_row in range(start, end, rows_at_a_time):
                end_row = min(end, first_row + rows_at_a_time)
                content = stream.read(row_bytes * (end_row - first_row))
                digest.update(content)
                if len(content) == row_bytes * (end_row - first_row):
                    rows = np.frombuffer(content, dtype).reshape(-1, seq_len)
                    checksums[first_row:end_row] = row_checksums(rows)
        _hash_bytes(digest, stream, len(self._map))
        return digest.hexdigest(), checksums

    def _view_all_rows(self, rows_per_block: NDArray[np.int64]) -> None:
        """Create a NumPy view of the mapped file from which any set of rows can be copied in one operation."""
        # The tar and .npy headers between the blocks make the distances between rows unequal. Element i of the view is
        # the seq_len ids that begin i * stride bytes after the first row. The stride is the greatest common divisor of
        # the row size and the distances between blocks, so every row is an element. For example, with rows of 8 bytes
        # and blocks of two rows that begin at bytes 100 and 120, the stride is 4 and the rows are the elements 0, 2, 5
        # and 7. The other elements begin in the middle of a row or in a header and are never read.
        seq_len, dtype = self.kind
        row_bytes = seq_len * dtype.itemsize
        first_offset = int(self._offsets.min())
        distances = self._offsets - first_offset
        stride = math.gcd(row_bytes, *distances.tolist())
        self._first_element = distances // stride  # of each block
        self._elements_per_row = row_bytes // stride
        last_row_of_block = np.maximum(rows_per_block - 1, 0)  # A block may be empty.
        last_element = self._first_element + last_row_of_block * self._elements_per_row
        num_elements = int(last_element.max()) + 1
        self._view: NDArray[Any] = np.ndarray(
            shape=(num_elements, seq_len),
            dtype=dtype,
            buffer=self._map,
            offset=first_offset,
            strides=(stride, dtype.itemsize),
        )

    def _read_block_header(self, member: tarfile.TarInfo) -> _Block:
        """Return where the rows of a member begin, and their number; raise ValueError if the member is damaged."""
        end = member.offset_data + member.size
        if end > len(self._map) or member.issparse():
            raise ValueError(f"member {member.name} is cut short; it should have {member.size} bytes")
        # An .npy file is a magic string with a version, then a header with shape and type, then the array.
        header_end = min(end, member.offset_data + MAX_HEADER_BYTES)
        header = io.BytesIO(self._map[member.offset_data : header_end])
        try:
            shape, is_fortran_order, dtype = read_array_header(header)
        except ValueError as error:
            raise ValueError(f"member {member.name}: {error}") from None
        header_bytes = header.tell()
        seq_len, row_dtype = self.kind
        is_table_of_rows = len(shape) == 2 and shape[1] == seq_len and not is_fortran_order
        if not is_table_of_rows or dtype != row_dtype:
            raise self._mismatch(
                f"{member.name} holds {dtype} {shape}, not {row_dtype} [rows, {seq_len}]; build this shard again"
            )
        num_rows = shape[0]
        if header_bytes + num_rows * seq_len * dtype.itemsize != member.size:
            raise ValueError(
                f"member {member.name} has {member.size} bytes, which contradicts its header of {num_rows} rows"
            )
        return _Block(offset=member.offset_data + header_bytes, num_rows=num_rows)

    def _not_a_tar(self, error: Exception) -> ManifestMismatch:
        return self._mismatch(f"this shard is not a tar of *{MEMBER_SUFFIX} blocks ({error}); build this shard again")

    def _mismatch(self, reason: str) -> ManifestMismatch:
        return ManifestMismatch(f"{self.path}: {reason}")


def _hash_bytes(digest: hashlib._Hash, stream: IO[bytes], num_bytes: int) -> None:
    """Add the next `num_bytes` bytes of a file to a digest, or fewer at the end of the file."""
    while num_bytes > 0:
        content = stream.read(min(num_bytes, _BYTES_AT_A_TIME))
        if not content:
            return
        digest.update(content)
        num_bytes -= len(content)


def rows_of(shards: Sequence[Shard], which: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[Any]:
    """Copy rows from several shards: element i of the result, [k, seq_len], is row rows[i] of shards[which[i]].

    The shards (at least one) have the same row length and type, and all or none have checksums. Raises ChangedRow if
    the checksum of a copy is wrong. The C and the NumPy implementation give equal results.
    """
    seq_len, dtype = shards[0].kind
    out = np.empty((len(rows), seq_len), dtype)
    if cpu_library.gather_rows:
        keys = checksum_keys(seq_len * dtype.itemsize) if shards[0].has_checksums else None
        changed = cpu_library.gather_rows([shard.table for shard in shards], which, rows, out, keys)
        if changed is not None:
            raise ChangedRow(int(which[changed]), int(rows[changed]))
        return out
    for shard_index, shard in enumerate(shards):
        positions_of_shard = np.flatnonzero(which == shard_index)
        try:
            out[positions_of_shard] = shard.rows(rows[positions_of_shard])
        except ChangedRow as error:
            raise ChangedRow(shard_index, error.row) from None
    return out
