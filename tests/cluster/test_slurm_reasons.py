"""Real runs that end in each way in which a Slurm job can, and what the job, `why` and `status` say of it.

The faults are those of the drill `reasons.py`: while rank 1 of 2 computes a step, it executes a few lines of Python.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from machines import wait_for
from reasons import EXHAUST, FAULT, FILL, PATIENCE, STEP
from slurm import SlurmCluster
from submitted import SubmittedRun, submit_with
from support.small_disks import can_mount, disk_with_quota, fill_command, small_disk

StartCluster = Callable[..., SlurmCluster]
MakeConfig = Callable[..., Path]
SETTINGS = {"train.num_steps": 12, "checkpoint.every_steps": 5, "data.heldout": None}
LONG = {**SETTINGS, "train.num_steps": 100_000}
# Slurm sends SIGTERM to the ranks, and to the batch script, which sends them SIGUSR1. Either may be the first.
SIGNALS_OF_AN_END = (": SIGTERM", ": SIGUSR1")


@pytest.fixture
def faulty_python(tmp_path: Path) -> Path:
    """An interpreter for jobs whose ranks execute the fault that the environment names."""
    drill = Path(__file__).parents[1] / "drills" / "reasons.py"
    file = tmp_path / "faulty_python"
    file.write_text(
        f"""#!/bin/bash
case "$*" in
*"-m electra_launcher.supervise "*) shift 2; exec {sys.executable} {drill} supervise "$@" ;;
*) exec {sys.executable} "$@" ;;
esac
"""
    )
    file.chmod(0o755)
    return file


def told(run: SubmittedRun) -> dict[str, Any]:
    """Print what `why` and `status` say, and return the former as JSON."""
    command = [str(Path(sys.executable).parent / "electra-dist"), "why", str(run.folder)]
    print(subprocess.run(command, capture_output=True, text=True, check=True).stdout + run.status(), flush=True)
    return json.loads(subprocess.check_output([*command, "--json"]))


@pytest.mark.parametrize(
    ("fault", "error", "line"),
    [
        ("raise ValueError('row 3 has the label 7')", "exception", "ValueError: row 3 has the label 7"),
        ("import a_module_that_nobody_has", "import", "No module named 'a_module_that_nobody_has'"),
        (EXHAUST, "host-out-of-memory", "SIGKILL; the kernel has killed"),
    ],
    ids=["exception", "missing module", "memory limit"],
)
def test_a_fault_at_the_same_step_twice_ends_the_job_and_those_that_wait(
    cluster: StartCluster,
    tiny_config: MakeConfig,
    faulty_python: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    error: str,
    line: str,
) -> None:
    monkeypatch.setenv(FAULT, fault)
    slurm = cluster(2, limits_memory=True)
    run = submit_with(slurm, tiny_config("run", **SETTINGS), faulty_python, sbatch_options=("mem=3G",))
    run.wait(300)

    account = told(run)
    assert (account["class"], account["step"], account["repeated"]) == (error, STEP, True), run.log()
    assert line in account["line"]
    assert run.verdicts() == ["stop"], run.log()
    assert "not restarted a second time" in run.status()


def test_a_cancelled_job_says_that_it_was_asked_to_stop(
    cluster: StartCluster, tiny_config: MakeConfig, faulty_python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FAULT, "0")
    slurm = cluster(2)
    run = submit_with(slurm, tiny_config("run", **LONG), faulty_python)
    run.wait_for_checkpoint(5, timeout_s=120)
    slurm.slurm("scancel", run.jobs[0])
    run.wait(120)

    account = told(run)
    assert (account["class"], account["state"]) == (None, "stopped")
    assert account["what"].endswith(SIGNALS_OF_AN_END)
    assert run.verdicts() == ["leave"], run.log()


def test_a_preempted_job_saves_and_goes_on_when_the_nodes_are_free_again(
    cluster: StartCluster, tiny_config: MakeConfig, faulty_python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FAULT, "0")
    slurm = cluster(2)
    run = submit_with(slurm, tiny_config("run", **LONG), faulty_python)
    run.wait_for_checkpoint(5, timeout_s=120)
    urgent = slurm.slurm("sbatch", "--parsable", "-purgent", "-N2", "--exclusive", "-o/dev/null", "--wrap=sleep 600")
    wait_for(lambda: slurm.job_state(urgent) == "RUNNING", 120, run.log)

    account = told(run)
    assert (account["class"], account["state"]) == (None, "stopped")
    assert account["what"].endswith(SIGNALS_OF_AN_END)
    stopped_at = run.events("stop")[0].step
    slurm.slurm("scancel", urgent)
    wait_for(lambda: run.events("resume"), 120, run.log)
    assert run.events("resume")[0].step == stopped_at
    for job in run.jobs:
        slurm.slurm("scancel", job)
    run.wait(120)


@pytest.mark.parametrize(
    ("make_disk", "error"), [(small_disk, "storage-away"), (disk_with_quota, "disk-quota")], ids=["full", "quota"]
)
def test_storage_that_stays_full_puts_the_next_start_off(
    cluster: StartCluster,
    tiny_config: MakeConfig,
    faulty_python: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    make_disk: Callable[[Path, int], AbstractContextManager[Path]],
    error: str,
) -> None:
    if not can_mount() or shutil.which("mkfs.btrfs") is None:
        pytest.skip("needs to mount disks, and btrfs-progs")
    overrides = dict(override.split("=") for override in PATIENCE)
    with make_disk(tmp_path / "run" / "checkpoints", 6) as disk:  # before the machines boot, which then see it
        monkeypatch.setenv(FAULT, f"if not os.path.exists({str(tmp_path / 'once')!r}): {FILL}")
        monkeypatch.setenv("FILL", f"touch {tmp_path / 'once'}; {fill_command(disk)}")
        slurm = cluster(2)
        run = submit_with(slurm, tiny_config("run", **SETTINGS, **overrides), faulty_python)
        wait_for(lambda: run.verdicts(), 300, run.log)

        account = told(run)
        assert account["class"] == error, run.log()
        assert run.verdicts() == ["later"]
        wait_for(lambda: f"{run.jobs[0]} PENDING BeginTime" in run.queue(), 60, run.queue)
        slurm.slurm("scancel", *run.jobs)
        run.wait(60)
