"""The decision about a run when its job ends: the verdict for each kind of end, and the bound on restarts."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from electra_launcher.slurm import job
from electra_launcher.slurm.job import JobVerdict, decide, main
from hypothesis import given
from hypothesis import strategies as st
from support.run_records import ledger_event as event

from electra_dist.errors import StoreAway, UserError
from electra_dist.run.failures import Failure
from electra_dist.run.history import session_of
from electra_dist.run.ledger import JobBegan, JobEnded, JobRecord, JobSubmitted, Ledger, LedgerEvent, read_jobs

TIME = "2026-01-01T00:00:00+00:00"


def begin(number: int, ledger_events: int = 0, checkpoint_step: int = 0, restart: int = 0) -> JobBegan:
    """Return the record of the begin of a job (or of a restart of it)."""
    return JobBegan(
        time=TIME,
        event="begin",
        job=str(number),
        restart=restart,
        ledger_events=ledger_events,
        checkpoint_step=checkpoint_step,
    )


def verdict_of(
    ledger: list[LedgerEvent],
    jobs: list[JobRecord],
    number: int = 1,
    codes: dict[str, int] | None = None,
    cancelled: bool = False,
    restart: int = 0,
    failure: Failure | None = None,
) -> JobVerdict:
    """Return the verdict on the end of a job (or of a restart of it); `codes` are the exit codes of its nodes."""
    session = f"job-{number}-{restart}"
    return decide(ledger, jobs, session, codes or {}, cancelled=cancelled, max_fruitless_restarts=3, failure=failure)


def ended(number: int, verdict: str, restart: int = 0) -> JobEnded:
    """Return the record of the end of a job."""
    return JobEnded(time=TIME, event="end", job=str(number), restart=restart, verdict=verdict)


SUBMITTED_AGAIN = JobSubmitted(time=TIME, event="submit", jobs=["2"])


START = event("start", 0)
CASES = [
    ("done in the ledger", [START, event("done", 20)], {"n1": 0, "n2": 0}, False, "done", 0),
    ("done, then a node launcher was killed", [START, event("done", 20)], {"n1": 0}, False, "done", 0),
    ("exit code 0 after a kill", [START, event("checkpoint", 5)], {"n1": 0, "n2": 0}, False, "again", 1),
    ("stopped by a signal", [START, event("stop", 7, why="SIGUSR1")], {"n1": 75, "n2": 75}, False, "next", 75),
    ("stopped, the launcher ended with 1", [START, event("stop", 7)], {"n1": 1, "n2": 143}, False, "next", 75),
    ("stopped by RUN/stop", [START, event("stop", 7, why="file /r/stop")], {"n1": 75}, False, "stop", 75),
    ("75 of a rank without a stop in the ledger", [START], {"n1": 75}, False, "again", 1),
    (
        "storage stayed away",
        [START, event("storage", 7, why="disk full")],
        {"n1": 75, "n2": 75},
        False,
        "later",
        75,
    ),
    ("bad config or input", [], {"n1": 78, "n2": 143}, False, "stop", 78),
    ("unhealthy node", [START], {"n1": 143, "n2": 69}, False, "next", 69),
    ("crash", [START, event("crash", 3)], {"n1": 1, "n2": 1}, False, "again", 1),
    ("node that crashed and rebooted at once", [START], {"n1": 143}, False, "again", 1),
    ("scancel, saved", [START, event("stop", 7)], {"n1": 75}, True, "leave", 75),
    ("scancel, not saved", [START], {}, True, "leave", 1),
]


@pytest.mark.parametrize(
    ("case", "ledger", "codes", "cancelled", "action", "code"), CASES, ids=[name for name, *_ in CASES]
)
def test_each_kind_of_end_has_its_action_and_exit_code(
    case: str, ledger: list[LedgerEvent], codes: dict[str, int], cancelled: bool, action: str, code: int
):
    verdict = verdict_of(ledger, [begin(1)], 1, codes, cancelled)
    assert (verdict.action, verdict.exit_code) == (action, code)
    assert verdict.sick_nodes == (("n2",) if code == 69 else ())


def test_a_verdict_names_the_rank_that_failed_and_a_fault_that_has_come_back_ends_the_run():
    fields = {"time": TIME, "start": "job-1-0-start-000001", "node": "n2", "rank": 3, "error": "exception", "step": 7}
    crash = verdict_of([START], [begin(1)], 1, {"n1": 1}, failure=Failure(**fields))
    assert crash.action == "again" and "rank 3 on n2: Python exception, at step 7" in crash.why
    final = verdict_of([START], [begin(1)], 1, {"n1": 78}, failure=Failure(**fields, repeated=True))
    assert (final.action, final.exit_code) == ("stop", 78)
    assert final.why.startswith("rank 3 on n2: ") and "not restarted a second time" in final.why
    refused = verdict_of([START], [begin(1)], 1, {"n1": 78}, failure=Failure(**{**fields, "error": "refused"}))
    assert refused.why.startswith("user error (78)")


def test_the_end_of_a_job_that_was_already_restarted_decides_nothing():
    jobs = [begin(1), begin(1, restart=1)]
    assert verdict_of([START], jobs, 1, {"n1": 1}, restart=0).action == "leave"
    assert verdict_of([START], jobs, 1, {"n1": 1}, restart=1).action == "again"


def test_the_end_of_a_job_whose_begin_is_missing_is_refused():
    with pytest.raises(UserError, match="the begin of job-2-0 is missing"):
        verdict_of([START], [begin(1)], 2)


def test_a_stop_of_an_earlier_job_does_not_hide_a_crash_of_this_one():
    ledger = [START, event("checkpoint", 7), event("stop", 7)]
    verdict = verdict_of(ledger, [begin(1), ended(1, "next"), begin(2, ledger_events=3, checkpoint_step=7)], 2)
    assert verdict.action == "again"


def test_three_restarts_without_a_new_checkpoint_end_the_run():
    ledger, jobs, actions = [START, event("checkpoint", 10)], [], []
    for restart in range(4):
        jobs.append(begin(1, 2, 10, restart))
        verdict = verdict_of(ledger, jobs, 1, {"n1": 1}, restart=restart)
        jobs.append(ended(1, verdict.action, restart))
        actions.append(verdict.action)
    assert actions == ["again", "again", "again", "stop"]
    assert "4 starts in a row" in verdict.why
    resubmitted = [*jobs, SUBMITTED_AGAIN, begin(2, 2, 10)]
    assert verdict_of(ledger, resubmitted, 2).action == "again"


def test_restarts_within_a_job_count_as_failed_starts():
    ledger = [START, event("checkpoint", 10), event("crash", 12)] + 4 * [
        event("resume", 10),
        event("crash", 12),
    ]
    assert verdict_of(ledger, [begin(1)]).action == "stop"
    assert verdict_of([*ledger, event("resume", 10), event("checkpoint", 15)], [begin(1)]).action == "again"
    again = [begin(1), SUBMITTED_AGAIN, begin(2, len(ledger), 10)]
    assert verdict_of([*ledger, event("resume", 10)], again, 2).action == "again"


def test_restarts_whose_node_died_without_recording_an_end_count_as_failed_starts():
    jobs = [begin(1, restart=restart) for restart in range(4)]
    assert verdict_of([START], jobs, 1, restart=3).action == "stop"


def test_saving_the_same_step_again_is_not_progress():
    ledger = [START]
    for _ in range(4):  # each start saves step 10, whose checkpoint the next start finds damaged
        ledger += [event("checkpoint", 10)]
    jobs = [begin(1), *(begin(1, n + 2, 10, n + 1) for n in range(4))]
    assert verdict_of(ledger, jobs, 1, restart=4).action == "stop"


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["crash", "stop"])), max_size=30))
def test_a_run_ends_after_four_crashes_in_a_row_without_a_checkpoint_and_not_earlier(course: list[tuple[int, str]]):
    """Each job saves 0 to 3 checkpoints, then crashes or stops; the test counts failed starts independently."""
    ledger: list[LedgerEvent] = []
    jobs: list[JobRecord] = []
    failed = 0
    for number, (saves, ending) in enumerate(course):
        reached = sum(e.event == "checkpoint" for e in ledger)
        jobs.append(begin(number, len(ledger), reached))
        ledger += [event("checkpoint", reached + i + 1) for i in range(saves)]
        if ending == "stop":
            ledger.append(event("stop", reached + saves))
        if saves:
            failed = 0
        elif ending == "crash":
            failed += 1
        verdict = verdict_of(ledger, jobs, number, {"n1": 75 if ending == "stop" else 1})
        jobs.append(ended(number, verdict.action))
        expected = "stop" if failed > 3 else "again"
        if ending == "stop":
            expected = "next"
        assert verdict.action == expected
        if expected == "stop":
            break


@pytest.mark.parametrize("jump_s", [0.0, 3600.0, -86400.0])
@pytest.mark.parametrize(("seconds_left", "action"), [(600, "leave"), (5, "again")])
def test_a_jump_of_the_wall_clock_during_a_job_makes_neither_a_cancellation_of_its_time_limit_nor_the_reverse(
    tiny_config: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    jump_s: float,
    seconds_left: int,
    action: str,
):
    """Slurm sends TERM when somebody cancels a job, and at its time limit, after which the run must go on."""
    run, state = tmp_path / "run", tmp_path / "run" / "slurm" / "job-7-0"
    identity = ["--session", "job-7-0", "--config", str(tiny_config("run"))]
    main(["begin", str(run), *identity, "--nodes", "n1", "--submitted", "1700000000", "--started", "N/A"])
    ledger = Ledger(run)
    ledger.append("start", 0)
    ledger.append("checkpoint", 5)
    ledger.close()
    state.mkdir(parents=True)
    (state / "exit-n1").write_text("143\n")
    end_time = str(round(time.time() + seconds_left))
    wall_clock = time.time
    monkeypatch.setattr(time, "time", lambda: wall_clock() + jump_s)

    main(["end", str(run), *identity, "--told", "TERM", "--end-time", end_time])

    assert capsys.readouterr().out.startswith(f"{action}|")


def test_the_batch_scripts_calls_of_begin_and_end_print_the_verdict_and_record_the_job(
    tiny_config: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run, state = tmp_path / "run", tmp_path / "run" / "slurm" / "job-7-0"
    identity = ["--session", "job-7-0", "--config", str(tiny_config("run"))]
    ledger = Ledger(run)
    main(["begin", str(run), *identity, "--nodes", "n[1-2]", "--submitted", "1700000000", "--started", "N/A"])
    ledger.append("start", 0)
    ledger.close()
    state.mkdir(parents=True)
    (state / "exit-n1").write_text("143\n")
    (state / "exit-n2").write_text("69\n")
    main(["end", str(run), *identity, "--told", "", "--end-time", "N/A"])
    assert capsys.readouterr().out == "next|69|n2|n2 unhealthy; the run continues on other nodes\n"
    first, last = read_jobs(run)
    assert (first.submitted, first.started) == ("2023-11-14T22:13:20.000+00:00", None)
    assert (last.verdict, last.codes) == ("next", {"n1": 143, "n2": 69})


def test_the_name_of_a_start_has_the_numbers_of_its_record(
    tiny_config: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run, config = tmp_path / "run", ["--config", str(tiny_config("run"))]
    for session in ("job-7-0", "job-7-2", "job-7-2-1"):
        assert main(["begin", str(run), "--session", session, *config]) == 0
        assert main(["end", str(run), "--session", session, *config]) == 0
        for record in read_jobs(run)[-2:]:
            assert not isinstance(record, JobSubmitted)
            assert session_of(record) == session
    assert (record.job, record.restart, record.replacements) == ("7", 2, 1)
    assert main(["begin", str(run), "--session", "job-seven", *config]) == 78
    assert "give one such as job-4711-0" in capsys.readouterr().err


@pytest.mark.parametrize("saved_before", [True, False], ids=["before the earlier job", "in the earlier job"])
def test_a_job_that_would_begin_a_new_run_where_an_earlier_one_has_saved_is_refused(
    tiny_config: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], saved_before: bool
):
    """The begin of a job records the newest checkpoint; so does its end, if it lives to write one."""
    config, run = tiny_config("run"), tmp_path / "run"
    arguments = ["--config", str(config)]
    if not saved_before:
        assert main(["begin", str(run), "--session", "job-7-0", *arguments]) == 0
    ledger = Ledger(run)
    ledger.append("start", 0)
    ledger.append("checkpoint", 5)
    ledger.close()
    (run / "config.yaml").touch()
    if saved_before:
        assert main(["begin", str(run), "--session", "job-7-0", *arguments]) == 0
    else:
        assert main(["end", str(run), "--session", "job-7-0", *arguments]) == 0
    (run / "ledger.jsonl").unlink()
    (run / "config.yaml").unlink()
    assert main(["begin", str(run), "--session", "job-8-0", *arguments]) == 78
    assert "restore the run folder" in capsys.readouterr().err
    recorded = ["begin"] if saved_before else ["begin", "end"]
    assert [(record.event, record.job) for record in read_jobs(run)] == [(event, "7") for event in recorded]


def test_a_job_whose_config_names_another_run_folder_is_refused(
    tiny_config: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """Slurm starts a job in /tmp if its working folder is missing, where a relative run_dir is another folder."""
    config = tiny_config("run")
    config.write_text(config.read_text().replace(str(tmp_path / "run"), "run"))
    monkeypatch.chdir(tmp_path)
    assert main(["begin", str(tmp_path / "run"), "--session", "job-7-0", "--config", str(config)]) == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(["begin", str(tmp_path / "run"), "--session", "job-8-0", "--config", str(config)]) == 78
    assert "run_dir is" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["begin", "end"])
def test_bookkeeping_waits_for_a_run_folder_that_is_away_and_ends_with_75_when_its_patience_ends(
    tiny_config: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
):
    config, run = tiny_config("run", **{"cluster.storage_patience_s": 2.0}), tmp_path / "run"
    arguments = ["--session", "job-7-0", "--config", str(config)]
    main(["begin", str(run), *arguments])
    num_failures = 2

    def away(run_dir: Path, event: str, **details: Any) -> None:
        """Raise StoreAway as often as `num_failures` is set to, and append the line after that."""
        nonlocal num_failures
        num_failures -= 1
        if num_failures >= 0:
            raise StoreAway(f"{run_dir}: read-only file system; mount it for writing")
        append_job(run_dir, event, **details)

    append_job = job.append_job
    monkeypatch.setattr(job, "append_job", away)
    options = [command, str(run), *arguments]
    assert main(options) == 0
    assert read_jobs(run)[-1].event == command
    num_failures = 1000
    assert main(options) == 75
    assert "storage was waited for" in capsys.readouterr().err
