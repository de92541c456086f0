"""Detection of hung ranks by their heartbeats: limits of phases, the likely culprit first, no false alarm at saves."""

from __future__ import annotations

import pytest

from electra_dist.config import ClusterConfig
from electra_dist.run.heartbeat import Beat, Hung, hung, silence_limit_s

LIMITS = ClusterConfig(
    hang_setup_s=100.0,
    hang_step_factor=5.0,
    hang_step_floor_s=10.0,
    hang_checkpoint_s=60.0,
    hang_eval_s=40.0,
    storage_patience_s=80.0,  # 200 s with the margin for a try that has begun
)


def heartbeat(**changes: object) -> Beat:
    """Return a heartbeat of rank 0 in step 100, sent at time 1000, in the phase "step" since time 900."""
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
    fields.update(changes)
    return Beat(**fields)


@pytest.mark.parametrize(
    ("phase", "step_s", "limit_s"),
    [
        ("setup", None, 100.0),
        ("step", None, 100.0),  # The first steps compile, and their time is unknown: the limit of the setup applies.
        ("step", 4.0, 20.0),  # 5 times the step time
        ("step", 0.1, 10.0),  # the least limit of a step
        ("checkpoint", 4.0, 60.0),
        ("eval", 4.0, 40.0),
    ],
)
def test_a_rank_is_hung_once_its_silence_exceeds_the_limit_of_its_phase(
    phase: str, step_s: float | None, limit_s: float
):
    sent_at = 1000.0
    beat = heartbeat(phase=phase, step_s=step_s, time=sent_at)

    hung_at_limit = hung([beat], sent_at + limit_s, LIMITS)
    hung_after_limit = hung([beat], sent_at + limit_s + 0.5, LIMITS)

    assert hung_at_limit == []
    assert hung_after_limit == [
        Hung(rank=0, host="n1", phase=phase, step=100, quiet_s=limit_s + 0.5, limit_s=limit_s)  # type: ignore[arg-type]
    ]


def test_a_rank_in_its_first_step_after_a_save_may_wait_for_ranks_that_still_save():
    """The waiting rank entered the phase "step" at 1000 with a limit of 10 s; a save may take 60 s.

    Heartbeats of another attempt of the run do not extend the limit.
    """
    waiting = heartbeat(rank=1, step_s=0.1, time=1000.0, phase_since=1000.0)

    # Rank 0 still saves: the limit of a save applies, 60 s.
    saving = heartbeat(rank=0, phase="checkpoint", step_s=0.1, time=990.0, phase_since=990.0)
    assert hung([waiting], 1059.0, LIMITS, all_beats=[waiting, saving]) == []
    hung_ranks = hung([waiting], 1061.0, LIMITS, all_beats=[waiting, saving])
    assert [rank.limit_s for rank in hung_ranks] == [60.0]

    # Rank 0 finished its save at 1030: the 10 s of a step begin then.
    saved_late = heartbeat(rank=0, step_s=0.1, time=1030.0, phase_since=1030.0)
    assert hung([waiting], 1039.0, LIMITS, all_beats=[waiting, saved_late]) == []
    hung_ranks = hung([waiting], 1041.0, LIMITS, all_beats=[waiting, saved_late])
    assert [rank.limit_s for rank in hung_ranks] == [10.0]

    # A rank of another attempt saves: the limit stays 10 s.
    of_other_attempt = heartbeat(rank=0, attempt=2, phase="checkpoint", step_s=0.1)
    assert hung([waiting], 1011.0, LIMITS, all_beats=[waiting, of_other_attempt]) != []


def test_a_rank_that_is_done_is_never_hung():
    assert hung([heartbeat(phase="done")], 1e12, LIMITS) == []


def test_a_rank_that_is_a_step_behind_is_listed_before_the_ranks_that_wait_for_it():
    """Among ranks of the same step, the one that has been silent for longer comes first."""
    shortly_silent = heartbeat(rank=0, time=1000.0)
    one_step_behind = heartbeat(rank=1, step=99, time=1001.0)
    longest_silent = heartbeat(rank=2, time=998.0)

    hung_ranks = hung([shortly_silent, one_step_behind, longest_silent], 1100.0, LIMITS)

    assert [rank.rank for rank in hung_ranks] == [1, 2, 0]


