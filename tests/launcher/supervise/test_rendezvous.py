"""The rendezvous of supervisors: each start is joined once, and a superseded job does not disturb the new one."""

from __future__ import annotations

from pathlib import Path

import pytest
from electra_launcher.supervise import rendezvous
from electra_launcher.supervise.rendezvous import Rendezvous


def never() -> bool:
    """Return False: no stop is requested while a supervisor waits."""
    return False


def news_of(node: Rendezvous) -> str:
    """Return the result of `news` of a node, as if a second had passed since the last call."""
    node._next_look = 0.0
    return node.news()


def test_a_node_of_a_superseded_job_does_not_join_the_new_job(tmp_path: Path):
    old_zero, old_one = Rendezvous(tmp_path, 0, 7000, "7-0"), Rendezvous(tmp_path, 1, 7000, "7-0")
    port = old_zero.start(never, 1)
    assert old_one.start(never, 1) == port
    assert not old_one.taken_over() and not old_one.news()
    new_zero, new_one = Rendezvous(tmp_path, 0, 7100, "7-1"), Rendezvous(tmp_path, 1, 7100, "7-1")
    assert not new_one.taken_over()  # node 0 of the new job has not begun yet
    new_port = new_zero.start(never, 1)
    assert old_one.start(never, 0.5) is None
    assert new_one.start(never, 1) == new_port
    assert old_zero.taken_over() == old_one.taken_over() == "7-1"
    assert not new_zero.taken_over() and not new_one.taken_over()


def test_a_superseded_job_learns_the_name_of_the_job_that_has_taken_over(tmp_path: Path):
    old = Rendezvous(tmp_path, 0, 7000, "7-0")
    old.start(never, 1)
    Rendezvous(tmp_path, 0, 7000, "9-0").start(never, 1)
    assert old.news() == "9-0 has taken the run over"


def test_a_new_start_of_a_superseded_job_does_not_take_the_run_back(tmp_path: Path):
    old, new = Rendezvous(tmp_path, 0, 7000, "7-0"), Rendezvous(tmp_path, 0, 7000, "7-1")
    old.start(never, 1)
    new.start(never, 1)
    old.start(never, 1)  # before it has looked at the meeting folder again
    new.start(never, 1)
    assert old.taken_over() == "7-1"
    assert not new.taken_over()


def test_without_a_session_no_job_is_superseded(tmp_path: Path):
    first, second = Rendezvous(tmp_path, 0, None), Rendezvous(tmp_path, 0, None)
    first.start(never, 1)
    second.start(never, 1)
    assert not first.taken_over() and not second.taken_over()


def test_a_node_joins_each_start_once_and_learns_which_node_failed(tmp_path: Path) -> None:
    zero, one = Rendezvous(tmp_path, 0, 7000), Rendezvous(tmp_path, 1, 7000)
    assert one.start(never, 0.1) is None  # node 0 has not announced a start
    port = zero.start(never, 1)
    assert one.start(never, 1) == port
    assert zero.news() == one.news() == ""
    one.end(1, final=False, ends_others=True)
    zero._next_look = 0.0
    assert "node 1 have ended with exit code 1" in zero.news()
    assert one.start(never, 0.3) is None  # the same start is not joined again
    zero.end(1, final=False, ends_others=True)
    again = zero.start(never, 1)
    assert again != port and one.start(never, 1) == again
    one._next_look = zero._next_look = 0.0
    assert zero.news() == one.news() == ""


def test_a_node_that_ends_for_good_ends_the_other_nodes(tmp_path: Path) -> None:
    zero, one = Rendezvous(tmp_path, 0, 7000), Rendezvous(tmp_path, 1, 7000)
    zero.start(never, 1), one.start(never, 1)
    one.end(69, final=True, ends_others=True)
    assert zero.start(never, 1) is None and zero.left_by() == (1, 75)
    zero.end(75, final=True, ends_others=False)
    assert one.start(never, 5) is None
    # No node has left the next job of this run.
    zero, one = Rendezvous(tmp_path, 0, 7000), Rendezvous(tmp_path, 1, 7000)
    assert one.start(never, 0.3) is None  # the old start is recognized as ended
    port = zero.start(never, 1)
    assert port is not None and zero.left_by() is None and zero.news() == ""
    assert one.start(never, 1) == port


