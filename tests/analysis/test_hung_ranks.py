"""Which ranks hang: each phase by its own limit, the likely culprit first, nobody who only waits for a save."""

from __future__ import annotations

import pytest

from electra_dist.analysis.hung_ranks import HangLimits, Hung, hung
from electra_dist.run.heartbeat import Beat

LIMITS = HangLimits(setup_s=100.0, step_factor=5.0, step_floor_s=10.0, checkpoint_s=60.0, eval_s=40.0)


def beat(**changes: object) -> Beat:
    fields: dict = {
        "pid": 1,
        "host": "n1",
        "rank": 0,
        "attempt": 1,
        "phase": "step",
        "step": 100,
        "time": 1000.0,
        "phase_since": 900.0,
        "step_s": 4.0,
    }
    return Beat(**{**fields, **changes})


@pytest.mark.parametrize(
    ("phase", "step_s", "limit_s"),
    [
        ("setup", None, 100.0),
        ("step", None, 100.0),  # the first steps compile: they have the limit of the setup
        ("step", 4.0, 20.0),
        ("step", 0.1, 10.0),
        ("checkpoint", 4.0, 60.0),
        ("eval", 4.0, 40.0),
    ],
)
def test_each_phase_is_hung_just_after_its_own_limit(phase: str, step_s: float | None, limit_s: float):
    one = beat(phase=phase, step_s=step_s)
    assert hung([one], 1000.0 + limit_s, LIMITS) == []
    (found,) = hung([one], 1000.5 + limit_s, LIMITS)
    assert found == Hung(rank=0, host="n1", phase=phase, step=100, quiet_s=limit_s + 0.5, limit_s=limit_s)  # type: ignore[arg-type]


def test_the_first_step_after_a_save_waits_for_who_still_saves_and_for_nobody_else():
    first = beat(rank=1, step_s=0.1, phase_since=1000.0)
    saving = beat(rank=0, phase="checkpoint", step_s=0.1, time=990.0, phase_since=990.0)
    assert hung([first], 1059.0, LIMITS, everyone=lambda: [first, saving]) == []
    assert [h.limit_s for h in hung([first], 1061.0, LIMITS, everyone=lambda: [first, saving])] == [60.0]
    late = beat(rank=0, step_s=0.1, time=1030.0, phase_since=1030.0)  # its save took until then
    assert hung([first], 1039.0, LIMITS, everyone=lambda: [first, late]) == []
    assert [h.limit_s for h in hung([first], 1041.0, LIMITS, everyone=lambda: [first, late])] == [10.0]
    another = beat(rank=0, attempt=2, phase="checkpoint", step_s=0.1)
    assert hung([first], 1011.0, LIMITS, everyone=lambda: [first, another]) != []


def test_a_rank_that_is_done_is_never_hung():
    assert hung([beat(phase="done")], 1e12, LIMITS) == []


def test_the_rank_that_is_a_step_behind_is_named_before_those_that_wait_for_it():
    beats = [beat(rank=0), beat(rank=1, step=99, time=1001.0), beat(rank=2, time=998.0)]
    assert [h.rank for h in hung(beats, 1100.0, LIMITS)] == [1, 2, 0]


def test_beats_of_an_earlier_start_do_not_count_and_a_rank_that_never_beat_is_in_setup():
    old, new = beat(rank=0, time=400.0), beat(rank=1, time=1000.0)
    assert hung([old, new], 1005.0, LIMITS, started=990.0) == []
    assert hung([old, new], 1010.0, LIMITS, started=990.0, ranks=[0, 1, 2]) == []
    found = hung([old, new], 1015.0, HangLimits(setup_s=20.0), started=990.0, ranks=[0, 1, 2])
    assert [(h.rank, h.phase, h.quiet_s, h.host) for h in found] == [(0, "setup", 25.0, ""), (2, "setup", 25.0, "")]
