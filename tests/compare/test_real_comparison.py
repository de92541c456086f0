"""A real comparison, as a user types it: stopped in the middle of a run, typed again, and again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.real_runs import step_records, wait_until
from typer.testing import CliRunner

from launcher.cli.main import app

pytestmark = pytest.mark.multiproc


def command(file: Path) -> list[str]:
    return [sys.executable, "-c", "from launcher.cli.main import main; main()", "compare", str(file)]


def test_stopped_in_a_run_and_typed_again(make_comparison: Callable[..., Path], tmp_path: Path) -> None:
    file, out = make_comparison(steps=60, objectives=["all_tokens_mlm", "mlm"], parallel=2), tmp_path / "out"
    first_run = out / "runs" / "all_tokens_mlm-seed1"
    process = subprocess.Popen(command(file), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: len(step_records(first_run)) >= 3, process, timeout_s=120)
        process.send_signal(signal.SIGTERM)
        text = process.communicate(timeout=120)[0].decode()
    finally:
        process.kill()
    assert process.returncode == 75, text
    assert "run the same command again" in text
    baseline = {path: path.stat().st_mtime_ns for path in out.glob("scores/random-seed1/*.json")}
    assert len(baseline) == 2

    done = subprocess.run(command(file), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    for run in ("all_tokens_mlm-seed1", "mlm-seed1"):
        tree = json.loads((out / "compare.json").read_text())
        num_steps = next(each["steps"] for each in tree["runs"] if each["run"].endswith(f"/{run}"))
        assert [record["step"] for record in step_records(out / "runs" / run)] == list(range(1, num_steps + 1))
        kept = sorted((out / "runs" / run / "checkpoints").glob("step-*/manifest.json"))
        assert len(kept) == 2  # those that are scored
    events = [json.loads(line)["event"] for line in (first_run / "ledger.jsonl").read_text().splitlines()]
    assert "stop" in events and "resume" in events and events[-1] == "done"
    assert {path: path.stat().st_mtime_ns for path in baseline} == baseline
    scores = {(s["entry"], s["step"], s["task"]): s["score"] for s in tree["scores"]}
    assert len(scores) == 2 + 2 * 2 * 2
    assert len({value for (_, _, task), value in scores.items() if task == "words"}) > 1

    files = {
        path: path.stat().st_mtime_ns for path in out.rglob("*") if "scores" in path.parts or "runs" in path.parts
    }
    again = CliRunner().invoke(app, ["compare", str(file)])
    assert again.exit_code == 0, again.output
    changed = [path for path in files if path.stat().st_mtime_ns != files[path] and path.suffix != ".yaml"]
    assert [path for path in changed if path.is_file()] == []
