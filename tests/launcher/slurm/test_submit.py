"""Names of jobs, and sweeps: one run for each combination of values, each with a run folder of its own.

The rest of a submission is tested through `electra-dist submit` (tests/launcher/cli/test_submit.py).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from electra_launcher.slurm.slurm import job_name
from electra_launcher.slurm.submit import command_of_run, sweep

from electra_dist.errors import UserError


def test_two_run_folders_never_share_a_job_name():
    names = {job_name(Path(path)) for path in ("/a/run", "/b/run", "/a/r n", "/a/r:n", "/a/...")}
    assert len(names) == 5
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-.") for name in names)


def test_a_run_folder_whose_name_is_no_utf8_has_a_job_name_of_its_own() -> None:
    """Waiting jobs are found by the name that an earlier version gave them, so the names of other folders stay."""
    assert job_name(Path("/a/run")) == "run-ea75360d"
    names = {job_name(Path(os.fsdecode(path))) for path in (b"/a/run-\xff", b"/a/run-\xfe")}
    assert len(names) == 2 and all(name.startswith("run-") for name in names)


def test_every_combination_of_values_is_a_run_in_a_folder_of_its_own() -> None:
    assert sweep("runs/a", []) == [()]
    assert sweep("runs/a", ["seed=1, 2", "optimizer.lr=1e-4,2e-4"]) == [
        ("seed=1", "optimizer.lr=1e-4", "run_dir=runs/a-seed-1-lr-1e-4"),
        ("seed=1", "optimizer.lr=2e-4", "run_dir=runs/a-seed-1-lr-2e-4"),
        ("seed=2", "optimizer.lr=1e-4", "run_dir=runs/a-seed-2-lr-1e-4"),
        ("seed=2", "optimizer.lr=2e-4", "run_dir=runs/a-seed-2-lr-2e-4"),
    ]


@pytest.mark.parametrize("each", [["seed"], ["seed="], ["seed=1,"], ["=1"], ["run_dir=a,b"], ["seed=1,1"]])
def test_a_sweep_whose_runs_would_share_a_folder_or_have_no_values_is_refused(each: list[str]) -> None:
    with pytest.raises(UserError, match="--each"):
        sweep("runs/a", each)


def test_the_command_of_one_run_submits_that_run_alone() -> None:
    arguments = ["submit", "--each", "seed=1,2", "--nodes", "2", "--each=optimizer.lr=1e-4"]
    assert command_of_run(arguments, ("seed=2", "run_dir=a")) == [
        *("submit", "--nodes", "2"),
        *("--set", "seed=2", "--set", "run_dir=a"),
    ]
    assert command_of_run(["submit", "--nodes", "2"], ()) == ["submit", "--nodes", "2"]
