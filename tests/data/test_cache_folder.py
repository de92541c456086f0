"""The choice of a node's cache folder without `data.cache_dir`, and the prediction of how much is fetched again."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import patch

import pytest

from electra_dist.data import node_cache as module
from electra_dist.data.node_cache import (
    CacheRoom,
    choose_cache_folder,
    describe_room,
    refetched_share,
    windows_bytes,
)
from electra_dist.errors import StoreError

NAME = f"electra-dist-cache-{os.getuid()}"


def choose(tmp_path: Path, *, nodes: int, configured: str | None = None, **environment: Path) -> tuple[Path, str]:
    variables = {name: str(path) for name, path in environment.items()}
    in_run = tmp_path / "run" / "cache"
    with patch.dict(os.environ, variables, clear=True):
        return choose_cache_folder(configured, in_run, has_several_nodes=nodes > 1)


@pytest.fixture
def mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the system list mounts in which tmp_path/disk is a local disk, and other folders of tmp_path are not."""
    kinds = {"disk": "ext4", "shared": "nfs4", "memory": "tmpfs", "scratch": "lustre"}
    for name in kinds:
        (tmp_path / name).mkdir()
    found = [(Path("/"), "ext4"), *((tmp_path / name, kind) for name, kind in kinds.items())]
    monkeypatch.setattr(module, "_mounts", lambda: found)
    return tmp_path


def test_one_node_keeps_the_folder_in_the_run_and_the_key_is_always_obeyed(tmp_path: Path, mounts: Path) -> None:
    assert choose(tmp_path, nodes=1, TMPDIR=tmp_path / "disk") == (tmp_path / "run" / "cache", "run_dir")
    for nodes in (1, 2):
        assert choose(tmp_path, nodes=nodes, configured="/nvme/x") == (Path("/nvme/x"), "data.cache_dir")


@pytest.mark.parametrize("other", ["shared", "memory", "scratch", "missing"])
def test_several_nodes_use_the_first_local_temporary_directory(tmp_path: Path, mounts: Path, other: str) -> None:
    disk = tmp_path / "disk"
    assert choose(tmp_path, nodes=2, SLURM_TMPDIR=disk, TMPDIR=tmp_path) == (disk / NAME, "SLURM_TMPDIR")
    assert choose(tmp_path, nodes=2, SLURM_TMPDIR=tmp_path / other, TMPDIR=disk) == (disk / NAME, "TMPDIR")
    assert (disk / NAME).stat().st_mode & 0o777 == 0o700
    assert choose(tmp_path, nodes=2, TMPDIR=disk)[0] == disk / NAME  # an existing folder is used again


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path, mounts: Path) -> None:
    """Compiled code is loaded from this folder, so no other user may have created it."""
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "disk" / NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match=r"belongs to another user or is a link; set data.cache_dir"):
        choose(tmp_path, nodes=2, TMPDIR=tmp_path / "disk")


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o702, 0o755])
def test_a_folder_of_ones_own_that_is_open_to_others_is_refused(tmp_path: Path, mounts: Path, mode: int) -> None:
    """They may have left files in it, and compiled code is loaded from it."""
    (tmp_path / "disk" / NAME).mkdir()
    (tmp_path / "disk" / NAME).chmod(mode)
    with pytest.raises(StoreError, match=r"others may read or write it, .*; set data.cache_dir"):
        choose(tmp_path, nodes=2, TMPDIR=tmp_path / "disk")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
def test_a_folder_of_another_number_is_refused(tmp_path: Path, mounts: Path) -> None:
    (tmp_path / "disk" / NAME).mkdir(mode=0o700)
    os.chown(tmp_path / "disk" / NAME, 65534, 65534)
    with pytest.raises(StoreError, match=r"belongs to another user"):
        choose(tmp_path, nodes=2, TMPDIR=tmp_path / "disk")


def test_a_folder_that_another_user_has_created_under_the_name_of_ones_own_is_refused(
    tmp_path: Path, mounts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is no link: it belongs to the user of this test, and is asked for by a user with another number."""
    own_uid = os.getuid()
    choose(tmp_path, nodes=2, TMPDIR=tmp_path / "disk")
    (tmp_path / "disk" / NAME).rename(tmp_path / "disk" / f"electra-dist-cache-{own_uid + 1}")
    monkeypatch.setattr(module.os, "getuid", lambda: own_uid + 1)
    with pytest.raises(StoreError, match=r"belongs to another user or is a link; set data.cache_dir"):
        choose(tmp_path, nodes=2, TMPDIR=tmp_path / "disk")


def test_a_node_without_a_writable_temporary_directory_is_refused(
    tmp_path: Path, mounts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tempfile raises FileNotFoundError then, which would show a traceback."""
    monkeypatch.setattr(module.os, "access", lambda path, mode: False)
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: (_ for _ in ()).throw(FileNotFoundError("none")))
    with pytest.raises(StoreError, match=r"no temporary directory of this node is writable; set data.cache_dir"):
        choose(tmp_path, nodes=2)


def test_the_share_that_is_fetched_again() -> None:
    assert windows_bytes([1, 9, 5, 7, 3], window_shards=2) == 9 + 7 + 5 + 3
    for capacity, share in ((1000, 0.0), (2000, 0.0), (520, 0.5), (905, 95 / 960), (40, 1.0), (10, 1.0)):
        assert refetched_share(CacheRoom(capacity, 1000, 40)) == pytest.approx(share)


def test_the_log_names_the_room_and_the_next_step() -> None:
    giga = 10**9
    assert describe_room(CacheRoom(70 * giga, 66 * giga, 2 * giga)).endswith("66.0 GB: later epochs fetch nothing")
    text = describe_room(CacheRoom(34 * giga, 66 * giga, 2 * giga))
    assert "every epoch fetches 50% of it again, 33.0 GB a node; for less, raise data.cache_limit_gb" in text
    small = describe_room(CacheRoom(1 * giga, 66 * giga, 2 * giga))
    assert "two shuffle windows alone have 2.0 GB" in small
    assert "lower data.shuffle_window_shards" in small
