"""The user's cache folder, also of a user without a home folder."""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable
from pathlib import Path

import pytest
from electra_launcher.preflight.storage_checks import needs
from electra_launcher.slurm.submit import with_absolute_paths
from support.real_runs import tiny_tree

from electra_dist.config import Config
from electra_dist.errors import UserError
from electra_dist.store.open_store import open_store, without_tilde
from electra_dist.store.user_cache import (
    COMPILED_CODE_VARIABLE,
    TRITON_VARIABLE,
    keep_compiled_code,
    user_cache_folder,
)


@pytest.fixture(autouse=True)
def nothing_remembered() -> None:
    user_cache_folder.cache_clear()


def test_the_folder_is_in_the_users_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_cache_folder() == tmp_path / ".cache" / "electra-dist"


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user with neither HOME nor an entry in the password database."""

    def no_entry(user: int) -> None:
        raise KeyError(user)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", no_entry)


@pytest.mark.usefixtures("no_home")
def test_a_user_without_a_home_gets_one_private_folder() -> None:
    folder = user_cache_folder()
    assert folder == user_cache_folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.rmdir()


def config_with_target(path: str) -> Config:
    """Return a config of a run whose corpus and checkpoints are at `path`."""
    return Config.model_validate(tiny_tree(Path("/run"), path, **{"checkpoint.targets": [path]}))


def places(path: str) -> list[Callable[[], object]]:
    """Return calls of everything that is given a path by a user, or by a config, and replaces its tilde."""
    config = config_with_target(path)
    return [
        lambda: open_store(path),
        lambda: open_store(f"file://{path}"),
        lambda: without_tilde(path),
        lambda: with_absolute_paths(config),
        lambda: needs(config, {}),
    ]


@pytest.mark.usefixtures("no_home")
@pytest.mark.parametrize("path", ["~/corpus", "~nobody-of-this-name/corpus"])
def test_a_tilde_that_stands_for_no_folder_is_refused_in_one_line(path: str) -> None:
    for place in places(path):
        with pytest.raises(UserError, match="or this user has no home folder; write the whole path, or set HOME"):
            place()


def test_compiled_code_is_not_kept_in_the_shared_folder_that_is_torchs_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.setenv(TRITON_VARIABLE, "")  # restored after the test
    for before in (None, default_cache_dir()):
        monkeypatch.delenv(COMPILED_CODE_VARIABLE, raising=False)
        monkeypatch.delenv(TRITON_VARIABLE, raising=False)
        if before is not None:
            monkeypatch.setenv(COMPILED_CODE_VARIABLE, before)
        keep_compiled_code(tmp_path / "own")
        assert os.environ[COMPILED_CODE_VARIABLE] == str(tmp_path / "own")
        assert os.environ[TRITON_VARIABLE] == str(tmp_path / "own" / "triton")
    keep_compiled_code(tmp_path / "later")  # the first choice stays, and so does that of a user
    assert os.environ[COMPILED_CODE_VARIABLE] == str(tmp_path / "own")
    assert os.environ[TRITON_VARIABLE] == str(tmp_path / "own" / "triton")


def test_flex_attention_is_compiled_into_the_users_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from electra_dist.model import flex_attention

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(TRITON_VARIABLE, "")  # restored after the test
    monkeypatch.delenv(COMPILED_CODE_VARIABLE, raising=False)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    flex_attention.flex_function.__wrapped__(compiled=True)
    assert os.environ[COMPILED_CODE_VARIABLE] == str(tmp_path / ".cache" / "electra-dist" / "compiled")
