"""Damaged headers of .npy files and tars: an error before memory is allocated, and an end."""

from __future__ import annotations

import ast
import io
import tarfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from electra_dist.data.shard import Shard, parse_array, write_shard
from electra_dist.errors import ManifestMismatch

SECOND_MEMBER = 1024  # where its header begins, after a header and a block of rows of 512 bytes each
SHAPES = ["(9223372036854775808, 4)", "(-8, 4)", "(4611686018427387904,)", "(1099511627776, 1099511627776)", "(3, 5)"]


def npy(array: np.ndarray) -> bytes:
    """Return the content of an .npy file."""
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def with_shape(content: bytes, before: str, after: str) -> bytes:
    """Return an .npy file with another shape in its header, which keeps its length."""
    header_bytes = 10 + int.from_bytes(content[8:10], "little")
    header = content[:header_bytes].replace(before.encode(), after.encode()).rstrip()
    return header.ljust(header_bytes - 1) + b"\n" + content[header_bytes:]


@pytest.mark.parametrize("array", [np.arange(12).reshape(3, 4), np.zeros((0, 4), np.uint16), np.float32(2.5)])
def test_an_array_is_read_back(array: np.ndarray) -> None:
    read = parse_array(npy(np.asarray(array)))
    assert read.dtype == np.asarray(array).dtype and np.array_equal(read, array)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_damaged_shape_is_refused_without_allocating_memory(shape: str) -> None:
    content = with_shape(npy(np.arange(12).reshape(3, 4)), "(3, 4)", shape)
    assert len(content) == len(npy(np.arange(12).reshape(3, 4)))
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"shape|header"):
        parse_array(content)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 1 << 20


def test_cut_and_pickled_arrays_are_refused() -> None:
    content = npy(np.arange(12))
    for cut in range(len(content)):
        with pytest.raises(ValueError, match=r".+"):
            parse_array(content[:cut])
    with pytest.raises(ValueError, match="object"):
        parse_array(npy(np.array([{}, None])))


@pytest.mark.parametrize("name", [b"000001.rows.npy", b"notes"])
@pytest.mark.parametrize("size", [-8, -512, -1024, 1 << 63])
def test_a_shard_with_a_member_of_an_impossible_size_is_refused(tmp_path: Path, size: int, name: bytes) -> None:
    """Python's tarfile reads a member of -512 bytes again and again, if a later version has not corrected it."""
    file = tmp_path / "shard.tar"
    with file.open("wb") as out:
        write_shard(out, np.zeros((4, 8), np.uint16), block_rows=2)
    content = bytearray(file.read_bytes())
    header = content[SECOND_MEMBER : SECOND_MEMBER + tarfile.BLOCKSIZE]
    header[:100] = name.ljust(100, b"\0")
    number = size.to_bytes(12, "big", signed=True) if size < 0 else b"\x80" + size.to_bytes(11, "big")
    header[124:136] = number
    header[148:156] = b" " * 8  # what the checksum counts in place of itself
    header[148:156] = b"%06o\0 " % sum(header)
    assert tarfile.TarInfo.frombuf(bytes(header), "utf-8", "strict").size == size
    content[SECOND_MEMBER : SECOND_MEMBER + tarfile.BLOCKSIZE] = header
    file.write_bytes(content)
    with pytest.raises(ManifestMismatch, match="shard"):
        Shard(file, 8, np.dtype(np.uint16))


def test_a_good_header_is_read_where_python_cannot_evaluate_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPython 3.11 fails so now and then when several threads evaluate text at once, as NumPy does with headers."""

    def parse(*_: object, **__: object) -> None:
        raise SystemError("AST constructor recursion depth mismatch (before=27, after=21)")

    content = npy(np.arange(12, dtype=np.uint16).reshape(3, 4))
    monkeypatch.setattr(ast, "parse", parse)
    assert np.array_equal(parse_array(content), np.arange(12).reshape(3, 4))
