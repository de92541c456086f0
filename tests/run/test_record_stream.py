"""Files of JSON lines read in parts, against the lines of the whole file."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from electra_dist.errors import UserError
from electra_dist.run import record_stream
from electra_dist.run.jsonl import JsonlFile, encode, read_records
from electra_dist.run.record_stream import iter_lines, iter_records, lines_backwards, newest_record

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
        patch.setattr(record_stream, "_FORWARD_BLOCK_BYTES", block_bytes)
        patch.setattr(record_stream, "_BACKWARD_BLOCK_BYTES", block_bytes)
        assert list(iter_lines(path)) == expected
        assert list(lines_backwards(path)) == expected[::-1]


def test_records_are_those_of_the_whole_file_and_lines_without_a_text_are_skipped(tmp_path: Path):
    file = JsonlFile(tmp_path / "a.jsonl")
    for step in range(5):
        file.append({"kind": "eval" if step % 2 else "train", "step": step, "loss": float("nan") if step else 1.0})
    file.close()

    streamed = list(iter_records(file.path))

    assert [encode(record) for record in streamed] == [encode(record) for record in read_records(file.path)]
    assert [record["step"] for record in iter_records(file.path, containing=b'"eval"')] == [1, 3]
    newest = newest_record(file.path)
    assert newest is not None and newest["step"] == 4


def test_a_missing_file_has_no_lines(tmp_path: Path):
    path = tmp_path / "none.jsonl"
    assert list(iter_records(path)) == list(lines_backwards(path)) == []
    assert newest_record(path) is None


@pytest.mark.parametrize("damaged_line", [b"{oops}\n", b"[1]\n", b"\xff\xfe\n", b"\n"])
def test_a_damaged_line_is_named_by_its_number_from_both_ends(tmp_path: Path, damaged_line: bytes):
    path = tmp_path / "a.jsonl"
    path.write_bytes(encode({"step": 1}) + damaged_line)

    with pytest.raises(UserError, match=r"a\.jsonl:2: not a JSON object"):
        list(iter_records(path))
    with pytest.raises(UserError, match=r"a\.jsonl:2: not a JSON object"):
        newest_record(path)
