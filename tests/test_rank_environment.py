"""Environment variables of a launcher that cannot be right end in one line and exit code 78, before anything waits."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.real_runs import REPOSITORY

from electra_dist.engine.rank_environment import RankPlace, check_device, check_meeting, rank_place, whole_number
from electra_dist.errors import UserError

GROUP = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_SIZE": "2", "MASTER_PORT": "29500"}
NOT_NUMBERS = ("abc", "", "-1", "1.5", "0x10", "1e3", "\u00b2", "\u0661", "9" * 5000, "1 2", "nan")


def test_the_place_of_a_rank_is_what_the_launcher_says() -> None:
    assert rank_place(GROUP) == RankPlace(rank=1, world_size=4, local_rank=1, ranks_on_node=2)
    assert rank_place(GROUP).has_several_nodes
    assert rank_place({}) == RankPlace(rank=0, world_size=1, local_rank=0, ranks_on_node=1)
    assert not rank_place({}).has_several_nodes
    torchrun = {**GROUP, "LOCAL_WORLD_SIZE": "4"}
    del torchrun["LOCAL_SIZE"]
    assert rank_place(torchrun).ranks_on_node == 4


@pytest.mark.parametrize("name", [*GROUP, "LOCAL_WORLD_SIZE"])
def test_a_value_that_is_no_number_is_refused_by_name(name: str) -> None:
    for value in NOT_NUMBERS:
        group = {**GROUP, name: value}
        if name == "LOCAL_WORLD_SIZE":
            del group["LOCAL_SIZE"]
        with pytest.raises(UserError, match=f"environment: {name} is ") as error:
            rank_place(group)
        assert len(str(error.value)) < 500 and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"RANK": "4"}, "RANK is 4, but WORLD_SIZE is 4"),
        ({"RANK": "7", "WORLD_SIZE": "2"}, "RANK is 7, but WORLD_SIZE is 2"),
        ({"WORLD_SIZE": "0"}, "RANK is 1, but WORLD_SIZE is 0"),
        ({"LOCAL_SIZE": "0"}, "LOCAL_SIZE is 0"),
        ({"LOCAL_SIZE": "5"}, "LOCAL_SIZE is 5, but WORLD_SIZE is 4"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK is 2, but LOCAL_SIZE is 2"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT is 65536"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT is 0"),
    ],
)
def test_values_that_contradict_each_other_are_refused(changes: dict[str, str], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        rank_place({**GROUP, **changes})


def test_names_of_machines_and_devices_and_counts_of_slurm_are_checked() -> None:
    check_meeting("127.0.0.1")
    for host in ("no machine", "x" * 70, "a..b", ""):
        with pytest.raises(UserError, match="MASTER_ADDR"):
            check_meeting(host)
    with pytest.raises(UserError, match="WORLD_SIZE is 2, but RANK is not set"):
        check_meeting("127.0.0.1", {"WORLD_SIZE": "2"})
    check_device({"DS_ACCELERATOR": "cpu"})
    with pytest.raises(UserError, match="DS_ACCELERATOR is 'tpu'; set it to cuda or cpu"):
        check_device({"DS_ACCELERATOR": "tpu"})
    with pytest.raises(UserError, match=r"SLURM_NNODES is '2\(x3\)'"):
        whole_number("SLURM_NNODES", 1, {"SLURM_NNODES": "2(x3)"})


@pytest.mark.parametrize(
    ("program", "variables"),
    [
        ("electra_launcher.pretrain", {"RANK": "abc"}),
        ("electra_launcher.pretrain", {"RANK": "2", "WORLD_SIZE": "2"}),
        ("electra_launcher.pretrain", {"LOCAL_RANK": "gpu0"}),
        ("electra_launcher.preflight", {"WORLD_SIZE": "two"}),
        ("electra_launcher.preflight", {"RANK": "x"}),
        ("electra_launcher.supervise", {"DS_ACCELERATOR": "tpu"}),
    ],
)
def test_a_start_with_such_a_variable_ends_with_78_and_one_line(
    tiny_config: Callable[..., Path], tmp_path: Path, program: str, variables: dict[str, str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", program, "--config", str(tiny_config())],
        env={**os.environ, **variables},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 78, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: environment: ") and next(iter(variables)) in line
    assert not (tmp_path / "run").exists()
