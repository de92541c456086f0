"""Write rows of token ids as a shard. This module does not import torch, because workers of a corpus build use it."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

MEMBER_SUFFIX = ".rows.npy"


def write_shard(target: Path | IO[bytes], rows: NDArray[Any], block_rows: int) -> None:
    """Write rows of token ids as a shard: an uncompressed tar of .npy files with `block_rows` rows each.

    Equal `rows` ([n, seq_len] uint16 or uint32, n > 0) and `block_rows` give equal bytes, on any machine, at any time.
    The write is not atomic: write to a temporary name, and rename the file afterwards.
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
