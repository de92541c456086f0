"""Files of JSON lines read in parts, against the lines of the whole file."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from electra_dist.errors import UserError
from electra_dist.run import records
from electra_dist.run.records import JsonlFile, encode, lines, read_records

WORDS = st.lists(st.text(alphabet="ab", max_size=12), max_size=12)


@settings(max_examples=150, deadline=None)
@given(words=WORDS, torn=st.text(alphabet="t", max_size=9), block_bytes=st.integers(1, 40))
def test_lines_and_offsets_are_those_of_the_whole_file_in_both_directions(
    tmp_path_factory: pytest.TempPathFactory, words: list[str], torn: str, block_bytes: int
):
    """The lines are shorter and longer than a block; some are empty; the file may end with a torn line."""
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    path.write_bytes("".join(f"{word}\n" for word in words).encode() + torn.encode())
    expected = []
    offset = 0
    for word in words:
        expected.append((offset, word.encode()))
        offset += len(word) + 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "_FORWARD_BLOCK_BYTES", block_bytes)
        patch.setattr(records, "_BACKWARD_BLOCK_BYTES", block_bytes)
        assert list(lines(path)) == expected
        assert list(lines(path, reverse=True)) == expected[::-1]


def test_records_are_those_of_the_whole_file_and_lines_without_a_text_are_skipped(tmp_path: Path):
    file = JsonlFile(tmp_path / "a.jsonl")
    for step in range(5):
        file.append({"kind": "eval" if step % 2 else "train", "step": step, "loss": float("nan") if step else 1.0})
    file.close()

    read = list(read_records(file.path, dict))

    assert b"".join(encode(record) for record in read) == file.path.read_bytes()
    backwards = read_records(file.path, dict, reverse=True)
    assert [encode(record) for record in backwards] == [encode(record) for record in reversed(read)]
    assert [record["step"] for record in read_records(file.path, dict, containing=b'"eval"')] == [1, 3]


def test_a_missing_file_has_no_lines(tmp_path: Path):
    path = tmp_path / "none.jsonl"
    assert list(read_records(path, dict)) == list(read_records(path, dict, reverse=True)) == []


@pytest.mark.parametrize("damaged_line", [b"{oops}\n", b"[1]\n", b"\xff\xfe\n", b"\n"])
def test_a_damaged_line_is_named_by_its_number_from_both_ends(tmp_path: Path, damaged_line: bytes):
    path = tmp_path / "a.jsonl"
    path.write_bytes(encode({"step": 1}) + damaged_line)

    with pytest.raises(UserError, match=r"a\.jsonl:2: not a JSON object"):
        list(read_records(path, dict))
    with pytest.raises(UserError, match=r"a\.jsonl:2: not a JSON object"):
        next(read_records(path, dict, reverse=True))
