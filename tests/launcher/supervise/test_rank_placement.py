"""Placement of ranks on nodes: the variables of each rank, and contradictory options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from electra_launcher.supervise import rank_processes
from electra_launcher.supervise.rank_processes import Placement

from electra_dist.engine.rank_environment import RankPlace, rank_place
from electra_dist.errors import UserError


def place(**options: Any) -> Placement:
    """Return the placement that these command-line options ask for."""
    return Placement.from_options(
        **{"nodes": 1, "node": 0, "ranks_per_node": None, "address": None, "port": None, **options}
    )


def test_the_variables_of_a_rank_name_its_place_and_the_port_of_this_start() -> None:
    third = place(nodes=3, ranks_per_node=4, node=2, address="gpu-a")
    assert third.ranks == range(8, 12) and third.port == 29500 and third.names == "8 to 11 of 12"
    assert third.environment(10, 29507) == {
        "RANK": "10",
        "LOCAL_RANK": "2",
        "WORLD_SIZE": "12",
        "LOCAL_SIZE": "4",
        "MASTER_ADDR": "gpu-a",
        "MASTER_PORT": "29507",
    }
    found = rank_place(third.environment(10, 29507))
    assert found == RankPlace(rank=10, world_size=12, local_rank=2, ranks_on_node=4)


def test_one_node_needs_no_address_and_takes_any_port() -> None:
    only = place(ranks_per_node=2)
    assert only.port is None
    assert only.environment(1, 4711)["MASTER_ADDR"] == "127.0.0.1"


@pytest.mark.parametrize(
    ("gpus", "visible", "shown"), [(8, None, "0,1"), (2, None, None), (0, None, None), (8, "", None)]
)
def test_ranks_see_no_gpus_that_are_not_the_runs(
    gpus: int, visible: str | None, shown: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They sample the power and the health of all GPUs that they see; a variable of the user passes unchanged."""
    monkeypatch.setattr(rank_processes, "num_gpus", lambda: gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert place(ranks_per_node=2).environment(1, 7000).get("CUDA_VISIBLE_DEVICES") == shown


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"nodes": 2, "ranks_per_node": 1}, "--master-addr"),
        (
            {"nodes": 2, "node": 2, "ranks_per_node": 1, "address": "a"},
            "--node-rank 2 is not the number of one of the 2 nodes",
        ),
        ({"nodes": 0}, "at least 1"),
        ({"ranks_per_node": 0}, "at least 1"),
        ({"port": 65500}, "--master-port 65500"),
    ],
)
def test_contradictory_options_are_refused(options: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        place(**options)


def test_gpus_are_counted_without_a_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    assert rank_processes.local_devices(tmp_path) == 2
    for visible, num_ranks in (("0,1,9", 2), ("1", 1), ("-1", 1), ("", 1), ("NoDevFiles", 1), ("0,0", 1)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert rank_processes.local_devices(tmp_path) == num_ranks, visible
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8f6d1c2a,GPU-01")
    assert len(place().ranks) == 2
