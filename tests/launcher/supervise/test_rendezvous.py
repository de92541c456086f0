"""Supervisors of different jobs: one that was given up behind a cut link neither meets nor fights its successor."""

from __future__ import annotations

from pathlib import Path

from launcher.supervise.rendezvous import Meeting


def never() -> bool:
    return False


def test_a_node_that_was_given_up_does_not_join_the_job_that_took_over(tmp_path: Path):
    old_zero, old_one = Meeting(tmp_path, 0, 7000, "7-0"), Meeting(tmp_path, 1, 7000, "7-0")
    port = old_zero.start(never, 1)
    assert old_one.start(never, 1) == port
    assert not old_one.taken_over() and not old_one.news()
    new_zero, new_one = Meeting(tmp_path, 0, 7100, "7-1"), Meeting(tmp_path, 1, 7100, "7-1")
    assert not new_one.taken_over()  # it is early, not late
    new_port = new_zero.start(never, 1)
    assert old_one.start(never, 0.5) is None
    assert new_one.start(never, 1) == new_port
    assert old_zero.taken_over() == old_one.taken_over() == "7-1"
    assert not new_zero.taken_over() and not new_one.taken_over()


def test_ranks_of_a_job_that_was_given_up_are_told_to_end(tmp_path: Path):
    old = Meeting(tmp_path, 0, 7000, "7-0")
    old.start(never, 1)
    Meeting(tmp_path, 0, 7000, "9-0").start(never, 1)
    assert old.news() == "9-0 has taken the run over"


def test_a_restart_within_a_job_takes_nothing_back(tmp_path: Path):
    old, new = Meeting(tmp_path, 0, 7000, "7-0"), Meeting(tmp_path, 0, 7000, "7-1")
    old.start(never, 1)
    new.start(never, 1)
    old.start(never, 1)  # between two looks
    new.start(never, 1)
    assert old.taken_over() == "7-1"
    assert not new.taken_over()


def test_without_a_session_nobody_is_taken_over(tmp_path: Path):
    first, second = Meeting(tmp_path, 0, None), Meeting(tmp_path, 0, None)
    first.start(never, 1)
    second.start(never, 1)
    assert not first.taken_over() and not second.taken_over()
