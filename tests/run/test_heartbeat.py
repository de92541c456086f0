"""Heartbeats of ranks: readers get whole records only, the step time is learned, and a beat is one write."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from electra_dist.errors import StoreError
from electra_dist.run import heartbeat
from electra_dist.run.folder import HEARTBEAT_DIR
from electra_dist.run.heartbeat import RECORD_BYTES, Beat, Heartbeat, read_heartbeats

START = 1_700_000_000.0  # Unix time at which the fixture `clock` begins
FILE_OF_RANK_0 = "rank-00000.json"


class Clock:
    """Time that a heartbeat sees, in Unix seconds; a test advances it."""

    now = START


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock that stands still until a test advances `clock.now`."""
    clock = Clock()
    monkeypatch.setattr(heartbeat.time, "time", lambda: clock.now)
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: clock.now)
    return clock


def test_the_newest_beat_of_each_rank_is_read_back_with_its_phase_step_and_times(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SLURMD_NODENAME", "gpu-017")
    assert read_heartbeats(tmp_path) == []

    heartbeat_of_11 = Heartbeat(tmp_path, 11, attempt=3)
    heartbeat_of_2 = Heartbeat(tmp_path, 2, attempt=3)
    clock.now = START + 7.5
    heartbeat_of_11.beat("checkpoint", 400)
    clock.now = START + 8.5
    heartbeat_of_11.beat("checkpoint", 400)

    beat_of_2, beat_of_11 = read_heartbeats(tmp_path)  # sorted by rank
    assert beat_of_2 == Beat(
        pid=os.getpid(),
        host="gpu-017",
        rank=2,
        attempt=3,
        phase="setup",
        step=0,
        time=START,
        phase_since=START,
        step_s=None,
    )
    assert beat_of_11.rank == 11
    assert beat_of_11.phase == "checkpoint"
    assert beat_of_11.step == 400
    assert beat_of_11.time == START + 8.5
    assert beat_of_11.phase_since == START + 7.5
    assert read_heartbeats(tmp_path, [11, 12]) == [beat_of_11]

    heartbeat_of_11.close()
    _, closed_beat_of_11 = read_heartbeats(tmp_path)
    assert closed_beat_of_11.phase == "done"
    heartbeat_of_2.close()


def test_the_step_time_is_the_median_of_the_newest_20_steps_without_the_first_steps_and_other_phases(
    tmp_path: Path, clock: Clock
):
    rank = Heartbeat(tmp_path, 0, 1)
    step = 0

    def step_time_after(num_steps: int, seconds: float) -> float | None:
        """Make steps of `seconds` each, and return the step time that a reader then sees."""
        nonlocal step
        for _ in range(num_steps):
            step += 1
            clock.now += seconds
            rank.beat("step", step)
        return read_heartbeats(tmp_path)[0].step_s

    # The first beat only begins the measurement, and the next five steps are exempt, because they compile.
    assert step_time_after(6, 90.0) is None
    assert step_time_after(1, 2.0) == 2.0
    assert step_time_after(19, 2.0) == 2.0

    # The first step after another phase is not measured, because its beginning is not recorded.
    rank.beat("checkpoint", step)
    clock.now += 1000.0
    assert step_time_after(1, 3.0) == 2.0

    # 11 of the newest 20 steps change the median; a single outlier does not.
    assert step_time_after(11, 3.0) == 3.0
    assert step_time_after(1, 500.0) == 3.0

    # Four steps between two beats count as one measurement of 2 s.
    clock.now += 8.0
    rank.beat("step", step + 4)
    assert read_heartbeats(tmp_path)[0].step_s == 3.0
    rank.close()


@pytest.mark.real_start
def test_a_reader_gets_only_whole_records_while_a_rank_beats_without_pause(tmp_path: Path):
    """Another process beats for two seconds. Reading a torn record would raise an error or give a wrong rank."""
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from electra_dist.run.heartbeat import Heartbeat\n"
        "heartbeat = Heartbeat(Path(sys.argv[1]), 0, 1)\n"
        "end = time.time() + 2.0\n"
        "number = 0\n"
        "while time.time() < end:\n"
        "    number += 1\n"
        "    heartbeat.beat(('step', 'checkpoint', 'eval')[number % 3], 10 ** (number % 9))\n"
        "heartbeat.close()\n"
        "assert 'torch' not in sys.modules\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])

    steps = set()
    num_reads = 0
    while writer.poll() is None:
        for beat in read_heartbeats(tmp_path):
            num_reads += 1
            steps.add(beat.step)
            assert beat.rank == 0

    assert writer.returncode == 0
    assert num_reads > 200
    assert len(steps) > 5
    file = tmp_path / HEARTBEAT_DIR / FILE_OF_RANK_0
    assert file.stat().st_size == RECORD_BYTES


def test_a_record_with_any_changed_byte_or_of_wrong_length_is_ignored(tmp_path: Path):
    Heartbeat(tmp_path, 0, 1).close()
    path = tmp_path / HEARTBEAT_DIR / FILE_OF_RANK_0
    data = path.read_bytes()

    num_bytes_before_padding = len(data.rstrip())
    for position in range(num_bytes_before_padding):
        changed = bytearray(data)
        changed[position] ^= 1
        assert heartbeat._decode(bytes(changed)) is None, position

    path.write_bytes(data[:100])
    assert read_heartbeats(tmp_path) == []


def test_a_new_attempt_overwrites_the_heartbeat_of_the_previous_one(tmp_path: Path):
    Heartbeat(tmp_path, 0, attempt=1).close()

    second_attempt = Heartbeat(tmp_path, 0, attempt=2)

    beats = read_heartbeats(tmp_path)
    second_attempt.close()
    assert len(beats) == 1
    assert beats[0].attempt == 2
    assert beats[0].phase == "setup"


def test_a_run_folder_that_cannot_be_written_is_a_store_error_that_names_it(tmp_path: Path):
    (tmp_path / "run").write_text("")

    with pytest.raises(StoreError, match="run"):
        Heartbeat(tmp_path / "run", 0, 1)


def test_a_beat_asks_the_system_for_one_write_and_waits_for_no_disk(tmp_path: Path):
    rank = Heartbeat(tmp_path, 0, 1)
    system_calls: list[str] = []

    def record(frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call" and function.__module__ == "posix":
            system_calls.append(function.__name__)

    sys.setprofile(record)
    for step in range(100):
        rank.beat("step", step)
    sys.setprofile(None)
    rank.close()

    assert system_calls == ["pwrite"] * 100


def test_a_jump_of_the_wall_clock_is_no_step_time(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch):
    offset = 0.0
    monkeypatch.setattr(heartbeat.time, "time", lambda: clock.now + offset)
    rank = Heartbeat(tmp_path, 0, 1)
    for step in range(1, 30):
        clock.now += 2.0
        offset += 3600.0  # as if the wall clock were set forward by an hour in every step
        rank.beat("step", step)
    assert read_heartbeats(tmp_path)[0].step_s == 2.0
