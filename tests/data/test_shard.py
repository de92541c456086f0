"""Shards: their bytes are deterministic, webdataset reads and writes them, and any other file is refused."""

from __future__ import annotations

import hashlib
import io
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
import webdataset
from electra_kernels.native import cpu_library
from hypothesis import given, settings
from hypothesis import strategies as st

from electra_dist.data import shard as shard_module
from electra_dist.data.shard import Shard, write_shard
from electra_dist.errors import ManifestMismatch, StoreError, StoreMissing

SEQ_LEN = 8
U16 = np.dtype(np.uint16)


def rows_of(count: int, dtype: np.dtype = U16) -> np.ndarray:
    """Return random rows, [count, SEQ_LEN]; equal arguments give equal rows."""
    return np.random.default_rng(count).integers(0, np.iinfo(dtype).max, (count, SEQ_LEN)).astype(dtype)


def shard_bytes(rows: np.ndarray, block_rows: int) -> bytes:
    """Return the bytes of a shard of these rows."""
    file = io.BytesIO()
    write_shard(file, rows, block_rows)
    return file.getvalue()


def all_rows(path: Path, dtype: np.dtype = U16) -> np.ndarray:
    """Return all rows of a shard file."""
    shard = Shard(path, SEQ_LEN, dtype)
    rows = shard.rows(np.arange(shard.num_rows))
    shard.close()
    return rows


