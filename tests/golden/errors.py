"""Golden errors: the one-line errors of the tests of mistakes in a run's input, tests/train/test_bad_input.py."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from support.real_runs import REPOSITORY

from golden.comparison import Kind
from golden.doors import with_plants

FILE = "tests/train/test_bad_input.py"
_PLUGIN = "golden.recorded_errors"


def names() -> list[str]:
    """Return one name, because the tests run in one process of pytest."""
    return [FILE]


def make(name: str, folder: Path) -> dict[str, list[str]]:
    """Run the tests and return the error lines of the programs that each one has started."""
    record = folder / "errors.json"
    environment = {
        **os.environ,
        "GOLDEN_ERRORS": str(record),
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests"), str(REPOSITORY / "kernels")]),
        "PYTEST_ADDOPTS": "",
    }
    options = ["-q", "-p", "no:cacheprovider", "-p", _PLUGIN, f"--basetemp={folder / 'tests'}"]
    command = [sys.executable, "-m", "pytest", *options, str(REPOSITORY / FILE)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=REPOSITORY)
    if done.returncode:
        raise RuntimeError(done.stdout[-3000:] + done.stderr[-1000:])
    found: dict[str, list[str]] = json.loads(record.read_text())
    return {test: [with_plants(_without_places(line, folder)) for line in lines] for test, lines in found.items()}


def _without_places(line: str, folder: Path) -> str:
    line = re.sub(rf"{re.escape(str(folder))}/tests/[\w-]+", "TMP", line).replace(str(REPOSITORY), "REPOSITORY")
    line = re.sub(r"127\.0\.0\.1:\d+", "HOST:PORT", line)
    line = re.sub(r"\b[0-9a-f]{40,64}\b|\b[0-9a-f]{12}\.\.\.", "DIGEST", line)
    line = re.sub(r"\b(shard-|row |block )\d+", r"\1N", line)  # the first one that the run reads again
    return re.sub(r"pid \d+", "pid N", line)


KIND = Kind("errors", __doc__.splitlines()[0], names, make)
