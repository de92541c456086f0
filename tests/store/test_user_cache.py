"""The user's cache folder, also of a user without a home folder."""

from __future__ import annotations

import pwd
from pathlib import Path

import pytest

from electra_dist.store.user_cache import user_cache_folder


@pytest.fixture(autouse=True)
def nothing_remembered() -> None:
    user_cache_folder.cache_clear()


def test_the_folder_is_in_the_users_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_cache_folder() == tmp_path / ".cache" / "electra-dist"


def test_a_user_without_a_home_gets_one_private_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_entry(user: int) -> None:
        raise KeyError(user)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", no_entry)
    folder = user_cache_folder()
    assert folder == user_cache_folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.rmdir()
