"""Runs the interpreted kernel tests in a process where Triton was told to interpret before it was imported."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"


def test_the_interpreted_kernels():
    if tuple(map(int, version("triton").split(".")[:2])) < (3, 9):
        pytest.skip("before Triton 3.9 the interpreter rounds a fused product and sum twice, which no GPU does")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=5", str(FOLDER)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
