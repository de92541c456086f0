"""Check that storage faults and a Slurm controller that is away end no chain of jobs, and change no loss."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from machines import wait_for
from slurm import SlurmCluster
from submitted import SubmittedRun, submit
from support.real_runs import read_losses, step_records, write_corpus
from support.s3_server import make_bucket, running_s3
from support.small_disks import freezable_disk

MakeConfig = Callable[..., Path]
StartCluster = Callable[..., SlurmCluster]
FLOOR_S = 20.0  # limit of a step, longer than any step takes on a busy machine
AWAY_S = 1.75 * FLOOR_S  # length of each fault
CRASHED = {
    "train.num_steps": 600,
    "checkpoint.every_steps": 20,
    "data.heldout": None,
}  # settings of the runs that a test kills once


class Relay:
    """TCP relay that makes a server on this machine reachable for the machines of the cluster, and can cut it off."""

    def __init__(self, address: str, upstream: str) -> None:
        """Prepare a relay that refuses connections until `open` is called.

        Args:
            address: IP address to listen on, which the machines of the cluster can reach; the port is a free one.
            upstream: URL of the server, which may listen on another address only.
        """
        self._upstream = (urlsplit(upstream).hostname, urlsplit(upstream).port)
        self._listener: socket.socket | None = None
        self._connections: list[socket.socket] = []
        with socket.socket() as probe:
            probe.bind((address, 0))
            self._address = probe.getsockname()

    @property
    def url(self) -> str:
        """URL under which clients reach the server through this relay."""
        return "http://{}:{}".format(*self._address)

    def open(self) -> None:
        """Accept connections from now on, in a thread, and connect each of them with the server."""
        self._listener = socket.create_server(self._address, backlog=64)
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def close(self) -> None:
        """Break all connections, and refuse new ones until `open` is called."""
        if self._listener is not None:
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._connections = []

    def _accept(self, listener: socket.socket) -> None:
        """Connect each client with the server until the listener is closed; the body of a thread."""
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                server = socket.create_connection(self._upstream)
                self._connections += [client, server]
                for source, target in ((client, server), (server, client)):
                    threading.Thread(target=self._copy, args=(source, target), daemon=True).start()

    @staticmethod
    def _copy(source: socket.socket, target: socket.socket) -> None:
        """Copy bytes from one connection to another until the source is closed; the body of a thread."""
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


@pytest.fixture
def run_disk(tmp_path: Path) -> Iterator[Path]:
    """The folder of the run, which is a disk of its own; it is mounted before the machines boot and see it."""
    with freezable_disk(tmp_path / "cut", 400) as disk:
        yield disk


@contextlib.contextmanager
def read_only(disk: Path) -> Iterator[None]:
    """Make a disk read-only on all machines during a `with` block."""
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    try:
        yield
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)


@contextlib.contextmanager
def frozen(disk: Path) -> Iterator[None]:
    """Make every write to a disk block during a `with` block, and finish after it."""
    subprocess.run(["fsfreeze", "--freeze", str(disk)], check=True)
    try:
        yield
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", str(disk)], check=True)


def report_next_step(run: SubmittedRun, fault: str) -> None:
    """Wait for a new step after a fault has just ended, for up to 10 minutes, and print the seconds.

    Steps that a start repeats are not new.
    """
    ended_at = time.monotonic()
    num_steps = len(step_records(run.folder))
    wait_for(lambda: len(step_records(run.folder)) > num_steps, 600, run.log)
    print(f"{fault}: the next step came {time.monotonic() - ended_at:.1f} s after the fault's end")


def report_status(run: SubmittedRun, fault: str) -> str:
    """Print and return what `electra-dist status` says during a fault."""
    status = run.status()
    print(f"{fault}, status:\n{status}")
    return status


def wait_for_steps(run: SubmittedRun, count: int) -> None:
    """Wait until the run has recorded `count` more steps than now, for up to 10 minutes, because starts are slow."""
    wanted = len(step_records(run.folder)) + count
    wait_for(lambda: len(step_records(run.folder)) >= wanted, 600, run.log)


def kill_training(slurm: SlurmCluster, run: SubmittedRun) -> None:
    """Kill the supervisor and the ranks on node n1 with SIGKILL, as the kernel does if memory runs out."""
    for process in slurm.processes("n1", "electra_launcher.supervise"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    wait_for(lambda: not slurm.processes("n1", "electra_launcher.supervise"), 60, run.log)


def test_a_chain_outlives_a_read_only_folder_s3_that_refuses_and_a_folder_that_hangs(
    run_disk: Path, cluster: StartCluster, tiny_config: MakeConfig, pretrain: Callable[..., object], tmp_path: Path
):
    slurm = cluster(1)
    settings = {
        "train.num_steps": 600,
        "checkpoint.every_steps": 20,
        "cluster.hang_step_floor_s": FLOOR_S,
        "data.heldout": None,
    }
    write_corpus(str(tmp_path / "corpus"), [16] * 20)
    with running_s3("moto") as server:
        os.environ.update(server.env)  # sbatch passes the environment on
        bucket = make_bucket(server.endpoint_url, server.env, "drill")
        write_corpus(f"{bucket}/corpus", [16] * 20, endpoint_url=server.endpoint_url)
        relay = Relay(slurm.head_address, server.endpoint_url)
        config = tiny_config(
            "cut",
            **settings,
            **{
                "data.corpus": f"{bucket}/corpus",
                "data.endpoint_url": relay.url,
                "checkpoint.endpoint_url": relay.url,
                "checkpoint.targets": [f"{bucket}/checkpoints"],
            },
        )
        slurm.slurm("scontrol", "update", "partition=batch", "state=down")
        run = submit(slurm, config, "--nodes", "1", "--gpus-per-node", "0", "--chain", "4")
        with read_only(run_disk):
            slurm.slurm("scontrol", "update", "partition=batch", "state=up")
            time.sleep(AWAY_S)
            assert len(run.queue().splitlines()) == 4, run.queue()
            assert "read-only file system" in report_status(run, "read-only run folder")
        writable_at = time.monotonic()
        wait_for(lambda: "waiting up to" in run.log(), 120, run.log)  # S3 refuses when the first link begins
        print(
            f"read-only run folder: preflight reached S3 {time.monotonic() - writable_at:.1f} s after the fault's end"
        )
        time.sleep(AWAY_S)
        assert "rank 0 on n1 waits for" in report_status(run, "S3 refuses the first link")
        relay.open()
        report_next_step(run, "S3 refuses the first link")
        wait_for_steps(run, 30)
        relay.close()
        time.sleep(AWAY_S)
        num_steps = len(step_records(run.folder))
        assert ": living" in report_status(run, "S3 away during training")
        assert len(step_records(run.folder)) == num_steps  # it needs rows, and waits
        relay.open()
        report_next_step(run, "S3 away during training")
        wait_for_steps(run, 30)
        with frozen(run_disk):
            time.sleep(AWAY_S)
            assert ": living" in report_status(run, "run folder hangs")
        report_next_step(run, "run folder hangs")
        wait_for_steps(run, 30)
        run.wait(600)
        relay.close()
    assert run.verdicts() == ["done"], run.log()
    assert len(run.nodes()) == 1  # one link of four
    assert "hung: rank" not in run.log()
    assert [event.attempt for event in [*run.events("start"), *run.events("resume")]] == [1]
    pretrain(tiny_config("uncut", **settings, **{"data.corpus": str(tmp_path / "corpus")}), 1)
    assert read_losses(run.folder) == read_losses(tmp_path / "uncut")


def test_a_controller_that_is_away_when_a_job_ends_ends_no_run(
    cluster: StartCluster, tiny_config: MakeConfig, pretrain: Callable[..., object], tmp_path: Path
):
    slurm = cluster(1)
    run = submit(slurm, tiny_config("cut", **CRASHED), "--nodes", "1", "--gpus-per-node", "0")
    run.wait_for_checkpoint(40, 300)
    slurm.stop_daemon("slurmctld")
    kill_training(slurm, run)
    wait_for(lambda: run.verdicts() == ["again"], 120, run.log)
    time.sleep(30)
    assert "queue       unknown" in report_status(run, "controller away at the end of a job")
    subprocess.run(["slurmctld"], check=True, capture_output=True)
    report_next_step(run, "controller away at the end of a job")
    run.wait(300)
    assert run.verdicts() == ["again", "done"], run.log()
    pretrain(tiny_config("uncut", **CRASHED), 1)
    assert read_losses(run.folder) == read_losses(tmp_path / "uncut")


def test_a_standby_job_takes_over_where_jobs_cannot_be_requeued(
    cluster: StartCluster, tiny_config: MakeConfig, pretrain: Callable[..., object], tmp_path: Path
):
    slurm = cluster(1)
    run = submit(slurm, tiny_config("cut", **CRASHED), "--nodes", "1", "--gpus-per-node", "0")
    run.wait_for_checkpoint(40, 300)
    slurm.slurm("scontrol", "update", f"JobId={run.jobs[0]}", "Requeue=0")  # as on sites that forbid requeues
    kill_training(slurm, run)
    report_next_step(run, "requeue forbidden")
    assert f"link        {run.jobs[0]}: again: crash" in report_status(run, "requeue forbidden")
    run.wait(400)
    assert run.verdicts() == ["again", "done"], run.log()
    assert "the standby job takes over" in run.log()
    assert run.events("resume")
    pretrain(tiny_config("uncut", **CRASHED), 1)
    assert read_losses(run.folder) == read_losses(tmp_path / "uncut")
