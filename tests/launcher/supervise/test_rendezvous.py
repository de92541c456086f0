"""How supervisors meet: each start is joined once, and whoever was given up neither meets nor fights its successor."""

from __future__ import annotations

from pathlib import Path

from launcher.supervise.rendezvous import Rendezvous


def never() -> bool:
    return False


def test_a_node_that_was_given_up_does_not_join_the_job_that_took_over(tmp_path: Path):
    old_zero, old_one = Rendezvous(tmp_path, 0, 7000, "7-0"), Rendezvous(tmp_path, 1, 7000, "7-0")
    port = old_zero.start(never, 1)
    assert old_one.start(never, 1) == port
    assert not old_one.taken_over() and not old_one.news()
    new_zero, new_one = Rendezvous(tmp_path, 0, 7100, "7-1"), Rendezvous(tmp_path, 1, 7100, "7-1")
    assert not new_one.taken_over()  # it is early, not late
    new_port = new_zero.start(never, 1)
    assert old_one.start(never, 0.5) is None
    assert new_one.start(never, 1) == new_port
    assert old_zero.taken_over() == old_one.taken_over() == "7-1"
    assert not new_zero.taken_over() and not new_one.taken_over()


def test_ranks_of_a_job_that_was_given_up_are_told_to_end(tmp_path: Path):
    old = Rendezvous(tmp_path, 0, 7000, "7-0")
    old.start(never, 1)
    Rendezvous(tmp_path, 0, 7000, "9-0").start(never, 1)
    assert old.news() == "9-0 has taken the run over"


def test_a_restart_within_a_job_takes_nothing_back(tmp_path: Path):
    old, new = Rendezvous(tmp_path, 0, 7000, "7-0"), Rendezvous(tmp_path, 0, 7000, "7-1")
    old.start(never, 1)
    new.start(never, 1)
    old.start(never, 1)  # between two looks
    new.start(never, 1)
    assert old.taken_over() == "7-1"
    assert not new.taken_over()


def test_without_a_session_nobody_is_taken_over(tmp_path: Path):
    first, second = Rendezvous(tmp_path, 0, None), Rendezvous(tmp_path, 0, None)
    first.start(never, 1)
    second.start(never, 1)
    assert not first.taken_over() and not second.taken_over()


def test_a_node_joins_each_start_once_and_learns_who_failed(tmp_path: Path) -> None:
    zero, one = Rendezvous(tmp_path, 0, 7000), Rendezvous(tmp_path, 1, 7000)
    assert one.start(never, 0.1) is None  # nobody has called
    port = zero.start(never, 1)
    assert one.start(never, 1) == port
    assert zero.news() == one.news() == ""
    one.end(1, final=False)
    zero._next_look = 0.0
    assert "node 1 have ended with exit code 1" in zero.news()
    assert one.start(never, 0.3) is None  # not the same one again
    zero.end(1, final=False)
    again = zero.start(never, 1)
    assert again != port and one.start(never, 1) == again
    one._next_look = zero._next_look = 0.0
    assert zero.news() == one.news() == ""


def test_who_ends_for_good_takes_the_others_along(tmp_path: Path) -> None:
    zero, one = Rendezvous(tmp_path, 0, 7000), Rendezvous(tmp_path, 1, 7000)
    zero.start(never, 1), one.start(never, 1)
    one.end(69, final=True)
    assert zero.start(never, 1) is None and zero.left_by() == (1, 75)
    zero.end(75, final=True)
    assert one.start(never, 5) is None
    # The next job of this run: nobody has left that one.
    zero, one = Rendezvous(tmp_path, 0, 7000), Rendezvous(tmp_path, 1, 7000)
    assert one.start(never, 0.3) is None  # the old start is known to be over
    port = zero.start(never, 1)
    assert port is not None and zero.left_by() is None and zero.news() == ""
    assert one.start(never, 1) == port


def test_a_start_that_a_dead_job_left_is_given_up_for_the_new_one(tmp_path: Path) -> None:
    Rendezvous(tmp_path, 0, 7000).start(never, 1)
    one = Rendezvous(tmp_path, 1, 7000)
    old = one.start(never, 1)
    new = Rendezvous(tmp_path, 0, 7000).start(never, 1)
    one._next_look = 0.0
    assert one.superseded() and "new start" in one.news()
    assert one.start(never, 1) == new != old
