"""Processes of any name are found; the kernel lets a process have any bytes as its name."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from electra_dist.run.this_node import is_alive, node_name, status_field


@pytest.fixture(params=[r"\377\376", r"\013State:\tZ", r"a) Z 1", r"\302\205State:\tZ"])
def pid(request: pytest.FixtureRequest) -> Iterator[int]:
    """A living process with an odd name, which may look like another line of /proc/PID/status."""
    script = f"printf '{request.param}' >/proc/$$/comm; echo ready; read line"
    with subprocess.Popen(["bash", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process.pid
        process.stdin.close()


def test_a_process_with_an_odd_name_is_alive(pid: int):
    assert is_alive(pid)
    assert status_field(pid, "Pid") == str(pid)


def test_the_name_of_a_node_can_be_printed_and_stored(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    monkeypatch.setattr("socket.gethostname", lambda: b"n\xff".decode(errors="surrogateescape"))
    assert node_name({}).encode() == "n\N{REPLACEMENT CHARACTER}".encode()


def test_the_node_has_slurms_name_in_a_slurm_job_and_otherwise_the_host_name():
    assert node_name({"SLURMD_NODENAME": "gpu-017"}) == "gpu-017"

    name_without_slurm = node_name({})
    assert name_without_slurm != ""
    assert node_name({"SLURMD_NODENAME": ""}) == name_without_slurm
