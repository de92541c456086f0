"""What a start leaves that was killed within a commit, or when it took its number, is completed or deleted later."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import checkpoints as small
from support.checkpoints import committed, folder_name, verify

from electra_dist.checkpoint.commit import begin_attempt
from electra_dist.checkpoint.manifest import MANIFEST
from electra_dist.checkpoint.repair import copy_to_all
from electra_dist.checkpoint.stored_copies import check_targets
from electra_dist.errors import UserError
from electra_dist.store import atomic_files
from electra_dist.store.interface import Store
from electra_dist.store.open_store import LocalStore

RUN = {"identity_sha256": "0" * 64, "corpus_fingerprint": "corpus"}


@pytest.mark.parametrize("kept", [0, 1], ids=["folder to S3", "S3 to folder"])
def test_a_checkpoint_of_one_target_is_copied_to_the_other(two_targets: list[Store], kept: int) -> None:
    small.save([two_targets[kept]], step=3)
    folder = folder_name(3, 1)
    copy_to_all(two_targets, 3, 1)
    for target in two_targets:
        manifest, faults = verify(target, folder)
        assert manifest is not None
        assert not faults
    copied, original = (target.read(f"{folder}/{MANIFEST}") for target in two_targets)
    assert copied == original


def test_the_temporary_file_of_a_start_that_was_killed_when_it_took_its_number_is_deleted(tmp_path: Path) -> None:
    leftover = tmp_path / "attempts" / ".0001.json.0123abcd.tmp"
    leftover.parent.mkdir()
    leftover.write_bytes(b"{")
    assert begin_attempt([LocalStore(tmp_path)], RUN) == 1
    assert not leftover.exists()


def test_a_name_that_another_start_took_and_swept_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)

    def link_after_another_start(temporary: Path, path: Path) -> None:
        path.write_bytes(b"of the other start")
        temporary.unlink()
        os.link(temporary, path)

    namespace = SimpleNamespace(**{**vars(os), "link": link_after_another_start})
    monkeypatch.setattr(atomic_files, "os", namespace)
    assert not store.write_new("attempts/0001.json", b"of this start")
    assert store.read("attempts/0001.json") == b"of the other start"


def test_a_killed_test_of_a_target_leaves_nothing_behind(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / ".write-test.0123abcd.tmp").touch()  # killed before the rename
    (target / "write-test").touch()  # killed before it was deleted
    check_targets([LocalStore(target)])
    assert not list(target.iterdir())
    assert committed(LocalStore(target)) == []


def test_two_targets_that_are_one_store_are_refused_whatever_their_names_are(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    targets = [LocalStore(tmp_path / name) for name in ("other", "target", "link")]
    with pytest.raises(UserError, match=r"target and .*link are the same place"):
        check_targets(targets)
    assert not list((tmp_path / "target").iterdir())
    check_targets(targets[:2])
