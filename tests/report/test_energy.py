"""The estimated energy of a run, against sums by hand."""

from __future__ import annotations

import pytest

from electra_dist.report.run_record import PowerReading, energy_of
from electra_dist.run.goodput import Goodput


def test_energy_is_the_power_weighted_by_time_over_the_life_of_the_processes_on_all_nodes():
    """10 steps of 2 s at 1,000 W and 30 of 1 s at 4,000 W: 140,000 J in 50 s, 2,800 W.

    The processes exist for 3,600 s on 2 nodes; the queue, the boot and the down time are not theirs.
    """
    train = [PowerReading(10, 2.0, 1000.0), PowerReading(40, 1.0, 4000.0)]
    account = Goodput(queue=5000, boot=70, down=300, imports=100, eval=500, useful=3000)

    energy = energy_of(train, account, {"hosts": {"node-a": 8, "node-b": 8}})

    assert energy is not None
    assert energy.mean_power_w == pytest.approx(2800)
    assert energy.num_nodes == 2
    assert energy.kwh == pytest.approx(2 * 2.8)


def test_records_without_power_do_not_count_and_a_run_without_any_has_no_energy():
    """A record stands for the steps since the one before it, also if that one has no power."""
    account = Goodput(useful=3600)

    energy = energy_of([PowerReading(10, 1.0, None), PowerReading(20, 1.0, 500.0)], account, {})

    assert energy is not None
    assert energy.kwh == pytest.approx(0.5)
    assert energy_of([PowerReading(10, 1.0, None)], account, {}) is None
    assert energy_of([], account, {}) is None
    assert energy_of([PowerReading(20, 1.0, 500.0)], Goodput(queue=10), {}) is None  # no process yet
