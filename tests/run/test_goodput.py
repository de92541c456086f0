"""Goodput of a simulated run in which the true seconds of every activity are known.

`Simulation.job(steps, ending)` simulates one job: `run.truth` holds the true seconds by activity, `run.ledger` and
`run.jobs` the records that a real run would write. It saves a checkpoint every 10 steps; a `kill` records no event.
"""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.simulated_run import BOOT, BUILD, DATA, IMPORT, NOTICE, QUEUE, RESTORE, STEP, Simulation

from electra_dist.run.goodput import goodput, start_line
from electra_dist.train.checkpointer import interruptions, measured_stall_s

NUM_STEPS = st.integers(12, 60)
ENDINGS = st.sampled_from(["kill", "crash", "stop"])


@given(st.lists(st.tuples(NUM_STEPS, ENDINGS), max_size=6), NUM_STEPS)
def test_every_second_of_a_simulated_run_is_attributed_to_its_true_activity(
    interrupted_jobs: list[tuple[int, str]], steps_of_last_job: int
):
    run = Simulation()
    begin = run.now
    for steps, ending in interrupted_jobs:
        run.job(steps, ending)
    run.job(steps_of_last_job, "stop")

    account = goodput(run.ledger, run.jobs)

    assert account.wall == pytest.approx(run.now - begin, abs=1e-3)
    for activity, seconds in account.parts().items():
        assert seconds == pytest.approx(run.truth.get(activity, 0.0), abs=1e-2), activity
    true_fraction = run.truth["useful"] / (account.wall - run.truth["queue"])
    assert account.fraction == pytest.approx(true_fraction, abs=1e-6)
    assert account.starts == len(interrupted_jobs) + 1
    num_interruptions = sum(ending != "stop" for _, ending in interrupted_jobs)
    assert interruptions(run.ledger) == num_interruptions


@pytest.mark.parametrize("with_jobs", [True, False])
def test_a_start_of_a_finished_run_that_trains_nothing_does_not_lower_the_goodput(with_jobs: bool):
    run = Simulation()
    run.job(30, "done")
    first = goodput(run.ledger, run.jobs if with_jobs else [])
    run.now += 3600.0
    run.job(0, "done")
    assert goodput(run.ledger, run.jobs if with_jobs else []) == first
    run.now += 3600.0
    run.job(10, "done")  # the config was given more steps
    assert goodput(run.ledger, run.jobs if with_jobs else []).useful > first.useful


def test_without_job_records_the_gap_between_two_starts_is_down_time():
    """Without Slurm's records nobody knows which part of the gap was the queue and which the boot of the job."""
    run = Simulation()
    run.job(25, "kill")
    run.job(25, "stop")

    account = goodput(run.ledger)

    assert account.queue == 0.0
    assert account.boot == 0.0
    assert account.down == pytest.approx(run.truth["down"] + QUEUE + BOOT, abs=1e-2)


@pytest.mark.parametrize(("name", "step"), [("rollback", 24), ("storage", 20)])
def test_an_event_without_recorded_seconds_does_not_hide_those_of_an_earlier_checkpoint(name: str, step: int):
    """The first job saves at steps 10 and 20 and makes 25; its last event has no `spent_s`, as after a rollback.

    The step of a rollback is the index of the last skipped step, and not the number of steps done.
    """
    run = Simulation()
    begin = run.now
    run.job(25, "kill")
    end_of_first_job = datetime.fromtimestamp(run.now - NOTICE, UTC).isoformat(timespec="milliseconds")
    run.event(name, step)
    run.ledger[-1] = run.ledger[-1].model_copy(update={"time": end_of_first_job})
    run.job(12, "stop")

    account = goodput(run.ledger, run.jobs)

    assert account.wall == pytest.approx(run.now - begin, abs=1e-3)
    assert account.steps_lost == 5
    for activity, seconds in account.parts().items():
        assert seconds == pytest.approx(run.truth.get(activity, 0.0), abs=1e-2), activity


def test_a_rollback_before_the_first_checkpoint_counts_its_steps_as_lost():
    """No event of the first job has `spent_s`, so its steps take the mean time of those of the second one."""
    run = Simulation()
    run.job(8, "kill")
    run.event("rollback", 7)
    run.job(12, "stop")

    account = goodput(run.ledger, run.jobs)

    assert account.steps_lost == 8
    assert account.lost == pytest.approx(8 * STEP, abs=1e-2)
    assert account.useful == pytest.approx(12 * STEP, abs=1e-2)


def test_a_job_without_a_time_of_submission_counts_from_when_it_began():
    """Slurm reported the submission of the second job only, which was after the first one began."""
    run = Simulation()
    run.job(8, "kill")
    run.ledger.clear()  # the first job ended before its ranks started
    run.job(12, "stop")
    first_job, second_job = run.jobs
    run.jobs = [
        first_job.model_copy(update={"submitted": None}),
        second_job.model_copy(update={"ledger_events": 0}),
    ]
    assert first_job.started is not None
    first_job_began = datetime.fromisoformat(first_job.started).timestamp()

    account = goodput(run.ledger, run.jobs)

    assert account.wall == pytest.approx(run.now - first_job_began, abs=1e-3)
    assert account.queue == pytest.approx(QUEUE)


def test_an_empty_ledger_has_no_goodput():
    assert goodput([]).fraction is None
    assert measured_stall_s([]) is None


def test_an_event_that_an_abandoned_attempt_writes_late_does_not_count():
    """Attempt 1 has three events: its start and two checkpoints. It writes a crash after attempt 2 has begun."""
    run = Simulation()
    run.job(20, "kill")
    run.job(20, "stop")
    first_attempt = [event.model_copy(update={"attempt": 1}) for event in run.ledger[:3]]
    second_attempt = [event.model_copy(update={"attempt": 2}) for event in run.ledger[3:]]
    ledger = [*first_attempt, *second_attempt]
    late_event = first_attempt[1].model_copy(update={"time": ledger[-1].time, "event": "crash", "step": 9999})

    account = goodput([*ledger, late_event])

    assert account.useful == goodput(ledger).useful


def test_the_line_of_a_start_after_a_kill_shows_the_restored_step_its_age_and_the_steps_lost():
    """The first job saves at steps 10 and 20 and is killed at 25, so the second resumes at 20 and repeats 5 steps."""
    run = Simulation()
    run.job(25, "kill")
    run.job(12, "kill")
    events = [event.event for event in run.ledger]
    num_events_to_resume = events.index("resume") + 1
    ledger_at_resume = run.ledger[:num_events_to_resume]
    ledger_at_first_start = run.ledger[:1]

    line = start_line(ledger_at_resume, run.jobs)
    line_of_first_start = start_line(ledger_at_first_start)

    lost_s = 5 * (STEP + DATA)
    age_s = lost_s + NOTICE + QUEUE + BOOT + IMPORT + BUILD + RESTORE  # since the save of step 20
    seconds_above_a_minute = round(age_s) - 60
    fraction = goodput(ledger_at_resume, run.jobs).fraction
    assert fraction is not None
    assert line == (
        f"restored step 20, age 1m{seconds_above_a_minute:02d}s, 5 later steps are repeated, "
        f"goodput {100 * fraction:.1f} %"
    )
    assert line_of_first_start == "start at step 0"
