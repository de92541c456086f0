"""Heartbeats: what is read is whole, what is learned is the step time, and a beat costs next to nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from electra_dist.errors import StoreError
from electra_dist.run import heartbeat
from electra_dist.run.folder import HEARTBEAT_DIR
from electra_dist.run.heartbeat import RECORD_BYTES, Beat, Heartbeat, read_heartbeats


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """`clock[0]` is the Unix time that a heartbeat sees."""
    now = [1_700_000_000.0]
    monkeypatch.setattr(heartbeat.time, "time", lambda: now[0])
    return now


def test_a_beat_is_read_back_as_it_was_said(tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SLURMD_NODENAME", "gpu-017")
    assert read_heartbeats(tmp_path) == []
    second, first = Heartbeat(tmp_path, 11, attempt=3), Heartbeat(tmp_path, 2, attempt=3)
    clock[0] += 7.5
    second.beat("checkpoint", 400)
    clock[0] += 1.0
    second.beat("checkpoint", 400)
    one, two = read_heartbeats(tmp_path)
    start = 1_700_000_000.0
    assert one == Beat(
        pid=os.getpid(),
        host="gpu-017",
        rank=2,
        attempt=3,
        phase="setup",
        step=0,
        time=start,
        phase_since=start,
        step_s=None,
    )
    assert (two.rank, two.phase, two.step, two.time, two.phase_since) == (
        11,
        "checkpoint",
        400,
        start + 8.5,
        start + 7.5,
    )
    assert read_heartbeats(tmp_path, [11, 12]) == [two]
    second.close()
    assert read_heartbeats(tmp_path)[1].phase == "done"
    first.close()


def test_the_step_time_is_the_median_of_the_newest_steps_and_leaves_out_the_first_and_other_phases(
    tmp_path: Path, clock: list[float]
):
    pulse = Heartbeat(tmp_path, 0, 1)
    step = 0

    def steps(count: int, seconds: float) -> float | None:
        nonlocal step
        for _ in range(count):
            step += 1
            clock[0] += seconds
            pulse.beat("step", step)
        return read_heartbeats(tmp_path)[0].step_s

    assert steps(6, 90.0) is None  # the first beat only starts the clock; then five exempt steps
    assert steps(1, 2.0) == 2.0
    assert steps(19, 2.0) == 2.0
    pulse.beat("checkpoint", step)
    clock[0] += 1000.0
    assert steps(1, 3.0) == 2.0  # the first step after another phase has no beginning
    assert steps(11, 3.0) == 3.0  # 11 of the newest 20
    assert steps(1, 500.0) == 3.0  # one outlier moves nothing
    clock[0] += 8.0
    pulse.beat("step", step + 4)  # four steps between two beats: 2 s each
    assert read_heartbeats(tmp_path)[0].step_s == 3.0
    pulse.close()


def test_a_reader_never_sees_a_torn_record_while_a_rank_beats_as_fast_as_it_can(tmp_path: Path):
    code = (
        "import sys, time; from pathlib import Path; from electra_dist.run.heartbeat import Heartbeat\n"
        "h = Heartbeat(Path(sys.argv[1]), 0, 1); end = time.time() + 2.0; i = 0\n"
        "while time.time() < end:\n"
        "    i += 1; h.beat(('step', 'checkpoint', 'eval')[i % 3], 10 ** (i % 9))\n"
        "h.close(); assert 'torch' not in sys.modules\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    steps, reads = set(), 0
    while writer.poll() is None:
        for one in read_heartbeats(tmp_path):
            reads += 1
            steps.add(one.step)
        assert reads == 0 or one.rank == 0
    assert writer.returncode == 0
    assert reads > 200
    assert len(steps) > 5
    assert (tmp_path / HEARTBEAT_DIR / "rank-00000.json").stat().st_size == RECORD_BYTES


def test_a_record_with_any_byte_changed_is_not_believed(tmp_path: Path):
    Heartbeat(tmp_path, 0, 1).close()
    path = tmp_path / HEARTBEAT_DIR / "rank-00000.json"
    data = path.read_bytes()
    for position in range(len(data.rstrip())):
        changed = bytearray(data)
        changed[position] ^= 1
        assert heartbeat._decode(bytes(changed)) is None, position
    path.write_bytes(data[:100])
    assert read_heartbeats(tmp_path) == []


def test_a_new_attempt_writes_over_the_file_of_the_last(tmp_path: Path):
    Heartbeat(tmp_path, 0, 1).close()
    pulse = Heartbeat(tmp_path, 0, 2)
    assert [(b.attempt, b.phase) for b in read_heartbeats(tmp_path)] == [(2, "setup")]
    pulse.close()


def test_a_run_folder_that_cannot_be_written_is_one_line(tmp_path: Path):
    (tmp_path / "run").write_text("")
    with pytest.raises(StoreError, match="run"):
        Heartbeat(tmp_path / "run", 0, 1)


def test_a_beat_takes_less_than_a_tenth_of_a_millisecond(tmp_path: Path):
    """10 us where this was written; ten times that is still 0.1 % of a 100 ms step on a loaded machine."""
    pulse = Heartbeat(tmp_path, 0, 1)
    best = min(_microseconds(pulse, start) for start in range(0, 10_000, 1000))
    pulse.close()
    assert best < 100.0


def _microseconds(pulse: Heartbeat, start: int) -> float:
    begin = time.perf_counter()
    for step in range(start, start + 1000):
        pulse.beat("step", step)
    return (time.perf_counter() - begin) * 1e3
