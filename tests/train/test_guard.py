"""The guard: its verdicts on losses, and real runs with NaN gradients, a poisoned row and spikes."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from electra_launcher.cli.main import app
from support.real_runs import REPOSITORY, deepspeed_command, synthetic_rows

from electra_dist.config import GuardConfig
from electra_dist.config.load import load_config
from electra_dist.errors import UserError
from electra_dist.train.guard import Guard, SkipList

MakeConfig = Callable[..., Path]
Losses = Callable[[Path], list[tuple]]


def test_spike_is_measured_against_a_full_window_of_accepted_losses() -> None:
    guard = Guard(GuardConfig(window=8, spike_sigma=6.0))
    history = [10.0, 10.2, 9.9, 10.1, 10.0, 9.8, 10.2, 10.0]
    for loss in history:
        assert guard.fault(1000.0) == ""  # the window is not full: nothing is a spike yet
        guard.accept(loss)
    limit = np.mean(history) + 6.0 * np.std(history)
    assert guard.fault(float(limit) - 1e-6) == ""
    assert "sigma above" in guard.fault(float(limit) + 1e-6)
    assert guard.fault(0.0) == ""  # a low loss is no spike
    assert Guard(GuardConfig(window=8), guard.recent_losses).fault(float(limit) + 1e-6)  # as after a restart
    assert Guard(GuardConfig(window=8, spike_sigma=0.0), guard.recent_losses).fault(1e9) == ""


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), -float("inf")])
def test_loss_that_is_not_finite_is_a_fault_from_the_first_step(loss: float) -> None:
    assert "loss is" in Guard(GuardConfig()).fault(loss)


def test_skip_list_keeps_streaks_and_rollbacks_over_restarts(tmp_path: Path, tiny_config: MakeConfig) -> None:
    config = load_config(tiny_config(), ["guard.skip_before=1", "guard.max_rollbacks=1"])
    skips = SkipList(tmp_path, [3])
    for step in (10, 12, 13):
        skips.stop(step)
        skips.write()
        skips = SkipList(tmp_path, [3])
    assert skips.streak == [12, 13]
    assert skips.roll_back(config) == (11, [12, 13])
    skips.write()
    again = SkipList(tmp_path, [3])
    assert (again.steps, again.streak, again.rollbacks) == ({3, 10, 11, 12, 13}, [], 1)
    assert again.below(12) == (3, 10, 11)
    (tmp_path / "skipped_steps.json").write_text('{"steps": 3')
    with pytest.raises(UserError, match="damaged"):
        SkipList(tmp_path, [])


def test_after_the_last_rollback_the_run_ends_with_a_line(tmp_path: Path, tiny_config: MakeConfig) -> None:
    skips = SkipList(tmp_path, [])
    skips.stop(2)
    config = load_config(tiny_config(), ["guard.max_rollbacks=1"])
    assert skips.roll_back(config) == (0, [2])  # no step lies before step 0
    skips.stop(7)
    with pytest.raises(UserError, match="step 7 after 1 rollbacks was stopped by the guard again"):
        skips.roll_back(config)


def faulty(config: Path, faults: dict) -> subprocess.CompletedProcess[str]:
    """Run on 2 ranks with the faults of faulty_pretrain.py."""
    command = deepspeed_command(config, 2)
    command[command.index(str(REPOSITORY / "launcher" / "pretrain.py"))] = str(
        Path(__file__).parent / "faulty_pretrain.py"
    )
    environment = {**os.environ, "FAULTS": json.dumps(faults)}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def ledger(run_dir: Path, event: str) -> list[dict]:
    """Return the events of one name in a run's ledger."""
    records = [json.loads(line) for line in (run_dir / "ledger.jsonl").read_text().splitlines()]
    return [record for record in records if record["event"] == event]


