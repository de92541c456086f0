"""Bit-exact floats, strict JSON, torn lines, atomic replacement."""

from __future__ import annotations

import json
import math
import os
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from electra_dist.errors import UserError
from electra_dist.run.jsonl import JsonlFile, encode, read_records


@settings(max_examples=200, deadline=None)
@given(st.floats())
def test_floats_come_back_bit_for_bit_and_lines_are_strict_json(tmp_path_factory: pytest.TempPathFactory, x: float):
    line = encode({"x": x, "deep": {"list": [x]}})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    json.loads(line, parse_constant=refuse)
    path = tmp_path_factory.mktemp("floats") / "x.jsonl"
    path.write_bytes(line)
    [record] = read_records(path)
    for back in (record["x"], record["deep"]["list"][0]):
        if math.isnan(x):
            assert math.isnan(back)
        else:
            assert struct.pack("<d", back) == struct.pack("<d", x)


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_torn_last_line_is_dropped_and_cut_off(tmp_path: Path, cut: int):
    path = tmp_path / "a.jsonl"
    whole = encode({"step": 1}) + encode({"step": 2})
    path.write_bytes(whole[: len(whole) - cut])
    assert read_records(path) == [{"step": 1}]
    file = JsonlFile(path)
    file.append({"step": 3})
    file.close()
    file.close()
    assert read_records(path) == [{"step": 1}, {"step": 3}]


def test_a_record_is_readable_as_soon_as_it_is_appended(tmp_path: Path):
    file = JsonlFile(tmp_path / "new" / "folder" / "a.jsonl")
    file.append({"a": "NaNny", "b": None, "c": True})
    assert read_records(file.path) == [{"a": "NaNny", "b": None, "c": True}]
    file.close()


def test_replacement_is_atomic_and_appending_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = JsonlFile(tmp_path / "a.jsonl")
    for step in range(5):
        file.append({"step": step})
    seen_before_rename = []
    rename = os.replace

    def spy(source: Path, target: Path) -> None:
        seen_before_rename.append(len(read_records(file.path)))
        rename(source, target)

    monkeypatch.setattr(os, "replace", spy)
    file.replace({"step": step} for step in range(2))
    file.append({"step": 9})
    file.close()
    assert seen_before_rename == [5]
    assert [record["step"] for record in read_records(file.path)] == [0, 1, 9]
    assert os.listdir(tmp_path) == ["a.jsonl"]


def test_no_file_has_no_records(tmp_path: Path):
    assert read_records(tmp_path / "none.jsonl") == []


@pytest.mark.parametrize("damage", [b"{oops}\n", b"[1]\n", b"\xff\xfe\n", b"\n"])
def test_a_damaged_whole_line_is_an_error_that_names_it(tmp_path: Path, damage: bytes):
    path = tmp_path / "a.jsonl"
    path.write_bytes(encode({"step": 1}) + damage + encode({"step": 2}))
    with pytest.raises(UserError, match=r"a\.jsonl:2: not a JSON object"):
        read_records(path)


def test_an_unwritable_folder_is_a_user_error(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="cannot be written"):
        JsonlFile(tmp_path / "file" / "a.jsonl")
