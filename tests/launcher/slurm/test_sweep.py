"""Check that a sweep is one run for each combination of values, each with a run folder of its own."""

from __future__ import annotations

import pytest

from electra_dist.errors import UserError
from launcher.slurm.sweep import command_of_run, sweep


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
