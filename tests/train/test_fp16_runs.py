"""Real `deepspeed` runs in fp16 on 2 ranks: overflows, restarts right after them, the least scale, and verify.

The runs are those of fp16_pretrain.py, because DeepSpeed refuses fp16 on most CPUs.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from electra_launcher.cli.main import app
from support.real_runs import REPOSITORY, go_back, quick_command, step_records
from typer.testing import CliRunner

MakeConfig = Callable[..., Path]

NUM_STEPS = 16
SETTINGS = {
    "train.num_steps": NUM_STEPS,
    "train.precision": "fp16",
    "model.hidden_dropout": 0.1,
    "log.every_steps": 4,  # a step that overflows is recorded all the same
    "checkpoint.every_steps": 1,
    "checkpoint.keep_last": NUM_STEPS,
}
# The gradients of these runs overflow at a scale of 2**14, so they overflow at the beginning and after each growth.
LOSS_SCALE = {"INITIAL_SCALE": 2.0**15, "STEPS_UNTIL_GROWTH": 2}
# Fields of a record that depend on time, memory or the machine.
MEASURED = ("tokens_per_s", "data_wait", "memory_gb", "eta_s", "step_s", "slow_ranks")


def run_fp16(config: Path, ranks: int, loss_scale: dict[str, float]) -> subprocess.CompletedProcess[str]:
    """Run to the end with other constants of the loss scale, and return the finished process."""
    command = quick_command(config, ranks)
    script = str(REPOSITORY / "launcher" / "pretrain.py")
    command[command.index(script)] = str(Path(__file__).parent / "fp16_pretrain.py")
    environment = {**os.environ, "LOSS_SCALE": json.dumps(loss_scale)}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def exact_records(run_dir: Path) -> list[dict]:
    """Return the step records of a run, without what is measured."""
    return [{k: v for k, v in record.items() if k not in MEASURED} for record in step_records(run_dir)]


def assert_restarts_are_exact(config: Path, run_dir: Path, cuts: list[int]) -> list[int]:
    """Run without a cut, then continue from each of the `cuts`; return the steps that overflowed.

    `cuts` are numbers of steps done. Negative ones count the overflows: -1 means right after the first one.
    """
    done = run_fp16(config, 2, LOSS_SCALE)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    uncut = exact_records(run_dir)
    overflows = [record["step"] for record in uncut if record["overflow"]]
    for cut in cuts:
        go_back(run_dir, overflows[-cut - 1] if cut < 0 else cut)
        again = run_fp16(config, 2, LOSS_SCALE)
        assert again.returncode == 0, again.stdout[-3000:] + again.stderr[-3000:]
        assert exact_records(run_dir) == uncut
    for step in overflows:
        assert f"step {step - 1} made no update: its gradients overflowed fp16 at loss scale" in done.stdout
    return overflows


@pytest.mark.multiproc
def test_run_with_overflows_continues_exactly_right_after_one_and_its_rows_are_verified(
    tiny_config: MakeConfig, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    overflows = assert_restarts_are_exact(tiny_config("run", **SETTINGS), run_dir, [-2])
    assert overflows[:2] == [1, 2]  # at 2**15; the first overflow does not lower the scale
    assert max(overflows) > 6  # after a growth
    records = exact_records(run_dir)
    assert {record["step"] for record in records} == {4, 8, 12, 16} | set(overflows)
    assert records[-1]["rows_seen"] == 16 * (NUM_STEPS - len(overflows))
    assert (records[0]["loss_scale"], records[0]["grad_norm"]) == (2.0**15, "NaN")
    verified = CliRunner().invoke(app, ["verify", str(run_dir)])
    assert verified.exit_code == 0, verified.output
    assert f"{len(overflows)} steps were skipped" in verified.output
    assert "good: exactly the planned rows" in verified.output
    # Without the metrics the checkpoints' own list of these steps suffices.
    (run_dir / "metrics.jsonl").unlink()
    assert CliRunner().invoke(app, ["verify", str(run_dir)]).exit_code == 0


@pytest.mark.drill
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_run_in_fp16_continues_exactly_from_every_step(tiny_config: MakeConfig, tmp_path: Path, stage: int) -> None:
    config = tiny_config("run", **{**SETTINGS, "engine.zero_stage": stage})
    assert_restarts_are_exact(config, tmp_path / "run", list(range(NUM_STEPS - 1, 0, -1)))


@pytest.mark.drill
def test_run_that_overflows_at_the_least_scale_goes_back_and_ends_as_one_that_diverges(
    tiny_config: MakeConfig, tmp_path: Path
) -> None:
    config = tiny_config("run", **{**SETTINGS, "guard.max_rollbacks": 1, "guard.skip_before": 0})
    done = run_fp16(config, 2, {"INITIAL_SCALE": 2.0**30, "LEAST_SCALE": 2.0**29})
    assert done.returncode == 78
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "diverges" in line and "guard.max_rollbacks is 1" in line
    stopped = [json.loads(line) for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()]
    faults = {event["fault"] for event in stopped if event["event"] == "stopped_step"}
    assert faults == {f"the gradient is not finite at the least loss scale, {2**29:,}"}