def test_heartbeats_before_the_start_are_ignored_and_ranks_without_a_newer_one_count_as_in_setup():
    started = 990.0
    before_start = heartbeat(rank=0, time=400.0)
    after_start = heartbeat(rank=1, time=1000.0)
    beats = [before_start, after_start]

    assert hung(beats, 1005.0, LIMITS, started=started) == []
    assert hung(beats, 1010.0, LIMITS, started=started, ranks=[0, 1, 2]) == []
    hung_ranks = hung(beats, 1015.0, ClusterConfig(hang_setup_s=20.0), started=started, ranks=[0, 1, 2])

    assert [rank.rank for rank in hung_ranks] == [0, 2]
    for rank in hung_ranks:
        assert rank.phase == "setup"
        assert rank.quiet_s == 25.0  # since the start
        assert rank.host == ""


def test_a_wait_for_storage_has_its_own_limit_from_its_begin_on_however_often_the_rank_reports_it():
    waiting = heartbeat(phase="storage", phase_since=1000.0, time=1199.0, step_s=1.0)

    assert hung([waiting], 1200.0, LIMITS) == []
    (rank,) = hung([heartbeat(phase="storage", phase_since=1000.0, time=1200.0, step_s=1.0)], 1200.5, LIMITS)
    assert (rank.phase, rank.quiet_s, rank.limit_s) == ("storage", 200.5, 200.0)


def test_ranks_may_wait_in_any_step_for_one_that_waits_for_storage():
    """Rank 1 is in the middle of a phase of steps, with a limit of 20 s; rank 0 waits for a disk."""
    silent = heartbeat(rank=1, time=1000.0)
    waiting = heartbeat(phase="storage", phase_since=1005.0, time=1090.0)
    earlier_attempt = heartbeat(phase="storage", phase_since=1005.0, time=1090.0, attempt=0)

    assert hung([silent], 1090.0, LIMITS, all_beats=[silent, waiting]) == []
    assert [rank.rank for rank in hung([silent], 1206.0, LIMITS, all_beats=[silent, waiting])] == [1]
    others = [silent, earlier_attempt]
    assert [rank.rank for rank in hung([silent], 1090.0, LIMITS, all_beats=others)] == [1]


@pytest.mark.parametrize("phase", ["step", "checkpoint", "eval"])
def test_a_rank_that_waited_for_a_slower_rank_is_not_hung_when_that_rank_comes_back(phase: str):
    """Rank 0 was away for 70 s, for data or for a save, and has just gone on. Rank 1 still waits in the collective."""
    waiting = heartbeat(rank=1, step_s=0.1, time=1000.0)
    back = heartbeat(rank=0, step_s=0.1, phase=phase, time=1070.0, phase_since=1070.0)
    beats = [waiting, back]

    assert hung([waiting], 1071.0, LIMITS, all_beats=beats) == []
    limit_s = silence_limit_s(back, LIMITS)
    (rank,) = hung([waiting], 1070.5 + limit_s, LIMITS, all_beats=beats)
    assert (rank.rank, rank.limit_s) == (1, limit_s)


def test_a_stuck_rank_is_not_excused_by_ranks_that_are_ahead_of_it_or_done():
    stuck = heartbeat(rank=1, step=99, step_s=0.1, time=1000.0)
    ahead = heartbeat(rank=0, step=100, step_s=0.1, time=1012.0)
    done = heartbeat(rank=2, phase="done", step=99, time=1012.0)

    (rank,) = hung([stuck], 1011.0, LIMITS, all_beats=[stuck, ahead, done])
    assert (rank.rank, rank.quiet_s) == (1, 11.0)


def test_no_silence_is_counted_from_before_the_time_at_which_heartbeats_could_be_written_again():
    silent = heartbeat(rank=0, step_s=0.1)

    assert hung([silent], 1015.0, LIMITS, ranks=[0, 1], not_before=1006.0) == []
    assert [rank.rank for rank in hung([silent], 1017.0, LIMITS, not_before=1006.0)] == [0]
    assert hung([silent], 1120.0, LIMITS, started=990.0, ranks=[1], not_before=1119.0) == []
