"""Goodput against a simulated run whose every second is known; start lines; Young and Daly's interval."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from electra_dist.analysis.goodput import goodput, start_line
from electra_dist.analysis.save_interval import (
    automatic_steps,
    interruptions,
    mean_time_between_interruptions_s,
    measured_stall_s,
    young_daly_steps,
)
from electra_dist.run.jsonl import Record

EVERY = 10  # steps between checkpoints
STEP, DATA, COMPILE, STALL = 0.5, 0.03125, 7.0, 0.25  # seconds; powers of two, so that sums are exact
QUEUE, BOOT, IMPORT, BUILD, RESTORE, NOTICE = 40.0, 8.0, 5.0, 3.0, 2.0, 16.0


@dataclass
class Simulation:
    """A clock, a ledger, and the truth."""

    now: float = 1.7e9
    saved: int = 0
    reached: int = 0
    ledger: list[Record] = field(default_factory=list)
    jobs: list[Record] = field(default_factory=list)
    truth: dict[str, float] = field(default_factory=dict)

    def spend(self, name: str, seconds: float) -> None:
        self.truth[name] = self.truth.get(name, 0.0) + seconds
        self.now += seconds

    def event(self, name: str, step: int, **details: Any) -> None:
        self.ledger.append({"time": self.iso(), "event": name, "step": step, **details})

    def iso(self) -> str:
        return datetime.fromtimestamp(self.now, UTC).isoformat(timespec="milliseconds")

    def job(self, steps: int, ending: str) -> None:
        """One job: queue, start, `steps` steps, and an end; a killed one says nothing more."""
        submitted = self.iso()
        self.spend("queue", QUEUE)
        self.jobs.append(
            {
                "event": "begin",
                "time": self.iso(),
                "submitted": submitted,
                "started": self.iso(),
                "ledger_events": len(self.ledger),
            }
        )
        self.spend("boot", BOOT)
        for name, seconds in (("imports", IMPORT), ("build", BUILD), ("restore", RESTORE)):
            self.spend(name, seconds)
        setup = {"import": IMPORT, "build": BUILD, "restore": RESTORE}
        first_step, repeated = self.saved, self.reached - self.saved
        self.event("resume" if self.saved else "start", self.saved, setup_s=setup, repeated=repeated)
        spent = dict.fromkeys(("first", "step", "data", "stall", "eval"), 0.0)
        unseen = 0
        for done in range(first_step + 1, first_step + steps + 1):
            first = done == first_step + 1
            if first:
                self.spend("compile", COMPILE)
            self.spend("data", DATA)
            self.spend("useful", STEP)
            spent["first" if first else "step"] += STEP + DATA + (COMPILE if first else 0.0)
            spent["data"] += DATA
            unseen += 1
            if done % EVERY == 0 or (ending == "stop" and done == first_step + steps):
                self.spend("stall", STALL)
                spent["stall"] += STALL
                self.event("checkpoint", done, stall_s=STALL, wait_s=0.0, spent_s=dict(spent))
                self.saved, unseen = done, 0
        self.reached = first_step + steps
        self.truth["lost"] = self.truth.get("lost", 0.0) + STEP * (self.reached - self.saved)
        self.truth["useful"] -= STEP * (self.reached - self.saved)
        if ending == "kill":  # waits for rows since the last checkpoint cannot be told from being down
            self.truth["data"] -= DATA * unseen
            self.truth["down"] = self.truth.get("down", 0.0) + DATA * unseen
            self.spend("down", NOTICE)
        else:
            self.event(ending, self.reached, spent_s=dict(spent))


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
