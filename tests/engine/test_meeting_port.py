"""Ranks of one node meet at the next free port if that of their launcher is in use."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from electra_dist.engine import meeting_port
from electra_dist.engine.meeting_port import agreed_port, free_port_from, is_free
from electra_dist.errors import UserError
from launcher.supervise.rendezvous import Rendezvous

MEET = """
import os, sys
from electra_dist.engine.process_group import init_distributed
import torch, torch.distributed as dist
init_distributed()
total = torch.tensor(1 + dist.get_rank())
dist.all_reduce(total)
print(os.environ["MASTER_PORT"], int(total), flush=True)
dist.destroy_process_group()
"""


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A server that listens on all addresses of this host, at a port whose successor is free."""
    while True:
        server = socket.create_server(("", 0))
        if is_free(server.getsockname()[1] + 1):
            yield server
            server.close()
            return
        server.close()


@pytest.mark.multiproc
def test_two_ranks_meet_beside_a_server_at_their_port(listener: socket.socket, tmp_path: Path) -> None:
    """The ranks are children of this process, as those of a run are of DeepSpeed's launcher."""
    port = listener.getsockname()[1]
    ranks = []
    for rank in ("0", "1"):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_SIZE": "2", "TMPDIR": str(tmp_path)}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks.append(
            subprocess.Popen([sys.executable, "-c", MEET], env={**os.environ, **place}, stdout=subprocess.PIPE)
        )
    outputs = [rank.communicate(timeout=180)[0].decode().split()[-2:] for rank in ranks]
    chosen = {output[0] for output in outputs}
    assert len(chosen) == 1 and int(chosen.pop()) > port
    assert [output[1] for output in outputs] == ["3", "3"]
    assert list(tmp_path.glob("electra-dist-port-*")) == []


def test_the_first_free_port_from_the_given_one_is_taken(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = listener.getsockname()[1]
    assert not is_free(port)
    assert free_port_from(port) == port + 1
    assert free_port_from(0) == 0
    monkeypatch.setattr(meeting_port, "_MOST_TRIALS", 1)
    with pytest.raises(UserError, match=f"MASTER_PORT {port} .* --master_port"):
        free_port_from(port)


def test_the_port_of_ranks_on_several_nodes_stays(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    port = str(listener.getsockname()[1])
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_SIZE": "2", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    with agreed_port():
        assert os.environ["MASTER_PORT"] == port


def test_a_supervisor_announces_a_port_that_is_free_on_its_node(listener: socket.socket, tmp_path: Path) -> None:
    in_use = listener.getsockname()[1]
    turn_of_first_start = 2  # the first start of a job skips a number
    node_0 = Rendezvous(tmp_path, node=0, port=in_use - turn_of_first_start)
    assert node_0.start(lambda: False, 1) == in_use + 1
    # The turn of the second start is the port at which ranks of the first one may still try to meet.
    assert node_0.start(lambda: False, 1) not in (in_use, in_use + 1)


def test_the_port_of_one_group_is_not_taken_for_that_of_another_with_the_same_parent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One process launches two runs; rank 1 of the second waits for its own rank 0, not for the file of the first."""
    monkeypatch.setattr(meeting_port.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(meeting_port, "_PATIENCE_S", 0.1)
    ports = [free_port_from(21_000), free_port_from(22_000)]
    group = {"WORLD_SIZE": "2", "LOCAL_SIZE": "2"}
    for name, value in {**group, "RANK": "0", "MASTER_PORT": str(ports[0])}.items():
        monkeypatch.setenv(name, value)
    with agreed_port():
        for name, value in {"RANK": "1", "MASTER_PORT": str(ports[1])}.items():
            monkeypatch.setenv(name, value)
        with agreed_port():
            assert os.environ["MASTER_PORT"] == str(ports[1])
