"""Silent ranks: found whatever wall clocks do, unless the run folder that cannot be written explains their silence."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from electra_launcher.supervise import hangs
from electra_launcher.supervise.hangs import FirstSeen, FolderWatch, SilenceWatch, probe_folder
from hypothesis import given
from hypothesis import strategies as st
from support.small_disks import can_mount, freezable_disk
from support.supervised_runs import FAKE, supervised

from electra_dist.config import ClusterConfig
from electra_dist.run.heartbeat import Beat, Heartbeat, Phase, hung

FLOOR_S = 2.0
LOOK_S = 0.5
DAY_S = 86_400.0


class FakeClock:
    """Clock whose time, in seconds, a test sets."""

    def __init__(self) -> None:
        """Create the clock at 100 s."""
        self.now = 100.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


def beat_at(sent: float, since: float, phase: Phase = "step", step: int = 7) -> Beat:
    """Return a heartbeat of rank 0 with these Unix times."""
    return Beat(pid=9, host="a", rank=0, attempt=1, phase=phase, step=step, time=sent, phase_since=since, step_s=1.0)


PAUSES = st.integers(1, 1280).map(lambda number: number / 64)  # sums of them are exact
JUMPS = st.sampled_from([0.0, 0.0, 0.0, 3600.0, -3600.0, DAY_S, -DAY_S])


@given(st.lists(st.tuples(PAUSES, JUMPS, st.booleans()), min_size=1, max_size=12))
def test_a_heartbeat_is_dated_by_the_look_that_first_finds_it_whatever_the_wall_clocks_do(
    events: list[tuple[float, float, bool]],
) -> None:
    clock = FakeClock()
    seen = FirstSeen()
    wall_offset = 1.7e9
    phase_began = clock.now + wall_offset
    for number, (pause, jump, begins_phase) in enumerate(events):
        clock.now += pause
        wall_offset += jump
        sent = clock.now + wall_offset
        if begins_phase:
            phase_began = sent
        beat = beat_at(sent, phase_began, step=number)
        first_look = clock.now
        for _ in range(3):
            (dated,) = seen.date([beat], clock.now)
            assert dated.time == first_look
            assert dated.phase_since <= dated.time
            assert (dated.phase_since == dated.time) == begins_phase
            clock.now += LOOK_S


def test_the_wait_of_a_rank_for_storage_counts_from_the_first_look_at_it() -> None:
    clock = FakeClock()
    seen = FirstSeen()
    for clock.now in (100.0, 100.5, 101.0):
        (dated,) = seen.date([beat_at(clock.now + 1e9, 7.0, "storage")], clock.now)
    assert dated.time == 101.0
    assert 99.9 < dated.phase_since < 100.0


def test_a_clock_that_jumps_neither_hides_a_hang_nor_makes_one() -> None:
    cluster = ClusterConfig(hang_step_floor_s=30.0)
    for jump in (0.0, 3600.0, -3600.0, DAY_S, -DAY_S):
        clock = FakeClock()
        seen = FirstSeen()
        seen.date([beat_at(1.7e9, 1.6e9, step=6)], clock.now)
        clock.now = 101.0
        newest = beat_at(1.7e9 + 1.0 + jump, 1.6e9)
        silences = []
        while not silences:
            clock.now += LOOK_S
            silences = hung(seen.date([newest], clock.now), clock.now, cluster)
            assert clock.now < 140.0
        assert clock.now == 132.0  # first seen at 101.5


def test_the_heartbeats_of_other_nodes_are_read_only_while_a_rank_has_been_silent_for_a_quarter_of_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[int] | None] = []
    read_heartbeats = hangs.read_heartbeats

    def counted(run_dir: Path, ranks: Iterable[int] | None = None) -> list[Beat]:
        asked.append(None if ranks is None else sorted(ranks))
        return read_heartbeats(run_dir, ranks)

    monkeypatch.setattr(hangs, "read_heartbeats", counted)
    clock = FakeClock()
    monkeypatch.setattr(hangs.time, "monotonic", clock)
    watch = SilenceWatch(tmp_path, 0, ClusterConfig(hang_setup_s=100.0), print)
    for rank in (0, 1):
        Heartbeat(tmp_path, rank, attempt=1)
    alive = {0: os.getpid()}
    for clock.now in (100.0, 124.0, 125.5):
        assert watch.find_hung(alive, started=100.0) == []
    assert asked == [[0], [0], [0], None]


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
