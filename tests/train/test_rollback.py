"""A rollback is a function of the config and the stopped steps: restarts, saves and retention do not change it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.real_runs import quick_command, read_losses, write_tiny_config

from electra_dist.run.folder import SAVE_FILE
from electra_dist.run.ledger import read_ledger

MakeConfig = Callable[..., Path]

# The loss of three steps in a row is a spike, so the run skips the steps from 18 (two before them) to 22. The newest
# checkpoint is then that of step 20, and the newest that has not been trained on a skipped step is that of step 16.
SPIKES = [20, 21, 22]
SKIPPED = [18, 19, 20, 21, 22]
SETTINGS: dict[str, Any] = {
    "train.num_steps": 30,
    "guard.window": 10,
    "guard.spike_sigma": 30.0,  # the first losses of so small a run fall steeply and jump
    "guard.skip_before": 2,
    "checkpoint.every_steps": 4,
    "log.eval_every_steps": 1000,
}


def start(config: Path, **faults: Any) -> subprocess.Popen[str]:
    """Start a run of one rank with the spikes and further faults of faulty_pretrain.py."""
    command = quick_command(config, 1)
    command[1] = str(Path(__file__).parent / "faulty_pretrain.py")
    environment = {**os.environ, "FAULTS": json.dumps({"spike": SPIKES, **faults})}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen[str], exit_code: int = 0) -> str:
    """Wait for a run, check its exit code, and return what it printed."""
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == exit_code, printed
    return printed


def skip_list(run_dir: Path) -> dict[str, Any]:
    """Return the content of skipped_steps.json."""
    return json.loads((run_dir / "skipped_steps.json").read_text())


@pytest.fixture(scope="module")
def reference(tiny_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple]:
    """The losses of the run that nothing interrupts, which keeps three checkpoints."""
    run_dir = tmp_path_factory.mktemp("reference") / "run"
    finish(start(write_tiny_config(run_dir.with_suffix(".yaml"), run_dir, str(tiny_corpus), **SETTINGS)))
    assert skip_list(run_dir) == {"steps": SKIPPED, "rollbacks": 1, "streak": []}
    return read_losses(run_dir)


@pytest.mark.parametrize(
    ("settings", "fault", "exit_code"),
    [
        pytest.param({"checkpoint.keep_last": 1}, {}, 0, id="fewer checkpoints are kept"),
        pytest.param({"checkpoint.every_steps": "auto"}, {}, 0, id="another interval", marks=pytest.mark.drill),
        pytest.param({}, {"created_at": [SAVE_FILE, 19]}, 0, id="a save was requested", marks=pytest.mark.sample),
        pytest.param({}, {"signal_at": [signal.SIGTERM, 19]}, 75, id="stopped before", marks=pytest.mark.drill),
        pytest.param({}, {"signal_at": [signal.SIGTERM, 21]}, 75, id="between two spikes", marks=pytest.mark.sample),
        pytest.param({}, {"killed_with_streak": 1}, -signal.SIGKILL, id="killed after one", marks=pytest.mark.drill),
        pytest.param({}, {"killed_with_streak": 3}, -signal.SIGKILL, id="killed when the rollback was decided"),
    ],
)
def test_the_rollback_is_the_same_whatever_happens_before_it(
    tiny_config: MakeConfig,
    tmp_path: Path,
    reference: list[tuple],
    settings: dict[str, Any],
    fault: dict[str, Any],
    exit_code: int,
) -> None:
    config = tiny_config("run", **{**SETTINGS, **settings})
    if "created_at" in fault:
        name, step = fault["created_at"]
        fault = {"created_at": [str(tmp_path / "run" / name), step]}
    finish(start(config, **fault), exit_code)
    if exit_code:
        finish(start(config))
    assert skip_list(tmp_path / "run") == {"steps": SKIPPED, "rollbacks": 1, "streak": []}
    assert read_losses(tmp_path / "run") == reference
    events = [json.loads(line)["event"] for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()]
    assert events.count("rollback") == 1


# A rollback skips the steps from 12 on. The only checkpoints, of the steps 14 and 19, were trained on some of them.
EARLY: dict[str, Any] = {**SETTINGS, "train.num_steps": 25, "guard.skip_before": 8, "checkpoint.every_steps": 14}
EARLY_SAVES: dict[str, Any] = {"checkpoint.keep_steps": [19]}


@pytest.fixture(scope="module")
def from_step_0(tiny_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple]]:
    """The folder and the losses of a run that has no checkpoint when it rolls back, so that it begins again."""
    run_dir = tmp_path_factory.mktemp("early") / "run"
    settings = {**EARLY, "checkpoint.every_steps": 1000}
    finish(start(write_tiny_config(run_dir.with_suffix(".yaml"), run_dir, str(tiny_corpus), **settings)))
    assert skip_list(run_dir)["steps"] == list(range(12, 23))
    return run_dir, read_losses(run_dir)


@pytest.mark.parametrize(
    ("fault", "exit_code"),
    [
        pytest.param({}, 0, id="in one start", marks=pytest.mark.sample),
        pytest.param({"killed_with_streak": 3}, -signal.SIGKILL, id="killed when the rollback was decided"),
        pytest.param({"signal_at": [signal.SIGTERM, 21]}, 75, id="stopped", marks=pytest.mark.drill),
    ],
)
def test_a_rollback_that_discards_every_checkpoint_goes_back_to_step_0(
    tiny_config: MakeConfig,
    tmp_path: Path,
    from_step_0: tuple[Path, list[tuple]],
    fault: dict[str, Any],
    exit_code: int,
) -> None:
    targets = {"checkpoint.targets": [str(tmp_path / "near"), str(tmp_path / "far")]}
    config = tiny_config("run", **{**EARLY, **EARLY_SAVES, **targets})
    printed = finish(start(config, **fault), exit_code)
    if exit_code:
        printed = finish(start(config))
    assert read_losses(tmp_path / "run") == from_step_0[1]
    assert printed.count("step 0 is used instead") == 4  # two checkpoints in each of two targets
    assert skip_list(tmp_path / "run") == {"steps": list(range(12, 23)), "rollbacks": 1, "streak": []}


def test_a_rollback_to_step_0_begins_with_the_weights_that_init_from_names(
    tiny_config: MakeConfig, tmp_path: Path, from_step_0: tuple[Path, list[tuple]]
) -> None:
    """The start after the kill finds a checkpoint, so its towers are built without these weights."""
    source = {"train.init_from": str(from_step_0[0])}
    finish(start(tiny_config("uncut", **{**EARLY, **source, "checkpoint.every_steps": 1000})))
    config = tiny_config("run", **{**EARLY, **source})
    finish(start(config, killed_with_streak=3), -signal.SIGKILL)
    finish(start(config))
    assert read_losses(tmp_path / "run") == read_losses(tmp_path / "uncut")


def test_a_rollback_to_step_0_refuses_weights_that_have_changed_since_the_run_began(
    tiny_config: MakeConfig, tmp_path: Path, from_step_0: tuple[Path, list[tuple]]
) -> None:
    """The source goes on while the run trains, and its newest checkpoint is another one then."""
    source = Path(shutil.copytree(from_step_0[0], tmp_path / "source"))
    (newest,) = (source / "checkpoints").glob("step-00000025-*")
    kept = newest.rename(tmp_path / "newest")
    other = tiny_config("other", **{**EARLY, "checkpoint.every_steps": 10, "train.num_steps": 25, "seed": 7})
    finish(start(other))  # the same run as the source, which has other checkpoints
    for folder in (tmp_path / "other" / "checkpoints").glob("step-00000010-*"):
        folder.rename(source / "checkpoints" / folder.name)
    config = tiny_config("run", **{**EARLY, "checkpoint.every_steps": 1000, "train.init_from": str(source)})
    printed = finish(start(config, shell_at=[[f"mv {kept} {newest}", 18]]), 78)
    again = finish(start(config), 78)
    for output in (printed, again):
        (line,) = [line for line in output.splitlines() if line.startswith("error: ")]
        assert f"train.init_from {source} has changed since the run began" in line and "Traceback" not in output


def test_a_crash_within_a_step_is_recorded_with_the_steps_that_are_done(tiny_corpus: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    config = write_tiny_config(tmp_path / "run.yaml", run_dir, str(tiny_corpus), **SETTINGS)
    finish(start(config, shell_at=[["false", 6]]), exit_code=1)
    *_, checkpoint, end = read_ledger(run_dir)
    assert (checkpoint.event, checkpoint.step) == ("checkpoint", 4)
    assert (end.event, end.step) == ("crash", 6)
