"""A start deletes the temporary files that killed processes left in its run folder, and no others."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from electra_dist.run.folder import delete_unfinished_files
from electra_dist.store.open_store import open_store

OLD_S = 7200.0


@pytest.mark.parametrize(
    ("name", "is_deleted", "is_deleted_when_old"),
    [
        (".metrics.jsonl.0a1b2c3d.tmp", True, True),
        (".config.yaml.0a1b2c3d.tmp", True, True),
        (".report.html.0a1b2c3d.tmp", False, True),  # `electra-dist report` may be writing it
        ("meeting/.node-1.json.0a1b2c3d.tmp", False, True),  # a supervisor of another node may be
        ("preflight-0a1b2c3d", False, True),
        ("export/.model.0a1b2c3d.tmp", False, False),
        ("metrics.jsonl", False, False),
        ("notes.tmp", False, False),
    ],
)
def test_unfinished_files_are_deleted_by_the_process_that_may(
    tmp_path: Path, name: str, is_deleted: bool, is_deleted_when_old: bool
) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.touch()
    delete_unfinished_files(tmp_path)
    assert file.exists() is not is_deleted
    if not is_deleted:
        old = time.time() - OLD_S
        os.utime(file, (old, old))
        delete_unfinished_files(tmp_path)
        assert file.exists() is not is_deleted_when_old


def test_a_folder_that_does_not_exist_has_none(tmp_path: Path) -> None:
    delete_unfinished_files(tmp_path / "none")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name",
    ["preflight-notes.txt", "preflight-", ".thesis.tmp", "slurm/preflight-list", "meeting/.agenda.2026.tmp"],
)
def test_files_of_the_user_with_similar_names_stay(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("mine")
    os.utime(file, (0, 0))
    delete_unfinished_files(tmp_path)
    assert file.read_text() == "mine"
    assert open_store(str(tmp_path)).list() == [name]
    assert open_store(str(tmp_path)).discard_unfinished("", lambda key: True) == 0
