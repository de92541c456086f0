"""The trace of a tiny run: what it counts, and that its phases are found."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter

import pytest
from support.import_graph import ROOT
from support.trace_run import PHASES, START, figures

# Functions, files and packages of a phase, with some room for other machines. These numbers only fall.
MOST = {START: (383, 76, 18), "step": (162, 32, 9), "evaluation": (129, 26, 8), "save": (38, 14, 5)}


@pytest.mark.parametrize("phase", PHASES)
def test_the_function_of_a_phase_exists(phase: str):
    file, name = PHASES[phase]
    text = (ROOT / file).read_text(encoding="utf-8")
    for part in name.split("."):
        assert re.search(rf"^ *(def|class) {part}\b", text, re.MULTILINE), name


def test_calls_are_counted_by_function_file_and_package():
    calls = Counter({("electra_dist/a.py", "f"): 3, ("electra_dist/store/b.py", "g"): 1, ("launcher/c.py", "A.h"): 1})
    assert figures(calls) == {"calls": 5, "functions": 3, "files": 3, "packages": 3}


@pytest.mark.sample
def test_every_phase_of_a_run_is_traced():
    command = [sys.executable, str(ROOT / "tests/support/trace_run.py"), "--json"]
    phases = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout)
    assert set(phases) == {START, *PHASES}
    # A step calls the forward pass of both towers for each of two micro-batches, in several packages.
    assert phases["step"]["calls"] > 2 * phases["step"]["functions"] > 100
    assert phases[START]["packages"] > phases["save"]["packages"] > 1
    for phase, most in MOST.items():
        found = tuple(phases[phase][figure] for figure in ("functions", "files", "packages"))
        assert all(number <= limit for number, limit in zip(found, most, strict=True)), (phase, found)
