"""The interval between checkpoints: it loses the least time, stays within its limits and follows the measurements.

`Simulation.job(steps, ending)` simulates one job of a run and writes its ledger: steps of STEP seconds, and a
checkpoint every 10 steps that stops training for STALL seconds. A `kill` records no event.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.simulated_run import BOOT, QUEUE, STALL, STEP, Simulation

from electra_dist.train.checkpointer import (
    automatic_steps,
    mean_time_between_interruptions_s,
    measured_stall_s,
    young_daly_steps,
)

DAY_S = 24 * 3600.0


@given(st.floats(0.01, 60), st.floats(3600, 1e6), st.floats(0.05, 0.5))
def test_the_interval_of_young_and_daly_loses_less_time_than_shorter_and_longer_ones(
    stall_s: float, interruption_s: float, step_s: float
):
    """The loss is computed on its own: one stall per interval, and half an interval per interruption."""

    def lost_share(steps: float) -> float:
        interval_s = steps * step_s
        return stall_s / interval_s + (interval_s / 2) / interruption_s

    best = young_daly_steps(stall_s, interruption_s, step_s, 1, 10**9)

    for factor in (0.5, 0.8, 1.25, 2):
        assert lost_share(best) <= lost_share(best * factor)


def test_the_interval_stays_within_its_limits_and_follows_the_formula_between_them():
    """The formula of Young and Daly is sqrt(2 x stall x time between interruptions)."""
    without_stall = young_daly_steps(stall_s=0.0, interruption_s=1e5, step_s=0.5, least=50, most=2000)
    with_long_stall = young_daly_steps(stall_s=100.0, interruption_s=1e7, step_s=0.5, least=50, most=2000)
    between_limits = young_daly_steps(stall_s=0.5, interruption_s=126 * 3600, step_s=1.0, least=1, most=10**6)

    assert without_stall == 50
    assert with_long_stall == 2000
    assert between_limits == round(math.sqrt(2 * 0.5 * 126 * 3600))


def test_the_time_between_interruptions_starts_from_a_guess_of_one_day():
    """It is (1 day + running time) / (1 + interruptions): the guess counts as one interruption after a day."""
    run = Simulation()
    begin = run.now
    assert mean_time_between_interruptions_s([]) == DAY_S

    run.job(20, "stop")
    running_s = run.now - begin - QUEUE - BOOT  # a start begins when its processes do
    assert mean_time_between_interruptions_s(run.ledger) == pytest.approx(DAY_S + running_s, abs=1)

    run.job(20, "kill")
    run.job(20, "stop")
    expected_s = (DAY_S + 3 * running_s) / 2  # three jobs of equal length, one interruption
    assert mean_time_between_interruptions_s(run.ledger) == pytest.approx(expected_s, abs=1)
    assert measured_stall_s(run.ledger) == STALL


def test_the_automatic_interval_follows_the_measured_stalls_and_interruptions():
    run = Simulation()
    steps_before_any_measurement = 100
    least_steps = 10
    longest_interval_s = 3600
    assert automatic_steps([]) == steps_before_any_measurement

    # Without an interruption, the formula of Young and Daly gives the interval.
    run.job(40, "stop")
    calm_steps = automatic_steps(run.ledger)
    interruption_s = mean_time_between_interruptions_s(run.ledger)
    assert calm_steps == round(math.sqrt(2 * STALL * interruption_s) / STEP)

    # Interruptions that are several times as frequent shorten the interval by the square root of their number.
    for _ in range(5):
        run.job(25, "kill")
    steps_with_kills = automatic_steps(run.ledger)
    assert steps_with_kills >= least_steps
    assert steps_with_kills < 0.6 * calm_steps

    # Checkpoints that stop training for an hour would give a very long interval: it is limited to an hour.
    ledger_with_slow_saves = [
        event.model_copy(update={"stall_s": 3600.0}) if event.event == "checkpoint" else event for event in run.ledger
    ]
    assert automatic_steps(ledger_with_slow_saves) == round(longest_interval_s / STEP)
