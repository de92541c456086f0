"""Check that a run folder that cannot be written explains silent ranks, and that silence counts anew afterwards."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.small_disks import can_mount, freezable_disk
from support.supervised_runs import FAKE, supervised

from launcher.supervise.hangs.folder_watch import FolderWatch, probe_folder

FLOOR_S = 2.0


class FakeClock:
    """Clock whose time, in seconds, a test sets."""

    def __init__(self) -> None:
        """Create the clock at 100 s."""
        self.now = 100.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


def test_a_folder_that_hangs_explains_silence_until_the_patience_ends() -> None:
    answers = threading.Event()
    log: list[str] = []
    clock = FakeClock()

    def probe() -> str:
        """Find the folder writable, but only after the test has set `answers`."""
        answers.wait(60)
        return ""

    watch = FolderWatch(probe, patience_s=50.0, log=log.append, clock=clock)
    assert watch.explains_silence()
    clock.now = 149.0
    assert watch.explains_silence()
    assert watch.back_since == float("-inf")
    clock.now = 151.0
    assert not watch.explains_silence()
    answers.set()
    clock.now = 160.0
    assert watch.explains_silence()
    assert watch.back_since == 160.0
    assert not watch.is_away
    assert not watch.explains_silence()  # The folder answers, and did at the last call: the ranks are at fault.
    assert len(log) == 2
    assert "no answer; waiting up to 50 s" in log[0]


def test_a_read_only_folder_explains_silence_and_its_reason_is_logged_once() -> None:
    answers = ["read-only file system", "read-only file system", "", ""]
    log: list[str] = []
    watch = FolderWatch(lambda: answers.pop(0), patience_s=50.0, log=log.append)
    assert [watch.explains_silence() for _ in range(4)] == [True, True, True, False]
    assert len(log) == 2
    assert "read-only file system" in log[0]


def test_a_supervisor_that_did_not_run_begins_to_count_anew() -> None:
    clock = FakeClock()
    log: list[str] = []
    watch = FolderWatch(lambda: "", patience_s=50.0, log=log.append, clock=clock)
    for clock.now in (101.0, 102.0, 106.0):
        watch.round_begins()
    assert watch.back_since == float("-inf")
    clock.now = 156.0
    watch.round_begins()
    assert watch.back_since == 156.0
    assert len(log) == 1
    assert "did not run for 50 s" in log[0]


def test_a_folder_that_takes_bytes_has_no_problem(tmp_path: Path) -> None:
    file = tmp_path / "supervise-0.log"
    file.touch()
    assert probe_folder(tmp_path, file) == ""
    assert probe_folder(tmp_path, tmp_path / "missing") == ""


@pytest.mark.skipif(not can_mount(), reason="needs root and the right to mount a file system")
def test_a_run_folder_that_hangs_for_longer_than_the_limit_of_a_step_is_no_hung_rank(
    tiny_config: Callable[..., Path], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    settings = {"train.num_steps": 100, "cluster.hang_step_floor_s": FLOOR_S}
    with freezable_disk(run_dir) as disk:
        config = tiny_config(**settings)
        with supervised(FAKE, config, run_dir, "--gpus-per-node", "2") as run:
            run.wait_for_step(10)
            subprocess.run(["fsfreeze", "--freeze", disk], check=True)
            try:
                time.sleep(3 * FLOOR_S)
            finally:
                subprocess.run(["fsfreeze", "--unfreeze", disk], check=True)
            assert run.end(60) == 0, run.story()
            assert run.starts() == 1, run.story()
            assert run.logged("no heartbeats: the run folder: no answer")
