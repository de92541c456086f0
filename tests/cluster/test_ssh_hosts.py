"""Two hosts with their own addresses, joined by ssh: `deepspeed --hostfile`, and a cut of the link between them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from machines import SSH_PACKAGES, Machines, missing, wait_for
from support.real_runs import REPOSITORY, kill_session, read_losses, step_records

MakeConfig = Callable[..., Path]
SETTINGS = {"train.num_steps": 400, "checkpoint.every_steps": 20, "data.heldout": None}
QUICK = {"cluster.hang_step_floor_s": 4.0, "cluster.hang_setup_s": 60.0}  # 5 learned step times, but never below 4 s


@pytest.fixture
def hosts(shared_folder: Path, network: int) -> Iterator[Machines]:
    if reason := missing(SSH_PACKAGES):
        pytest.skip(reason)
    with Machines(shared_folder / "hosts", 2, network=network, ssh=True) as machines:
        (shared_folder / "hostfile").write_text("n1 slots=1\nn2 slots=1\n")
        # pdsh passes on only some variables; deepspeed reads the others from this file in the current folder.
        (shared_folder / ".deepspeed_env").write_text("DS_ACCELERATOR=cpu\nOMP_NUM_THREADS=1\n")
        yield machines


@contextmanager
def typed_on(host: str, hosts: Machines, folder: Path, command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A command typed on one of the hosts, in the shared folder; everything is gone at the end of the block."""
    with open(folder / "log", "ab") as log:
        inside = hosts.inside(host, "env", f"-C{folder}", *command)
        process = subprocess.Popen(inside, stdout=log, stderr=log, start_new_session=True)
    try:
        yield process
    finally:
        kill_session(process.pid)
        process.wait()


def deepspeed(folder: Path, config: Path) -> list[str]:
    runner = [str(Path(sys.executable).parent / "deepspeed"), "--hostfile", str(folder / "hostfile")]
    return [*runner, str(REPOSITORY / "launcher" / "pretrain.py"), "--config", str(config)]


def supervised(config: Path) -> list[str]:
    """pdsh puts each host's number, from 0, in the place of %n."""
    command = f"cd {REPOSITORY}; DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 PYTHONPATH={os.environ.get('PYTHONPATH', '')} "
    command += (
        f"{sys.executable} -m electra_launcher.supervise --config {config} --nodes 2 --node-rank %n --master-addr n1"
    )
    return ["env", "PDSH_RCMD_TYPE=ssh", "pdsh", "-S", "-w", "n1,n2", command]


def uncut_losses(config: Path, pretrain: Callable[..., object]) -> list[tuple]:
    pretrain(config, 2)
    return read_losses(config.with_suffix(""))


def test_hostfile_run_survives_a_short_cut_by_itself_with_the_losses_of_one_machine(
    hosts: Machines, shared_folder: Path, tiny_config: MakeConfig, pretrain: Callable[..., object]
):
    config = tiny_config("two-hosts", **SETTINGS)
    run = config.with_suffix("")
    with typed_on("n1", hosts, shared_folder, deepspeed(shared_folder, config)) as process:
        wait_for(lambda: len(step_records(run)) >= 20, 120, lambda: (shared_folder / "log").read_text())
        hosts.cut("n2")
        cut = time.monotonic()
        time.sleep(3)
        hosts.heal()
        stood = len(step_records(run))
        wait_for(lambda: len(step_records(run)) > stood, 60, lambda: (shared_folder / "log").read_text())
        print(f"cut of 3 s: the next step came {time.monotonic() - cut:.1f} s after the cut")
        assert process.wait(timeout=180) == 0, (shared_folder / "log").read_text()[-3000:]
    assert read_losses(run) == uncut_losses(tiny_config("one-machine", **SETTINGS), pretrain)


def test_supervised_hosts_notice_a_cut_and_start_again_with_the_losses_of_one_machine(
    hosts: Machines, shared_folder: Path, tiny_config: MakeConfig, pretrain: Callable[..., object]
):
    config = tiny_config("two-hosts", **SETTINGS, **QUICK)
    run = config.with_suffix("")

    def said() -> str:
        return (run / "supervise-0.log").read_text() if (run / "supervise-0.log").exists() else ""

    with typed_on("n1", hosts, shared_folder, supervised(config)) as process:
        wait_for(lambda: len(step_records(run)) >= 60, 120, lambda: (shared_folder / "log").read_text())
        hosts.cut("n2")
        cut = time.monotonic()
        wait_for(lambda: "hung" in said() or "restart" in said(), 60, lambda: (shared_folder / "log").read_text())
        print(f"cut to noticed: {time.monotonic() - cut:.1f} s")
        hosts.heal()
        stood = len(step_records(run))
        wait_for(lambda: len(step_records(run)) != stood, 120, lambda: (shared_folder / "log").read_text())
        print(f"cut to the first step again: {time.monotonic() - cut:.1f} s")
        process.wait(timeout=240)
    print(said())
    assert "exit code 0" in said(), (shared_folder / "log").read_text()[-3000:]
    assert read_losses(run) == uncut_losses(tiny_config("one-machine", **SETTINGS), pretrain)


def test_a_rank_that_is_killed_on_one_host_ends_the_other_host_too(
    hosts: Machines, shared_folder: Path, tiny_config: MakeConfig
):
    """What a person sees who has no supervisor: pdsh's exit code says so, and the same command goes on."""
    config = tiny_config("killed", **{**SETTINGS, "checkpoint.every_steps": 1000})
    run = config.with_suffix("")
    with typed_on("n1", hosts, shared_folder, deepspeed(shared_folder, config)) as process:
        wait_for(lambda: len(step_records(run)) >= 40, 120, lambda: (shared_folder / "log").read_text())
        for pid in hosts.processes("n2", "--local_rank"):
            os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        assert process.wait(timeout=60) != 0
        print(f"rank killed on n2 to the end of the command on n1: {time.monotonic() - killed:.1f} s")
    assert not hosts.processes("n1", "--local_rank")