def test_a_node_that_joined_the_start_of_a_dead_job_leaves_it_for_the_new_start(tmp_path: Path) -> None:
    Rendezvous(tmp_path, 0, 7000).start(never, 1)
    one = Rendezvous(tmp_path, 1, 7000)
    old = one.start(never, 1)
    new = Rendezvous(tmp_path, 0, 7000).start(never, 1)
    one._next_look = 0.0
    assert one.superseded() and "new start" in one.news()
    assert one.start(never, 1) == new != old


def test_a_node_whose_ranks_ended_with_75_alone_ends_the_others_and_a_common_stop_does_not(tmp_path: Path) -> None:
    zero, one, two = (Rendezvous(tmp_path, number, 7000) for number in range(3))
    for node in (zero, one, two):
        node.start(never, 1)
    one.end(75, final=True, ends_others=False)  # after a stop, for which node 0 still saves
    assert news_of(zero) == news_of(two) == ""
    two.end(75, final=True, ends_others=True)  # its storage was away
    assert news_of(zero) == news_of(one) == "the ranks of node 2 have ended with exit code 75"
    zero.end(1, final=False, ends_others=True)
    assert zero.start(never, 1) is None and zero.left_by() == (1, 75)


def test_the_end_of_node_0_ends_the_ranks_of_the_others(tmp_path: Path) -> None:
    zero, one = Rendezvous(tmp_path, 0, 7000), Rendezvous(tmp_path, 1, 7000)
    zero.start(never, 1), one.start(never, 1)
    zero.end(78, final=True, ends_others=True)
    assert news_of(one) == "the ranks of node 0 have ended with exit code 78"
    assert one.start(never, 5) is None and one.left_by() == (0, 78)


def test_a_node_that_failed_before_it_joined_a_start_does_not_end_the_next_job(tmp_path: Path) -> None:
    """Without a session, both jobs use the same files."""
    Rendezvous(tmp_path, 1, 7000).end(69, final=True, ends_others=True)  # its preflight failed
    assert Rendezvous(tmp_path, 0, 7000).start(never, 1) is None
    zero, one = Rendezvous(tmp_path, 0, 7000), Rendezvous(tmp_path, 1, 7000)
    zero.begin(), one.begin()
    port = zero.start(never, 1)
    assert port is not None and one.start(never, 1) == port
    assert news_of(zero) == news_of(one) == ""


def test_a_new_job_without_a_readable_file_of_node_0_begins_after_all_starts_that_others_know(tmp_path: Path) -> None:
    zero, one = Rendezvous(tmp_path, 0, 7000), Rendezvous(tmp_path, 1, 7000)
    for _ in range(4):
        zero.start(never, 1), one.start(never, 1)
        one.end(1, final=False, ends_others=True)
        zero.end(1, final=False, ends_others=True)
    (tmp_path / "meeting" / "node-0.json").write_bytes(b"{")
    assert news_of(one) == "" and one.left_by() is None
    Rendezvous(tmp_path, 0, 7000).start(never, 1)
    assert one.start(never, 1) is not None


@pytest.mark.parametrize("name", ["node-1 (copy).json", "node-1.json.json", "node-x.json", "node-01.json", "a-b.json"])
def test_files_of_others_in_the_meeting_folder_are_passed_over(tmp_path: Path, name: str):
    zero, one = Rendezvous(tmp_path, 0, 7000), Rendezvous(tmp_path, 1, 7000)
    zero.start(never, 1)
    (tmp_path / "meeting" / name).write_text("not json")
    for _ in range(3):
        assert zero.start(never, 1) == one.start(never, 1)
        one.end(1, final=False, ends_others=True)
        assert "node 1" in news_of(zero)
    assert (tmp_path / "meeting" / name).read_text() == "not json"


def test_two_consecutive_starts_have_different_ports_also_if_no_port_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first start skips the port of its turn, so its port is the turn of the second start."""
    node_0 = Rendezvous(tmp_path, node=0, port=7000)
    turn_of_first_start = 2  # the first start of a job skips a number
    free_ports = {7000 + turn_of_first_start + 1}
    monkeypatch.setattr(rendezvous, "is_free", lambda port: port in free_ports)
    assert node_0.start(never, 1) == 7003

    free_ports.clear()

    assert node_0.start(never, 1) == 7004
