"""The interval between checkpoints: Young and Daly's loses least, keeps its bounds and follows what was measured."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.simulated_run import BOOT, QUEUE, STALL, STEP, Simulation

from electra_dist.analysis.optimal_save_interval import (
    automatic_steps,
    mean_time_between_interruptions_s,
    measured_stall_s,
    young_daly_steps,
)


@given(st.floats(0.01, 60), st.floats(3600, 1e6), st.floats(0.05, 0.5))
def test_the_interval_of_young_and_daly_loses_least(stall_s: float, interruption_s: float, step_s: float):
    """Against the loss it minimises: a stall an interval, and half an interval an interruption."""

    def loss(steps: float) -> float:
        return stall_s / (steps * step_s) + steps * step_s / 2 / interruption_s

    best = young_daly_steps(stall_s, interruption_s, step_s, 1, 10**9)
    assert loss(best) <= min(loss(best * 0.8), loss(best * 1.25), loss(best / 2), loss(best * 2))


def test_the_interval_keeps_its_bounds():
    assert young_daly_steps(0.0, 1e5, 0.5, 50, 2000) == 50
    assert young_daly_steps(100.0, 1e7, 0.5, 50, 2000) == 2000
    assert young_daly_steps(0.5, 126 * 3600, 1.0, 1, 10**6) == round(math.sqrt(2 * 0.5 * 126 * 3600))


def test_the_time_between_interruptions_begins_with_a_guess_of_a_day():
    run = Simulation()
    run.job(20, "stop")
    day = 24 * 3600
    running = run.now - 1.7e9 - QUEUE - BOOT
    assert mean_time_between_interruptions_s([]) == day
    assert mean_time_between_interruptions_s(run.ledger) == pytest.approx(day + running, abs=1)
    run.job(20, "kill")
    run.job(20, "stop")
    assert mean_time_between_interruptions_s(run.ledger) == pytest.approx((day + 3 * running) / 2, abs=1)
    assert measured_stall_s(run.ledger) == STALL


def test_the_automatic_interval_follows_stalls_and_interruptions():
    run = Simulation()
    assert automatic_steps([]) == 100  # nothing measured yet
    run.job(40, "stop")
    calm = automatic_steps(run.ledger)
    between = mean_time_between_interruptions_s(run.ledger)
    assert calm == round(math.sqrt(2 * STALL * between) / STEP)
    for _ in range(5):
        run.job(25, "kill")
    assert 10 <= automatic_steps(run.ledger) < 0.6 * calm  # six times as often: sqrt(6) times shorter
    slow = [{**event, "stall_s": 3600.0} if event["event"] == "checkpoint" else event for event in run.ledger]
    assert automatic_steps(slow) == round(3600 / STEP)  # never more than an hour
