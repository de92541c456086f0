"""Runs the interpreted kernel tests in a process where TRITON_INTERPRET is set before Triton is imported."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"


@pytest.mark.parametrize(
    "marks",
    [
        "not drill and not sample",
        pytest.param("sample", marks=pytest.mark.sample, id="sample: the shapes in fp32"),
        pytest.param("drill", marks=pytest.mark.drill, id="drill: the shapes in fp16"),
    ],
)
def test_all_tests_in_the_folder_interpreted_pass_under_tritons_interpreter(marks: str):
    major, minor = version("triton").split(".")[:2]
    if (int(major), int(minor)) < (3, 9):
        pytest.skip("before Triton 3.9 the interpreter rounds a fused product and sum twice, which no GPU does")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--durations=5",
        "-m",
        marks,
        str(FOLDER),
    ]
    command.append(str(FOLDER))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1800)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
