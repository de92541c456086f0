"""What a rank measures and waits for does not depend on the wall clock, which may be set at any time."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

import pytest
from support.run_records import ledger_event

from electra_dist.run.ledger import LedgerEvent
from electra_dist.run.this_node import seconds_since_process_start
from electra_dist.train.checkpointer import automatic_steps
from electra_dist.train.stop_request import JobEndTime

JUMPS_S = (3600.0, -86400.0)
WALL_CLOCK = time.time


def set_wall_clock(patch: pytest.MonkeyPatch, jump_s: float) -> None:
    """Let the wall clock show another time from now on."""
    patch.setattr(time, "time", lambda: WALL_CLOCK() + jump_s)


@pytest.mark.parametrize("jump_s", JUMPS_S)
def test_the_age_of_the_process_is_that_before_the_jump(monkeypatch: pytest.MonkeyPatch, jump_s: float):
    before_s = seconds_since_process_start()

    set_wall_clock(monkeypatch, jump_s)

    assert before_s <= seconds_since_process_start() < before_s + 60
    assert 0 < before_s < 24 * 3600


@pytest.mark.parametrize("jump_s", JUMPS_S)
def test_ranks_that_are_started_after_a_jump_stop_at_the_same_moment_before_the_end_of_the_job(
    monkeypatch: pytest.MonkeyPatch, jump_s: float
):
    """The supervisor, which lives since the job began, hands on the end of the job as the new wall clock shows it."""
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(round(time.time() + 600)))
    end_of_job = JobEndTime()
    assert end_of_job.monotonic == pytest.approx(time.monotonic() + 600, abs=2)

    set_wall_clock(monkeypatch, jump_s)
    for name, value in end_of_job.environment().items():
        monkeypatch.setenv(name, value)

    assert JobEndTime().monotonic == pytest.approx(end_of_job.monotonic, abs=2)


def test_without_slurm_there_is_no_end_of_a_job(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    assert JobEndTime().monotonic is None
    assert JobEndTime().environment() == {}


def test_a_run_whose_ledger_was_written_while_the_clock_was_set_back_two_days_finds_its_save_interval():
    """The start was recorded after the clock had gone back: its end comes before its begin."""

    def event(name: str, seconds: float, **details: Any) -> LedgerEvent:
        return ledger_event(name, time=datetime.fromtimestamp(seconds, UTC).isoformat(), attempt=1, **details)

    spent = {"first": 2.0, "step": 100.0, "data": 0.0, "stall": 0.5, "eval": 0.0}
    begun = event("start", 1.7e9, step=0, setup_s={"import": -2 * 86400.0, "build": 1.0, "restore": 0.0})
    saved = event("checkpoint", 1.7e9 + 100, step=100, stall_s=0.5, wait_s=0.0, spent_s=spent)

    assert automatic_steps([begun, saved]) >= 10
