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
    times = [row for part in ("heads", "operations", "steps", "fusions") for row in record[part]]
    assert {row["operation"] for row in times} >= {"head M=24", "discriminator tail", "step B=1", "step B=4"}
    assert {"compiled layers (reference)", "ours without mlm_head", "ours, generator early"} <= {
        r["by"] for r in times
    }
    assert all("failed" not in row for row in times)
    assert "discriminator and tail, backward" in {row["by"] for row in record["breakdown"]}
    assert [row["by"] for row in record["rivals"] if "ms" in row] == [
        "Hugging Face (torch)",
        "Hugging Face, gathered (torch)",
    ]
    assert all(row["ms"] > 0 for row in times)
    assert {row["dtype"] for row in record["values"]} == {"float32", "bfloat16"}
    assert all(row["right"] for part in ("values", "integers", "chi_square") for row in record[part])
    assert "step B=4" in done.stdout
