"""The rendezvous of supervisors: each start is joined once, and a superseded job does not disturb the new one."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.supervise import rendezvous
from launcher.supervise.rendezvous import Rendezvous


def never() -> bool:
    """Return False: no stop is requested while a supervisor waits."""
    return False


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
    one.end(1, final=False)
    zero._next_look = 0.0
    assert "node 1 have ended with exit code 1" in zero.news()
    assert one.start(never, 0.3) is None  # the same start is not joined again
    zero.end(1, final=False)
    again = zero.start(never, 1)
    assert again != port and one.start(never, 1) == again
    one._next_look = zero._next_look = 0.0
    assert zero.news() == one.news() == ""


def test_a_node_that_ends_for_good_ends_the_other_nodes(tmp_path: Path) -> None:
    zero, one = Rendezvous(tmp_path, 0, 7000), Rendezvous(tmp_path, 1, 7000)
    zero.start(never, 1), one.start(never, 1)
    one.end(69, final=True)
    assert zero.start(never, 1) is None and zero.left_by() == (1, 75)
    zero.end(75, final=True)
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


@pytest.mark.parametrize(
    "name", ["start-7 (copy).json", "end-000001-node-1.json.json", "end-x-node-1.json", "a-b.json"]
)
def test_files_of_others_in_the_meeting_folder_are_passed_over(tmp_path: Path, name: str):
    zero, one = Rendezvous(tmp_path, 0, 7000), Rendezvous(tmp_path, 1, 7000)
    zero.start(never, 1)
    (folder,) = {file.parent for file in tmp_path.rglob("start-*.json")}
    (folder / name).write_text("not json")
    for _ in range(5):
        assert zero.start(never, 1) == one.start(never, 1)
        one.end(1, final=False)
        zero._next_look = 0.0
        assert "node 1" in zero.news()
    assert (folder / name).read_text() == "not json"


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
