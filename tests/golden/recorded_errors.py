"""A plugin of pytest that records the error lines of all programs that tests start, by test, in GOLDEN_ERRORS."""

from __future__ import annotations

import json
import os
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

_found: dict[str, list[str]] = defaultdict(list)


@pytest.fixture(autouse=True)
def _recorded_errors(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    communicate = subprocess.Popen.communicate

    def recorded(process: Any, *arguments: Any, **options: Any) -> Any:
        printed = communicate(process, *arguments, **options)
        for output in printed:
            text = output.decode(errors="replace") if isinstance(output, bytes) else output or ""
            _found[request.node.name] += [line for line in text.splitlines() if line.startswith("error: ")]
        return printed

    monkeypatch.setattr(subprocess.Popen, "communicate", recorded)


def pytest_sessionfinish() -> None:
    """Write what was found."""
    Path(os.environ["GOLDEN_ERRORS"]).write_text(json.dumps(_found))
