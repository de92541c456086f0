"""A damaged JSON file is one line that names the file and the next step, also where a run folder has it."""

from __future__ import annotations

from pathlib import Path

import pytest

from electra_dist.errors import StoreMissing, UserError
from electra_dist.run.environment_record import read_environment
from electra_dist.run.folder import check_run_folder, recorded_numerics
from electra_dist.store.json_file import DamagedJson, parse_json_object, read_json_object

DEEP = 100_000
DAMAGES = [
    *(b"", b"{", b'{"a": 1}x', b"[1]", b"3", b"\xff\xfe\x00", b"\0" * 512, b'{"a": "\xed\xa0\x80"}'),
    *(b'{"a":' * DEEP + b"1" + b"}" * DEEP, b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}", b'{"a": ' + b"[" * DEEP),
    *(b'{"a": %s}' % (b"9" * 5000), b'{"a": 18446744073709551616}', b'{"a": -18446744073709551616}'),
]


@pytest.mark.parametrize("content", DAMAGES)
def test_a_file_without_a_json_object_is_refused_with_the_next_step(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "file.json"
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"damaged, .*; restore it") as caught:
        read_json_object(file, "restore it")
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["[1]", "3", "null", '"{}"'])
def test_a_value_that_is_not_an_object_is_damage(text: str) -> None:
    with pytest.raises(DamagedJson, match="it is not a JSON object"):
        parse_json_object(text)


def test_an_object_is_returned_and_a_missing_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file.json").write_text('{"a": [1, null]}')
    assert read_json_object(tmp_path / "file.json", "") == {"a": [1, None]}
    (tmp_path / "file.json").write_bytes(b'\xef\xbb\xbf{"a": 18446744073709551615, "b": "1111111111111111111111"}')
    assert read_json_object(tmp_path / "file.json", "") == {"a": 2**64 - 1, "b": "1" * 22}
    with pytest.raises(StoreMissing, match="nowhere"):
        read_json_object(tmp_path / "nowhere.json", "")


def test_damaged_files_of_a_run_folder_are_refused(tmp_path: Path) -> None:
    for name, read in {
        "identity.json": recorded_numerics,
        "environment.json": read_environment,
    }.items():
        (tmp_path / name).write_text("{")
        with pytest.raises(UserError, match=name):
            read(tmp_path)
    with pytest.raises(UserError, match="identity"):
        check_run_folder(tmp_path, {"seed": 1})
