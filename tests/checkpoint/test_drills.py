"""Short runs of the checkpoint drills, which show that the scripts still work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.azurite import azurite_program

REPOSITORY = Path(__file__).resolve().parent.parent.parent
DRILLS = REPOSITORY / "tests" / "drills"


def run_drill(script: str, *arguments: str) -> str:
    """Run a drill, check that it ends with 0, and return what it prints."""
    command = [sys.executable, str(DRILLS / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=dict(os.environ))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.sample
def test_sampled_damages_are_found() -> None:
    assert run_drill("damages.py", "--count", "32", "--seed", "7").rstrip().endswith(" 0 bad")


@pytest.mark.sample
@pytest.mark.parametrize("options", [("--server", "moto"), ("--store", "azure")], ids=["S3", "Azure"])
def test_a_run_killed_at_sampled_operations_equals_the_uninterrupted_one(options: tuple[str, str]) -> None:
    num_kills = 5
    if "azure" in options:
        num_kills = 3
        pytest.importorskip("obstore", reason="needs obstore")
        if azurite_program() is None:
            pytest.skip("needs Azurite: npm install azurite")
    printed = run_drill("kill_matrix", "--sample", *options)
    assert f" {num_kills} kills, 0 differences, 0 changes not intercepted" in printed
    *_, totals, _, _ = printed.splitlines()  # the last line of the last table, an empty line, the summary
    assert totals.split() == ["all", *2 * [str(num_kills)], "0", "0"]  # operations, kills, not reached, differences
