"""The benchmark of the head's memory at a size that takes seconds; it fails above a third of eager's peak."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "head.py"


@pytest.mark.sample
def test_a_third_of_eagers_memory_and_the_same_loss():
    command = [sys.executable, str(BENCHMARK), "--rows", "2048", "--width", "32"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
