"""Write shards, and check the headers of .npy and tar files before memory is allocated for what they announce.

Guarantee: equal rows are written as equal bytes. `parse_array` allocates no memory for a shape that the bytes do not
hold, and executes no pickle. A tar that is opened with `CheckedTarInfo` ends with an error at a member of a negative
size; without it, reading such a tar with the versions of Python before 3.11.14 and 3.13.6 never ends. Huge extended
headers are an error, too.

Limits: this module must not import torch, because workers of a corpus build use it. `shard.py` reads shards.
"""

from __future__ import annotations

import io
import math
import re
import tarfile
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

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
