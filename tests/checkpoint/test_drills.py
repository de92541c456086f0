"""Short runs of the checkpoint drills and of the checkpoint benchmark, which show that the scripts still work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent.parent
DRILLS = REPOSITORY / "tests" / "drills"


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("damages.py", ["--count", "32", "--seed", "7"]),
        ("save_kills.py", ["--count", "6", "--seed", "7"]),
        ("save_kills.py", ["--count", "4", "--seed", "7", "--target", "both", "--server", "moto"]),
    ],
    ids=["damages", "kills_local", "kills_both"],
)
def test_short_drill_passes(script: str, arguments: list[str]) -> None:
    command = [sys.executable, str(DRILLS / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=dict(os.environ))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout.rstrip().endswith(" 0 bad")


def test_benchmark_measures_all_four_ways_of_saving() -> None:
    command = [sys.executable, str(REPOSITORY / "benchmarks" / "checkpoint.py"), "--smoke"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=dict(os.environ))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    for way in ("ours", "memcpy", "DeepSpeed", "torch.save"):
        line = next(line for line in done.stdout.splitlines() if line.startswith(way))
        median_s = float(line.split()[1])
        assert median_s > 0
