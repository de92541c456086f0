"""Fixture of the fuzz: the folder with one good file of every kind."""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzz.specimens import make_specimen


@pytest.fixture(scope="session")
def specimen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder, which each case leaves as it was."""
    root = tmp_path_factory.mktemp("fuzz") / "specimen"
    make_specimen(root)
    return root