def tar_of(path: Path, members: dict[str, bytes], mode: str = "w") -> Path:
    """Write a tar file with these members and return its path."""
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def npy(array: np.ndarray) -> bytes:
    """Return an array in NumPy's file format."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@given(st.integers(1, 60), st.integers(1, 70), st.sampled_from(["uint16", "uint32"]), st.data())
@settings(max_examples=40, deadline=None)
def test_rows_are_read_back_as_written(
    tmp_path_factory: pytest.TempPathFactory, count: int, block_rows: int, dtype: str, data: st.DataObject
) -> None:
    rows = rows_of(count, np.dtype(dtype))
    path = tmp_path_factory.mktemp("shard") / "s.tar"
    path.write_bytes(shard_bytes(rows, block_rows))
    shard = Shard(path, SEQ_LEN, np.dtype(dtype))
    assert shard.num_rows == count
    wanted = np.array(data.draw(st.lists(st.integers(0, count - 1), max_size=20)), dtype=np.int64)
    taken = shard.rows(wanted)
    shard.close()
    assert taken.dtype == rows.dtype
    assert (taken == rows[wanted]).all()


@pytest.mark.parametrize("by", ["library", "numpy"])
def test_rows_of_several_shards_are_read_in_the_requested_order(
    tmp_path: Path, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by == "numpy":
        monkeypatch.setattr(cpu_library, "gather_rows", None)
    elif cpu_library.gather_rows is None:
        pytest.skip("the package was built without a C compiler")
    written = [rows_of(count) for count in (1, 37, 60, 300)]
    for number, (rows, block_rows) in enumerate(zip(written, (5, 1, 7, 64))):
        (tmp_path / f"{number}.tar").write_bytes(shard_bytes(rows, block_rows))
    shards = [Shard(tmp_path / f"{number}.tar", SEQ_LEN, U16) for number in range(4)]
    rng = np.random.default_rng(0)
    which = rng.integers(0, 4, 500)
    rows = np.array([rng.integers(len(written[shard])) for shard in which])
    found = shard_module.rows_of(shards, which, rows)
    assert found.tolist() == [written[shard][row].tolist() for shard, row in zip(which, rows)]
    with pytest.raises(IndexError):
        shard_module.rows_of(shards, np.array([2]), np.array([60]))
    for shard in shards:
        shard.close()


def test_equal_rows_give_equal_bytes() -> None:
    """The layout in memory does not matter. The digest is frozen, because corpora are identified by shard digests."""
    rows = np.arange(40 * SEQ_LEN, dtype=np.uint16).reshape(40, SEQ_LEN)
    data = shard_bytes(rows, 16)
    assert data == shard_bytes(np.asfortranarray(rows), 16)
    assert data == shard_bytes(np.concatenate([rows, rows])[::1][:40], 16)
    assert hashlib.sha256(data).hexdigest() == "6b848d36305f9f6df9cafc0fe106be11cee0b53608d92ee69e75879004d88bb1"


def test_webdataset_reads_our_shards(tmp_path: Path) -> None:
    rows = rows_of(40)
    path = tmp_path / "s.tar"
    path.write_bytes(shard_bytes(rows, 16))
    samples = list(webdataset.WebDataset(str(path), shardshuffle=False).decode())
    assert [sample["__key__"] for sample in samples] == ["000000", "000001", "000002"]
    assert (np.concatenate([sample["rows.npy"] for sample in samples]) == rows).all()


@pytest.mark.parametrize("writer", ["TarWriter", "ShardWriter"])
def test_shards_written_by_webdataset_are_read(tmp_path: Path, writer: str) -> None:
    rows = rows_of(40)
    samples = [
        {"__key__": f"{number:06d}", "rows.npy": rows[first : first + 16], "json": {"ignored": number}}
        for number, first in enumerate(range(0, 40, 16))
    ]
    if writer == "TarWriter":
        sink = webdataset.TarWriter(str(tmp_path / "out-0.tar"))
    else:
        sink = webdataset.ShardWriter(f"file:{tmp_path}/out-%d.tar", maxcount=2, verbose=0)
    for sample in samples:
        sink.write(sample)
    sink.close()
    read = [all_rows(path) for path in sorted(tmp_path.glob("out-*.tar"))]
    assert len(read) == (1 if writer == "TarWriter" else 2)
    assert (np.concatenate(read) == rows).all()


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({}, "has no"),
        ({"000000.txt": b"x"}, "has no"),
        ({"000000.rows.npy": b"x" * 600}, "not a tar of"),
        ({"000000.rows.npy": npy(rows_of(4))[:-1]}, "which contradicts its header of 4 rows"),
        ({"000000.rows.npy": npy(rows_of(4)) + b"x"}, "which contradicts its header of 4 rows"),
        ({"000000.rows.npy": npy(rows_of(4).astype(np.int64))}, r"holds int64 \(4, 8\), not uint16 \[rows, 8\]"),
        ({"000000.rows.npy": npy(rows_of(4)[:, :7])}, r"holds uint16 \(4, 7\)"),
        ({"000000.rows.npy": npy(np.asfortranarray(rows_of(4)))}, "holds uint16"),
        ({"000000.rows.npy": npy(np.array([[pickle]], dtype=object)[:0])}, "not a tar of|holds object"),
    ],
)
def test_a_tar_that_is_no_shard_is_refused_in_one_line_naming_the_file(
    tmp_path: Path, members: dict[str, bytes], message: str
) -> None:
    path = tar_of(tmp_path / "s.tar", members)
    with pytest.raises(ManifestMismatch, match=f"s.tar: .*{message}.*; build this shard again") as caught:
        Shard(path, SEQ_LEN, U16)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["../000000.rows.npy", "/etc/000000.rows.npy", "a/../../000000.rows.npy"])
def test_a_member_outside_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(StoreError, match="not a relative path"):
        Shard(tar_of(tmp_path / "s.tar", {name: npy(rows_of(4))}), SEQ_LEN, U16)


def test_compressed_empty_and_missing_files_are_refused(tmp_path: Path) -> None:
    compressed = tar_of(tmp_path / "s.tar.gz", {"000000.rows.npy": npy(rows_of(4))}, "w:gz")
    empty = tmp_path / "empty"
    empty.touch()
    for path in (compressed, empty):
        with pytest.raises(ManifestMismatch, match="not a tar of"):
            Shard(path, SEQ_LEN, U16)
    with pytest.raises(StoreMissing):
        Shard(tmp_path / "nowhere", SEQ_LEN, U16)


def test_a_truncated_shard_is_refused_or_gives_only_true_rows(tmp_path: Path) -> None:
    rows = rows_of(40)
    data = shard_bytes(rows, 16)
    for length in range(0, len(data), 97):
        path = tmp_path / "cut.tar"
        path.write_bytes(data[:length])
        try:
            read = all_rows(path)
        except ManifestMismatch:
            continue
        assert (read == rows[: len(read)]).all()