# Steps 2, 3 and 4 have a NaN in rank 1's gradient: the run returns to step 0, because there is no checkpoint yet.
# The poisoned row occurs once in an epoch of 16 steps, in POISONED_STEPS. Steps 40, 41 and 42 spike: the run returns
# to a checkpoint.
POISONED_STEPS = [7, 25, 43, 48]
FAULTS = {
    "nan_gradient": [[1, 2], [1, 3], [1, 4]],
    "poisoned_row": synthetic_rows(33, 1)[10].tolist(),
    "spike": [40, 41, 42],
}
SETTINGS = {
    "train.num_steps": 56,
    "model.hidden_dropout": 0.1,
    "guard.window": 10,
    "guard.spike_sigma": 30.0,  # the first losses of so small a run fall steeply and jump
    "guard.skip_before": 2,
    "checkpoint.every_steps": 8,
}


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("stage", "precision"),
    [
        (1, "bf16"),
        pytest.param(2, "bf16", marks=pytest.mark.drill),
        pytest.param(3, "fp32", marks=pytest.mark.drill),
    ],
)
def test_losses_after_guard_stops_equal_those_of_a_run_configured_to_skip_these_steps(
    tiny_config: MakeConfig, pretrain: Callable, losses: Losses, tmp_path: Path, stage: int, precision: str
) -> None:
    settings = {**SETTINGS, "engine.zero_stage": stage, "train.precision": precision}
    done = faulty(tiny_config("faulty", **settings), FAULTS)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    run_dir = tmp_path / "faulty"
    print("\n".join(line for line in done.stdout.splitlines() if "stopped" in line or "going back" in line))

    stopped = ledger(run_dir, "stopped_step")
    by_fault = {event["step"]: event["fault"] for event in stopped}
    assert all("gradient is not finite" in by_fault[step] for step in (2, 3, 4))
    assert all("sigma above" in by_fault[step] for step in (40, 41, 42))
    poisoned = [event for event in stopped if "loss is nan" in event["fault"]]
    assert [event["step"] for event in poisoned] == POISONED_STEPS
    assert all("shard-000001.tar row 10 (loss nan" in event["suspect"] for event in poisoned)
    rollbacks = ledger(run_dir, "rollback")
    assert [(r["skip_from"], r["skip_to"]) for r in rollbacks] == [(0, 4), (38, 42)]
    assert (run_dir / "decisions-0.jsonl").read_text() == (run_dir / "decisions-1.jsonl").read_text()

    skipped = json.loads((run_dir / "skipped_steps.json").read_text())["steps"]
    skipping = tiny_config("skipping", **settings, **{"train.skip_steps": skipped})
    pretrain(skipping, 2)
    assert losses(tmp_path / "skipping") == losses(run_dir)
    assert {step for step, *_ in losses(run_dir)} == set(range(1, 57)) - {s + 1 for s in skipped}
    for name in ("faulty", "skipping"):
        assert run_cli("verify", str(tmp_path / name)).startswith("0 ")


@pytest.mark.multiproc
def test_verify_finds_a_tampered_run_and_names_its_rows(tiny_config: MakeConfig, tmp_path: Path) -> None:
    done = faulty(tiny_config("tampered"), {"tampered": [9, 3, 200]})
    assert done.returncode == 0, done.stderr[-3000:]
    verdict = run_cli("verify", str(tmp_path / "tampered"))
    print(verdict)
    assert verdict.startswith("1 ")
    assert "BAD: steps 9 to 9" in verdict
    assert "is missing" in verdict
    assert "shard-000003.tar row 49 was taken once too often" in verdict  # 70 + 33 + 48 rows are before shard 3


@pytest.mark.multiproc
def test_run_that_diverges_after_its_last_rollback_ends_with_78(tiny_config: MakeConfig, tmp_path: Path) -> None:
    config = tiny_config("diverging", **{"guard.max_rollbacks": 1, "guard.skip_before": 0})
    done = faulty(config, {"nan_gradient": [[0, step] for step in range(4, 20)]})
    assert done.returncode == 78
    assert "diverges: step 9 after 1 rollbacks" in done.stderr
    assert [r["skip_to"] for r in ledger(tmp_path / "diverging", "rollback")] == [6]


@pytest.mark.multiproc
def test_run_whose_evaluation_has_outputs_that_are_not_finite_has_diverged_and_ends_with_78(
    tiny_config: MakeConfig, tmp_path: Path
) -> None:
    config = tiny_config("nan", **{"log.eval_every_steps": 4, "checkpoint.every_steps": 2})
    done = faulty(config, {"nan_outputs": 3})
    assert done.returncode == 78
    assert "Traceback" not in done.stderr
    assert "has diverged: in the evaluation after step 4, " in done.stderr
    assert "outputs of the discriminator are not finite" in done.stderr
    folders = [path.parent.name[:13] for path in (tmp_path / "nan" / "checkpoints").glob("step-*/manifest.json")]
    assert folders == ["step-00000002"]  # the state that was evaluated is not saved
    assert not (tmp_path / "nan" / "samples.jsonl").exists()  # probabilities that are undefined show nothing


def run_cli(*arguments: str) -> str:
    """Run a command of electra-dist and return its exit code and its output, separated by a space."""
    from typer.testing import CliRunner

    result = CliRunner().invoke(app, list(arguments))
    return f"{result.exit_code} {result.output}"


def test_losses_of_exactly_0_are_no_scale_for_spikes() -> None:
    guard = Guard(GuardConfig(window=2, spike_sigma=3.0), [0.0, 0.0])
    assert guard.fault(0.0) == guard.fault(1.0) == ""
