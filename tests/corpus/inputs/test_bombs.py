"""Files that stand for far more than they hold are errors with the file's name, within bounded memory."""

from __future__ import annotations

import bz2
import gc
import gzip
import io
import lzma
import os
import re
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from electra_dist.corpus.inputs import archives, file_kinds, json_values, table_files, text_readers
from electra_dist.corpus.inputs.find_inputs import find_inputs
from electra_dist.corpus.inputs.text_readers import DocumentStream
from electra_dist.errors import UserError

LIMIT = 1 << 20  # in place of 256 MiB
MOST_MEMORY = 96 << 20
UNPACKED = 128 << 20
ZEROS = bytes(1 << 20)


def refusal(path: Path) -> str:
    """Return the line with which a build refuses a file; the memory of Python stays small until then."""
    tracemalloc.start()
    try:
        with pytest.raises(UserError) as caught:
            for _ in DocumentStream(find_inputs([path])):
                pass
        assert tracemalloc.get_traced_memory()[1] < MOST_MEMORY
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert message.startswith(f"{path}: cannot be read to its end")
    assert "\n" not in message
    return message


@pytest.fixture
def small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the limit of a document in every module that has it."""
    for module in (archives, file_kinds, json_values, table_files, text_readers):
        monkeypatch.setattr(module, "MOST_DOCUMENT_BYTES", LIMIT)


@pytest.fixture(scope="module")
def zstd_bomb() -> bytes:
    """128 MiB of one letter as one frame, in a few KB."""
    compressor = zstandard.ZstdCompressor(level=19).compressobj()
    parts = [compressor.compress(b"a" * (1 << 20)) for _ in range(UNPACKED >> 20)]
    return b"".join([*parts, compressor.flush()])


@pytest.mark.usefixtures("small_limit")
@pytest.mark.parametrize("name", ["a.jsonl.zst", "a.json.zst", "a.txt.zst", "a.md.zst", "a.csv.zst", "a.wet.zst"])
def test_a_few_kilobytes_of_zstd_whose_one_line_is_huge_cost_little_memory(
    tmp_path: Path, name: str, zstd_bomb: bytes
) -> None:
    path = tmp_path / name
    path.write_bytes(zstd_bomb)
    assert len(zstd_bomb) < 1 << 17
    if name != "a.wet.zst":
        assert "1 MiB" in refusal(path)
    else:
        assert "WARC" in refusal(path)


@pytest.mark.usefixtures("small_limit")
@pytest.mark.parametrize(
    ("ending", "compress"), [(".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)]
)
def test_a_huge_line_in_other_compressions_costs_little_memory(
    tmp_path: Path, ending: str, compress: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes(compress(bytes(4 << 20)))
    assert "a line of more than 1 MiB" in refusal(path)


@pytest.mark.usefixtures("small_limit")
def test_a_line_a_value_and_a_document_of_just_the_limit_are_read(tmp_path: Path) -> None:
    text = "a" * (LIMIT - 20)
    line = b'{"text": "%s"}' % text.encode()
    for name, content in {
        "a.jsonl": line + b"\n" + line,
        "a.json": b"[" + line + b", " + line + b"]",
        "a.txt": text.encode() + b"\n\n" + text.encode(),
        "a.csv": b"text\n" + text.encode() + b"\n" + text.encode(),
    }.items():
        (tmp_path / name).write_bytes(content)
        assert len(list(DocumentStream(find_inputs([tmp_path / name])))) == 2, name


@pytest.mark.usefixtures("small_limit")
def test_a_member_of_an_archive_that_unpacks_to_too_much_is_an_error(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.txt", bytes(4 << 20))
    assert "member a.txt: more than 1 MiB" in refusal(tmp_path / "a.zip")

    sparse = tarfile.TarInfo("a.txt")
    sparse.size = 1 << 40
    (tmp_path / "a.tar").write_bytes(sparse.tobuf() + ZEROS)
    assert "member a.txt: more than 1 MiB" in refusal(tmp_path / "a.tar")

    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        content = gzip.compress(bytes(4 << 20))
        member = tarfile.TarInfo("a.json.gz")
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))
    (tmp_path / "b.tar").write_bytes(packed.getvalue())
    assert "a document of more than 1 MiB" in refusal(tmp_path / "b.tar")


def test_members_whose_names_are_equal_up_to_the_first_dot_cost_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are one sample of a WebDataset shard, such as arXiv's 0704.0001.txt and 0704.0002.txt."""
    monkeypatch.setattr(archives, "_MOST_SAMPLE_BYTES", 2000)
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for number in range(9):
            archive.writestr(f"07{number // 3:02d}.{number:04d}.txt", "a" * 600)
    assert len(list(DocumentStream(find_inputs([tmp_path / "a.zip"])))) == 9

    monkeypatch.setattr(archives, "_MOST_SAMPLE_BYTES", 1500)
    message = r"names are equal up to the first dot and are taken for one WebDataset sample, such as 0700\.0002\.txt"
    assert re.search(message, refusal(tmp_path / "a.zip"))


def extended_header(size: int, content: bytes) -> bytes:
    """Return a header of tar's extended format that says it is `size` bytes long."""
    info = tarfile.TarInfo("pax")
    info.type = tarfile.XHDTYPE
    info.size = size
    padding = -len(content) % tarfile.BLOCKSIZE
    return info.tobuf(tarfile.USTAR_FORMAT) + content + bytes(padding)


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (extended_header(1 << 32, b""), "an extended header of"),
        (b"".join([extended_header(10, b"10 a=bcde\n")] * 2000), "too many extended headers"),
        (extended_header(28, b"28 GNU.sparse.size=111111x1\n"), "a damaged header"),
    ],
    ids=["huge", "many", "no number"],
)
def test_a_tar_with_damaged_extended_headers_is_an_error(tmp_path: Path, header: bytes, reason: str) -> None:
    """tarfile recurses to Python's limit, where a finalizer that the garbage collector runs would fail, too."""
    (tmp_path / "a.tar").write_bytes(header + tarfile.TarInfo("a.txt").tobuf() + bytes(1024))
    gc.disable()
    try:
        assert reason in refusal(tmp_path / "a.tar")
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "header",
    [
        b"Content-Length: " + b"9" * 5000,
        b"Content-Length: " + b"9" * 12,
        b"X: " + b"a" * (1 << 20),
        b"X: a\r\n" * 200_000,
    ],
    ids=["digits", "length", "long", "many"],
)
def test_headers_of_a_wet_file_that_are_too_long_or_ask_for_too_much_are_errors(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "a.wet").write_bytes(b"WARC/1.0\r\nWARC-Type: conversion\r\n" + header + b"\r\n\r\nbody")
    assert "WARC record" in refusal(tmp_path / "a.wet")


def test_a_named_pipe_that_takes_the_place_of_an_input_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("a text")
    files = find_inputs([path])
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UserError, match="named pipe"):
        list(DocumentStream(files))


def test_cells_of_a_table_that_repeat_one_long_text_are_read_a_few_at_a_time(tmp_path: Path) -> None:
    """A dictionary stores the text once: 512 KiB stand for 50 MiB here, and could stand for terabytes."""
    text = "ab" * (1 << 18)
    table = pyarrow.table({"text": [text] * 100})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", dictionary_pagesize_limit=1 << 26)
    del table
    before = pyarrow.total_allocated_bytes()
    peak = 0
    for number, document in enumerate(DocumentStream(find_inputs([tmp_path / "a.parquet"]))):
        assert document.data == text.encode()
        peak = max(peak, pyarrow.total_allocated_bytes() - before)
        if number > 100:
            break
    assert peak < 8 << 20
