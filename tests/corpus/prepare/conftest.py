"""Fixtures of the tests of `corpus prepare`, which need the extra `corpus` (the extra `test` has it)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.s3_fixtures import moto as s3

__all__ = ["s3"]

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fastText model that tells the two languages of the made sources."""
    from made_sources import write_language_model

    path = tmp_path_factory.mktemp("language") / "lid.bin"
    write_language_model(path)
    return path


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the made sources."""
    from made_sources import make_sources

    folder = tmp_path_factory.mktemp("sources")
    make_sources(folder)
    return folder


@pytest.fixture(scope="session")
def full_config(sources: Path, language_model: Path) -> Callable[[Path], dict[str, Any]]:
    """`full_config(folder)`: a config with every filter and deduplication, which writes below `folder`."""
    from made_sources import BAD_WORD

    (sources / "words.txt").write_text(f"# words\n{BAD_WORD}\n")
    (sources / "domains.txt").write_text("casino.example.org\n")

    def make(folder: Path) -> dict[str, Any]:
        return {
            "output": str(folder / "out"),
            "work": str(folder / "work"),
            "sources": [
                {"name": "crawl", "path": str(sources / "crawl"), "license": "CC-BY-4.0"},
                {"name": "lines", "path": str(sources / "lines")},
                {"name": "tables", "path": str(sources / "tables" / "*")},
            ],
            "filters": {
                "url": {"domains": str(sources / "domains.txt")},
                "language": {"model": str(language_model), "languages": ["en"], "threshold": 0.65},
                "gopher_repetition": {},
                "gopher_quality": {},
                "c4_quality": {},
                "c4_bad_words": {"list": str(sources / "words.txt")},
                "fineweb_quality": {},
            },
            "deduplication": {"exact": {}, "minhash": {}, "sentences": {}},
            "formatting": {"fix_encoding": True, "pii": {}},
            "executor": {"tasks": 3, "workers": 2},
            "samples_per_filter": 2,
        }

    return make


@pytest.fixture(scope="session")
def full_run(
    full_config: Callable[[Path], dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A finished preparation with all steps: its folder, with out/ and work/, and what it printed."""
    from prepare_processes import finish, start_prepare

    folder = tmp_path_factory.mktemp("full")
    done = finish(start_prepare(full_config(folder), folder))
    return folder, done
