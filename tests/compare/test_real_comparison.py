"""A real comparison, started as a user starts it, with SIGTERM in the middle of a run and two more starts."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from electra_launcher.cli.main import app
from support.real_runs import step_records, wait_until
from typer.testing import CliRunner

pytestmark = pytest.mark.multiproc

EXIT_STOPPED = 75  # exit code of a command that was stopped on purpose and can be run again


def compare_command(file: Path) -> list[str]:
    """Return the command `electra-dist compare FILE`, for a process of its own."""
    return [sys.executable, "-c", "from electra_launcher.cli.main import main; main()", "compare", str(file)]


def write_times(files: list[Path]) -> dict[Path, int]:
    """Return the time of the last write of each file, in nanoseconds."""
    return {file: file.stat().st_mtime_ns for file in files}


@pytest.mark.sample
def test_a_comparison_stopped_in_a_run_continues_and_a_third_start_changes_nothing(
    make_comparison: Callable[..., Path], tmp_path: Path
) -> None:
    """Two objectives train at a time; no step and no score that the stopped command has finished is made again."""
    file = make_comparison(steps=60, objectives=["all_tokens_mlm", "mlm"], parallel=2)
    out = tmp_path / "out"
    first_run = out / "runs" / "all_tokens_mlm-seed1"

    # First start: SIGTERM after at least three steps of the first run.
    process = subprocess.Popen(compare_command(file), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: len(step_records(first_run)) >= 3, process, timeout_s=120)
        process.send_signal(signal.SIGTERM)
        output = process.communicate(timeout=120)[0].decode()
    finally:
        process.kill()
    assert process.returncode == EXIT_STOPPED, output
    assert "run the same command again" in output
    baseline_scores = (out / "scores.jsonl").read_bytes()
    # The anchors are scored first: trigrams by the context AUC, the initial weights on two tasks and by it.
    entries = [json.loads(line)["checkpoint"]["entry"] for line in baseline_scores.splitlines()]
    assert entries == ["trigram", *["random"] * 3]

    # Second start: it finishes the comparison.
    finished = subprocess.run(compare_command(file), capture_output=True, text=True, timeout=200)

    assert finished.returncode == 0, finished.stdout + finished.stderr
    results = json.loads((out / "compare.json").read_text())
    for run in ("all_tokens_mlm-seed1", "mlm-seed1"):
        num_steps = next(entry["steps"] for entry in results["runs"] if entry["run"].endswith(f"/{run}"))
        trained_steps = [record["step"] for record in step_records(out / "runs" / run)]
        assert trained_steps == list(range(1, num_steps + 1))
        scored_steps = {score["step"] for score in results["scores"] if score["entry"] == run.removesuffix("-seed1")}
        manifests = (out / "runs" / run / "checkpoints").glob("step-*/manifest.json")
        kept_steps = {int(manifest.parent.name.split("-")[1]) for manifest in manifests}
        assert len(scored_steps) == 2
        assert scored_steps <= kept_steps
        # A rollback may need one more: the checkpoint of the stop, if the run was past its first scored step then.
        assert all(min(scored_steps) < step < num_steps for step in kept_steps - scored_steps)
        assert len(kept_steps) <= 3

    ledger_lines = (first_run / "ledger.jsonl").read_text().splitlines()
    events = [json.loads(line)["event"] for line in ledger_lines]
    assert "stop" in events
    assert "resume" in events
    assert events[-1] == "done"
    assert (out / "scores.jsonl").read_bytes().startswith(baseline_scores)

    score_of = {(score["entry"], score["step"], score["task"]): score["score"] for score in results["scores"]}
    num_baseline_scores = 1 + 3  # of trigrams, and of the initial weights on two tasks and by the context AUC
    num_checkpoint_scores = 2 * 2 * 3  # objectives, checkpoints, measures
    assert len(score_of) == num_baseline_scores + num_checkpoint_scores
    words_scores = {score for (_, _, task), score in score_of.items() if task == "words"}
    assert len(words_scores) > 1  # the checkpoints do not all have the score of the initial weights

    # Third start: nothing is left to do, so only the YAML files are written again.
    run_and_score_files = []
    for path in out.rglob("*"):
        if path.name == "scores.jsonl" or "runs" in path.parts:
            run_and_score_files.append(path)
    times_before = write_times(run_and_score_files)

    third = CliRunner().invoke(app, ["compare", str(file)])

    assert third.exit_code == 0, third.output
    rewritten = []
    for path in run_and_score_files:
        is_rewritten = path.stat().st_mtime_ns != times_before[path]
        if is_rewritten and path.is_file() and path.suffix != ".yaml":
            rewritten.append(path)
    assert rewritten == []
