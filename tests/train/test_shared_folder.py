"""Real runs whose folder another start wants, or whose folder is lost while they train."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from support.real_runs import kill_session, quick_command, session_pids, step_records, wait_until

from electra_dist.run import lease
from electra_dist.run.folder import IDENTITY_FILE
from electra_dist.run.lease import read_owner
from electra_dist.run.this_node import node_name

MakeConfig = Callable[..., Path]
LONG = {"train.num_steps": 100_000, "checkpoint.every_steps": 50_000, "data.heldout": None}


class Begun(NamedTuple):
    """A run that trains, and the file with its output."""

    process: subprocess.Popen[bytes]
    output: Path

    def error_lines(self) -> list[str]:
        """Return the lines of the output that report an error; fail if there is a traceback."""
        text = self.output.read_text()
        assert "Traceback" not in text, text[-3000:]
        return [line for line in text.splitlines() if line.startswith("error: ")]


@contextlib.contextmanager
def begun(config: Path, run_dir: Path, ranks: int) -> Iterator[Begun]:
    """Start a run without a supervisor and wait for its first steps; kill what is left of it at the end."""
    output = config.with_suffix(".out")
    with output.open("wb") as out:
        process = subprocess.Popen(
            quick_command(config, ranks), stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        wait_until(lambda: len(step_records(run_dir)) >= 3, process)
        yield Begun(process, output)
    finally:
        kill_session(process.pid)
        process.wait()


def test_a_second_start_in_a_folder_is_refused_and_a_folder_that_is_moved_ends_the_first(
    tiny_config: MakeConfig, pretrain: Callable, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    config = tiny_config("run", **LONG)
    with begun(config, run_dir, ranks=1) as first:
        identity = (run_dir / IDENTITY_FILE).read_bytes()
        second = pretrain(config, 1, check=False)
        assert second.returncode == 78
        (line,) = second.stderr.splitlines()
        assert "another start trains in this folder: rank 0 on host" in line and f"pid {first.process.pid}" in line
        assert (run_dir / IDENTITY_FILE).read_bytes() == identity
        run_dir.rename(tmp_path / "elsewhere")
        assert first.process.wait(60) == 78
        (line,) = first.error_lines()
        assert "was deleted or moved" in line
        assert not run_dir.exists()


@pytest.mark.multiproc
def test_all_ranks_of_a_start_whose_folder_was_taken_end_with_78_and_one_line(
    tiny_config: MakeConfig, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    with begun(tiny_config("run", **LONG), run_dir, ranks=2) as run:
        ledger = (run_dir / "ledger.jsonl").read_bytes()
        assert lease.create(run_dir / "lease", 2, "supervisor") is not None
        assert run.process.wait(60) == 78
        (line,) = run.error_lines()
        assert f"taken over by another start: supervisor on host {node_name()}, pid {os.getpid()}" in line
        assert (run_dir / "ledger.jsonl").read_bytes() == ledger  # it belongs to the other start now


@pytest.mark.drill
@pytest.mark.multiproc
def test_a_second_interrupt_ends_all_ranks_and_releases_the_folder(tiny_config: MakeConfig, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with begun(tiny_config("run", **LONG), run_dir, ranks=2) as run:
        for _ in range(2):
            os.killpg(run.process.pid, signal.SIGINT)  # as a terminal does
        run.process.wait(60)
        wait_until(lambda: not session_pids(run.process.pid), run.process)
        assert run.error_lines() == []
        assert read_owner(run_dir) is None
