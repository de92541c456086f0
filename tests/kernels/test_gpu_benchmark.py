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
    times = [*record["heads"], *record["operations"], *record["step"]]
    assert {row["operation"] for row in times} >= {"head M=24", "discriminator tail", "training step"}
    assert all(row["ms"] > 0 for row in times)
    assert {row["dtype"] for row in record["values"]} == {"float32", "bfloat16"}
    assert all(row["right"] for part in ("values", "integers", "chi_square") for row in record[part])
    assert "training step" in done.stdout
