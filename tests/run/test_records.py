"""Files of JSON lines: floats are kept bit for bit, lines are strict JSON, torn lines are dropped."""

from __future__ import annotations

import json
import math
import os
import struct
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from electra_dist.errors import UserError
from electra_dist.run.records import JsonlFile, encode, lines, read_records


@settings(max_examples=200, deadline=None)
@example(math.inf)
@example(-math.inf)
@example(-0.0)
@given(st.floats())
def test_every_float_is_read_back_bit_for_bit_from_lines_of_strict_json(
    tmp_path_factory: pytest.TempPathFactory, number: float
):
    """Strict JSON has no NaN and no Infinity, yet these are read back, too (of NaN not the bits)."""
    line = encode({"x": number, "deep": {"list": [number]}})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    json.loads(line, parse_constant=refuse)
    path = tmp_path_factory.mktemp("floats") / "x.jsonl"
    path.write_bytes(line)
    [record] = read_records(path, dict)
    numbers_read = [record["x"], record["deep"]["list"][0]]
    for number_read in numbers_read:
        if math.isnan(number):
            assert math.isnan(number_read)
        else:
            assert struct.pack("<d", number_read) == struct.pack("<d", number)


@pytest.mark.parametrize("num_missing_bytes", range(1, 12))
def test_a_torn_last_line_is_ignored_by_readers_and_removed_before_the_next_record(
    tmp_path: Path, num_missing_bytes: int
):
    path = tmp_path / "a.jsonl"
    whole_data = encode({"step": 1}) + encode({"step": 2})
    path.write_bytes(whole_data[:-num_missing_bytes])
    assert list(read_records(path, dict)) == [{"step": 1}]

    file = JsonlFile(path)
    file.append({"step": 3})
    file.close()
    file.close()  # a second close does nothing

    assert list(read_records(path, dict)) == [{"step": 1}, {"step": 3}]


def test_a_record_is_readable_as_soon_as_it_is_appended(tmp_path: Path):
    record = {"a": "NaNny", "b": None, "c": True}
    file = JsonlFile(tmp_path / "new" / "folder" / "a.jsonl")

    file.append(record)

    assert list(read_records(file.path, dict)) == [record]
    file.close()


def test_replacing_all_records_is_atomic_and_records_can_be_appended_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Until the new file is renamed over the old one, a reader gets all old records."""
    file = JsonlFile(tmp_path / "a.jsonl")
    for step in range(5):
        file.append({"step": step})
    num_records_before_rename = []
    rename = os.replace

    def observed_rename(source: Path, target: Path) -> None:
        num_records_before_rename.append(len(list(read_records(file.path, dict))))
        rename(source, target)

    monkeypatch.setattr(os, "replace", observed_rename)

    file.replace({"step": step} for step in range(2))
    file.append({"step": 9})
    file.close()

    assert num_records_before_rename == [5]
    assert [record["step"] for record in read_records(file.path, dict)] == [0, 1, 9]
    assert os.listdir(tmp_path) == ["a.jsonl"]


def test_a_missing_file_has_no_records(tmp_path: Path):
    assert list(read_records(tmp_path / "none.jsonl", dict)) == []


@pytest.mark.parametrize("damaged_line", [b"{oops}\n", b"[1]\n", b"\xff\xfe\n", b"\n"])
def test_a_damaged_line_that_is_not_the_last_is_an_error_that_names_its_number(tmp_path: Path, damaged_line: bytes):
    path = tmp_path / "a.jsonl"
    path.write_bytes(encode({"step": 1}) + damaged_line + encode({"step": 2}))

    with pytest.raises(UserError, match=r"a\.jsonl:2: not a JSON object"):
        list(read_records(path, dict))


def test_a_folder_that_cannot_be_created_is_a_user_error(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")

    with pytest.raises(UserError, match="file: is a file, not a folder; choose another path"):
        JsonlFile(tmp_path / "file" / "a.jsonl")


@pytest.mark.parametrize("reverse", [False, True])
def test_a_line_that_no_record_can_have_is_refused_before_it_fills_the_memory(tmp_path: Path, reverse: bool):
    path = tmp_path / "records.jsonl"
    with path.open("wb") as file:
        file.write(b'{"a": 1}\n')
        file.truncate(64 << 20)  # zeros without a line end, which take no room on the disk
        file.seek(0, 2)
        file.write(b'\n{"a": 2}\n')
    with pytest.raises(UserError, match=r"records\.jsonl: a line of more than 16 MiB; the file is damaged"):
        list(lines(path, reverse=reverse))
