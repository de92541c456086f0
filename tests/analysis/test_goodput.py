"""Goodput against a simulated run whose every second is known; the line that a start prints."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.simulated_run import BOOT, BUILD, DATA, IMPORT, NOTICE, QUEUE, RESTORE, STEP, Simulation

from electra_dist.analysis.goodput import goodput, start_line
from electra_dist.analysis.optimal_save_interval import interruptions, measured_stall_s

ENDINGS = st.sampled_from(["kill", "crash", "stop"])


@given(st.lists(st.tuples(st.integers(12, 60), ENDINGS), max_size=6), st.integers(12, 60))
def test_every_second_of_a_simulated_run_goes_where_it_went(course: list[tuple[int, str]], last: int):
    run = Simulation()
    begin = run.now
    for steps, ending in course:
        run.job(steps, ending)
    run.job(last, "stop")
    account = goodput(run.ledger, run.jobs)
    parts = account.parts()
    assert account.wall == pytest.approx(run.now - begin, abs=1e-3)
    for name, seconds in parts.items():
        assert seconds == pytest.approx(run.truth.get(name, 0.0), abs=1e-2), name
    assert account.fraction == pytest.approx(run.truth["useful"] / (account.wall - run.truth["queue"]), abs=1e-6)
    assert interruptions(run.ledger) == sum(ending != "stop" for _, ending in course)
    assert account.starts == len(course) + 1


def test_without_jobs_the_gap_between_starts_is_down_time():
    run = Simulation()
    run.job(25, "kill")
    run.job(25, "stop")
    account = goodput(run.ledger)
    assert account.queue == account.boot == 0.0
    assert account.down == pytest.approx(run.truth["down"] + QUEUE + BOOT, abs=1e-2)


def test_a_ledger_without_times_spent_still_gives_an_account():
    run = Simulation()
    run.job(20, "kill")
    run.job(20, "stop")
    old = [{k: v for k, v in event.items() if k not in ("spent_s", "setup_s")} for event in run.ledger]
    account = goodput(old)
    assert account.wall == pytest.approx(run.now - 1.7e9 - QUEUE - BOOT - IMPORT - BUILD - RESTORE, abs=1e-2)
    assert account.stall == pytest.approx(run.truth["stall"])
    assert account.useful >= run.truth["useful"]  # compilation and waits for rows look like steps


def test_an_empty_ledger_has_no_goodput():
    assert goodput([]).fraction is None
    assert measured_stall_s([]) is None


def test_what_an_attempt_that_was_given_up_wrote_late_does_not_count():
    run = Simulation()
    run.job(20, "kill")
    run.job(20, "stop")
    events = [dict(event, attempt=1) for event in run.ledger[:3]] + [
        dict(event, attempt=2) for event in run.ledger[3:]
    ]
    late = {**events[1], "time": events[-1]["time"], "event": "crash", "step": 9999}
    assert goodput([*events, late]).useful == goodput(events).useful


def test_the_line_of_a_start_after_a_kill():
    run = Simulation()
    run.job(25, "kill")
    run.job(12, "kill")
    restart = len(run.ledger) - 1 - next(i for i, e in enumerate(reversed(run.ledger)) if e["event"] == "resume")
    told = goodput(run.ledger[: restart + 1], run.jobs).fraction
    assert told is not None
    age_s = STEP * 5 + DATA * 5 + NOTICE + QUEUE + BOOT + IMPORT + BUILD + RESTORE
    expected = f"restored step 20, age 1m{round(age_s) - 60:02d}s, 5 steps lost, goodput {100 * told:.1f} %"
    assert start_line(run.ledger[: restart + 1], run.jobs) == expected
    assert start_line(run.ledger[:1]) == "start at step 0"
