"""The order in which new files reach the disk: first the bytes, then the name, then the folder that holds the name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from electra_dist.run.failures import Strike, add_strike
from electra_dist.run.folder import STRIKES_FILE
from electra_dist.run.records import JsonlFile
from electra_dist.store.atomic_files import make_folder, replacing


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, int]]:
    """What is synced or given a name in tmp_path, in order: the call, the path, and the bytes in the file then."""
    found: list[tuple[str, str, int]] = []

    def record_naming(name: str) -> Callable[[Path, Path], None]:
        rename = getattr(os, name)

        def recorded(source: Path, target: Path) -> None:
            if Path(target).is_relative_to(tmp_path):
                found.append((name, str(target), os.stat(source).st_size))
            rename(source, target)

        return recorded

    fsync = os.fsync

    def recorded_fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.is_relative_to(tmp_path):
            found.append(("fsync", str(path), 0 if path.is_dir() else path.stat().st_size))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    for name in ("replace", "link"):
        monkeypatch.setattr(os, name, record_naming(name))
    return found


@pytest.mark.parametrize(("only_new", "naming"), [(False, "replace"), (True, "link")])
def test_all_bytes_are_synced_before_a_file_gets_its_name_and_the_folder_after_it(
    tmp_path: Path, calls: list[tuple[str, str, int]], only_new: bool, naming: str
) -> None:
    path = tmp_path / "file"
    with replacing(path, only_new=only_new) as out:
        out.write(b"1234567")
        assert calls == []
    [(first, temporary, num_bytes), *later] = calls
    assert (first, num_bytes) == ("fsync", 7)
    assert Path(temporary).name.startswith(".file.")
    assert later == [(naming, str(path), 7), ("fsync", str(tmp_path), 0)]


def test_the_parent_of_every_new_folder_is_synced_so_that_its_name_survives_a_power_failure(
    tmp_path: Path, calls: list[tuple[str, str, int]]
) -> None:
    make_folder(tmp_path / "a" / "b")
    assert sorted(calls) == [("fsync", str(tmp_path), 0), ("fsync", str(tmp_path / "a"), 0)]
    calls.clear()
    make_folder(tmp_path / "a" / "b")  # it is there already
    assert calls == []


def test_a_strike_is_on_the_disk_with_the_names_of_its_file_and_of_its_folder(
    tmp_path: Path, calls: list[tuple[str, str, int]]
) -> None:
    run_dir = tmp_path / "runs" / "a"
    strike = Strike(time=1.0, node="n1", device="", reason="ECC", by="preflight")
    add_strike(run_dir, strike)
    file = run_dir / STRIKES_FILE
    num_bytes = file.stat().st_size
    synced = [path for name, path, _ in calls if name == "fsync"]
    assert {str(tmp_path), str(run_dir.parent), str(run_dir)} <= set(synced)
    assert ("fsync", str(file), num_bytes) in calls
    assert synced.count(str(run_dir)) == 1  # once the file was there: a new folder is synced by its parent's


def test_records_that_are_synced_are_on_the_disk_with_the_names_of_their_file_and_of_its_folder(
    tmp_path: Path, calls: list[tuple[str, str, int]]
) -> None:
    file = tmp_path / "run" / "ledger.jsonl"
    records = JsonlFile(file)
    records.append({"event": "checkpoint"})
    records.sync()
    assert {str(tmp_path), str(file.parent), str(file)} <= {path for name, path, _ in calls if name == "fsync"}
    records.close()
