"""Ranks meet at the port that their launcher has named; one that is in use ends the start with a line for the user."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from electra_launcher.supervise.rendezvous import Rendezvous
from support.real_runs import REPOSITORY

from electra_dist.engine.rank_environment import check_port, is_free
from electra_dist.errors import UserError

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
def test_a_file_that_another_user_has_planted_sends_no_rank_to_another_port(tmp_path: Path) -> None:
    """An earlier version read the port from a file whose name follows from the process list."""
    with socket.create_server(("127.0.0.1", 0)) as attacker, socket.create_server(("127.0.0.1", 0)) as rank_0:
        port = rank_0.getsockname()[1]
        place = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_SIZE": "2"}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TMPDIR": str(tmp_path)}
        rank_1 = subprocess.Popen([sys.executable, "-c", MEET], env={**os.environ, **place}, stderr=subprocess.DEVNULL)
        try:
            launcher = psutil.Process(psutil.Process(rank_1.pid).ppid())
            name = f"electra-dist-port-{os.getuid()}-{launcher.pid}-{launcher.create_time():.2f}-{port}"
            prepared = tmp_path / "prepared"
            prepared.write_text(str(attacker.getsockname()[1]))
            prepared.chmod(0o644)
            if os.getuid() == 0:
                os.chown(prepared, 65534, 65534)
            prepared.rename(tmp_path / name)
            connected, _, _ = select.select([attacker, rank_0], [], [], 120)
        finally:
            rank_1.kill()
            rank_1.wait()
    assert connected == [rank_0]
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_port_in_use_is_one_line_that_names_the_option(
    listener: socket.socket, tiny_config: Callable[..., Path], tmp_path: Path
) -> None:
    port = listener.getsockname()[1]
    check_port(port + 1)
    check_port(0)
    with pytest.raises(UserError, match=f"port {port}, .* --master_port"):
        check_port(port)
    group = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "launcher" / "pretrain.py"), "--config", str(tiny_config())],
        env={**os.environ, **group, "MASTER_PORT": str(port)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 78, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert f"port {port}" in line and "--master_port" in line
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_supervisor_announces_a_port_that_is_free_on_its_node(listener: socket.socket, tmp_path: Path) -> None:
    in_use = listener.getsockname()[1]
    turn_of_first_start = 2  # the first start of a job skips a number
    node_0 = Rendezvous(tmp_path, node=0, port=in_use - turn_of_first_start)
    assert node_0.start(lambda: False, 1) == in_use + 1
    # The turn of the second start is the port at which ranks of the first one may still try to meet.
    assert node_0.start(lambda: False, 1) not in (in_use, in_use + 1)
