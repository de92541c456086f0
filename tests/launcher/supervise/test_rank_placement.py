"""Placement of ranks on nodes: the command of each node, host files, and contradictory options."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from deepspeed.launcher.runner import fetch_hostfile

from electra_dist.errors import UserError
from launcher.supervise import rank_placement
from launcher.supervise.rank_placement import Placement


def place(**options: Any) -> Placement:
    """Return the placement that these command-line options ask for."""
    asked = {"nodes": None, "node": 0, "ranks_per_node": None, "address": None, "port": None, "hostfile": None}
    return Placement.from_options(**{**asked, **options})


def test_one_machine_needs_no_host_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    command = place(ranks_per_node=2).command(tmp_path, 4711, ["--config", "c.yaml"])
    assert command[:5] == [sys.executable, "-m", "deepspeed.launcher.runner", "--master_port", "4711"]
    assert command[5:7] == ["--num_gpus", "2"] and "--hostfile" not in command
    assert command[-2:] == ["--config", "c.yaml"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert len(place().ranks) == 2
    assert "--num_gpus" not in place().command(tmp_path, 1, [])  # with --num_gpus, deepspeed would use GPUs 0 and 1


@pytest.mark.parametrize("visible", ["GPU-8f6d1c2a,GPU-01", "MIG-8f6d1c2a", "17,3", "-1", ""])
def test_deepspeed_does_not_read_the_visible_devices(
    visible: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    command = place().command(tmp_path, 1, ["--config", "c.yaml"])
    resources = fetch_hostfile(command[command.index("--hostfile") + 1])
    assert resources == {"node-0": max(1, len([name for name in visible.split(",") if name not in ("", "-1")]))}
    assert command[-3:] == [f"--visible-devices={visible}", "--config", "c.yaml"]


def test_each_node_of_several_starts_its_own_ranks_without_ssh(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("# the second one is smaller\n gpu-a slots=8\n\ngpu-b  slots=4\ngpu-c slots=8 # new\n")
    third = place(hostfile=hostfile, node=2, address="gpu-a")
    assert third.ranks == range(12, 20) and third.port == 29500
    command = third.command(tmp_path, 29507, [])
    given = dict(zip(command[3::2], command[4::2]))
    assert given["--master_port"] == "29507"
    assert (tmp_path / "hostfile").read_text() == "node-0 slots=8\nnode-1 slots=4\nnode-2 slots=8\n"
    assert command[command.index("--no_ssh") + 1 :][:4] == ["--node_rank", "2", "--master_addr", "gpu-a"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"nodes": 2, "ranks_per_node": 1}, "--master-addr"),
        (
            {"nodes": 2, "node": 2, "ranks_per_node": 1, "address": "a"},
            "--node-rank 2 is not the number of one of the 2 nodes",
        ),
        ({"hostfile": "no such file"}, "no such file"),
        ({"hostfile": "a slots=2\nb"}, "'b' is not"),
        ({"hostfile": "# nobody\n"}, "names no host"),
        ({"hostfile": "a slots=2\nb slots=2\n", "nodes": 3, "address": "a"}, "names 2"),
    ],
)
def test_contradictory_options_are_refused(tmp_path: Path, options: dict, words: str) -> None:
    text = options.get("hostfile")
    if text:
        file = tmp_path / str(text).splitlines()[0].replace("/", "_")
        if "slots" in text or "#" in text:
            file.write_text(text)
        options = {**options, "hostfile": file}
    with pytest.raises(UserError, match=words):
        place(**options)


def test_gpus_are_counted_without_a_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    assert rank_placement.local_devices(tmp_path) == 2
    for visible, num_ranks in (("0,1,9", 2), ("1", 1), ("-1", 1), ("", 1), ("NoDevFiles", 1), ("0,0", 1)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert rank_placement.local_devices(tmp_path) == num_ranks, visible
