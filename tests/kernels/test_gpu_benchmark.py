"""The GPU benchmark's own code, on the CPU at toy sizes."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


def test_the_smoke_run(tmp_path):
    command = [sys.executable, str(BENCHMARK), "--smoke", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.glob("gpu-smoke-*.json")
    record = json.loads(file.read_text())
    assert {row["operation"] for row in record["times"]} >= {"head M=24", "discriminator tail", "training step"}
    assert all(row["right"] for row in record["correctness"])
    assert "training step" in done.stdout
