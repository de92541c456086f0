"""Processes of one start: the summary of their stacks, and killing them with their descendants."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from electra_launcher.supervise import rank_processes
from electra_launcher.supervise.rank_main import _answer_while_runs
from electra_launcher.supervise.rank_processes import Placement, RankProcesses, condensed

from electra_dist.run.this_node import MARK, is_alive, mark_of, marked_pids

STACKS = """\
Thread 0x00007f04617fa6c0 (most recent call first):
  File "/data/cache.py", line 111 in _work
  File "/lib/threading.py", line 982 in run

Thread 0x00007f0461ffb6c0 (most recent call first):
  File "/data/cache.py", line 111 in _work
  File "/lib/threading.py", line 982 in run

Current thread 0x00007f04bee9ab80 (most recent call first):
  File "/torch/c10d.py", line 3252 in all_reduce
  File "/train/step.py", line 150 in _reduce
"""


def test_condensed_stacks_begin_with_the_main_thread_and_show_equal_stacks_once() -> None:
    assert condensed(STACKS) == [
        "1 thread:",
        "  /torch/c10d.py:3252 all_reduce",
        "  /train/step.py:150 _reduce",
        "2 threads:",
        "  /data/cache.py:111 _work",
        "  /lib/threading.py:982 run",
    ]
    assert condensed("") == []


def test_close_kills_descendants_outside_the_session_and_no_process_of_another_run_or_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, other_node, other_run = mark_of(tmp_path, 0), mark_of(tmp_path, 1), mark_of(tmp_path / "x", 0)
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    strangers = [
        subprocess.Popen(sleep, env={**os.environ, MARK: mark}, start_new_session=True)
        for mark in (other_node, other_run)
    ]
    try:
        ranks = RankProcesses(mine)
        # The rank leaves a child in its own session and ends at once, so that the child is an orphan.
        code = f"import subprocess; subprocess.Popen({sleep!r}, start_new_session=True)"
        monkeypatch.setattr(rank_processes, "RANK_PROGRAM", ("-c", code))
        ranks.start(Placement(node=0, num_nodes=1, ranks_per_node=1), 7000, [], {})
        deadline = time.monotonic() + 20
        while ranks.codes() != {0: 0} or len(marked_pids(mine)) != 1:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert ranks.alive() == {}
        (orphan,) = marked_pids(mine)
        state = ranks.state
        assert ranks.close() == []
        assert not is_alive(orphan) and not state.exists()
        assert all(stranger.poll() is None for stranger in strangers)
    finally:
        for stranger in strangers:
            stranger.kill()
            stranger.wait()


def test_close_waits_for_a_process_that_has_lost_its_mark_and_still_holds_its_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ending process has no environment any more, so no listing finds its mark; its files are closed later."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    listings: list[list[int]] = [[process.pid], [process.pid]]
    looks = [True, True, True]
    monkeypatch.setattr(rank_processes, "marked_pids", lambda mark: listings.pop() if listings else [])
    monkeypatch.setattr(rank_processes, "is_alive", lambda pid: bool(looks) and looks.pop())
    assert RankProcesses(mark_of(tmp_path, 0)).close() == []
    assert looks == []
    assert process.wait() == -signal.SIGKILL


def test_a_start_deletes_the_folders_of_killed_supervisors_of_its_run_that_no_other_user_can_have_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed, on_other_node = RankProcesses(mark_of(tmp_path, 0)), RankProcesses(mark_of(tmp_path, 1))
    of_other_mode, link = (killed.state.with_name(f"{killed.state.name}-{name}") for name in ("mode", "link"))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    of_other_mode.mkdir()
    of_other_mode.chmod(0o777)
    link.symlink_to(elsewhere)
    again = RankProcesses(mark_of(tmp_path, 0))
    kept = [on_other_node.state, again.state, of_other_mode, link, elsewhere]
    assert sorted(tmp_path.iterdir()) == sorted(kept)


def test_a_supervisor_that_has_ended_before_its_rank_looked_is_not_waited_for(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    requests, answers = os.pipe()
    with (tmp_path / "stacks").open("wb") as stacks:
        _answer_while_runs(process.pid, requests, stacks)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        try:
            _answer_while_runs(child.pid, requests, stacks)  # A later process has the number, but is not the parent.
        finally:
            child.kill()
            child.wait()
            os.close(requests)
            os.close(answers)


RANK = """
import ctypes, threading, time
from pathlib import Path
from electra_launcher import pretrain
from electra_launcher.entry import end_process_with
from electra_launcher.supervise import rank_main

def call_deeply(depth):
    return str(Path("a") / "b" / str(depth)) if depth == 0 else call_deeply(depth - 1)

def work(arguments=None):
    while True:
        call_deeply(30)

def keep_the_lock(arguments):
    ctypes.PyDLL(None).sleep(60)

pretrain.main = {main}
for _ in range({threads}):
    threading.Thread(target=work, daemon=True).start()
end_process_with(rank_main.main)
"""


def _started(monkeypatch: pytest.MonkeyPatch, run_dir: Path, code: str) -> RankProcesses:
    """Start a rank that runs `code`."""
    ranks = RankProcesses(mark_of(run_dir, 0))
    monkeypatch.setattr(rank_processes, "RANK_PROGRAM", ("-c", code))
    ranks.start(Placement(node=0, num_nodes=1, ranks_per_node=1), 7000, [], {})
    return ranks


def _await_pipe(ranks: RankProcesses) -> None:
    deadline = time.monotonic() + 60
    while not list(ranks.state.glob("ask-0")):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.real_start  # The rank must be a child of this process.
def test_asking_for_stacks_does_not_end_a_rank_whose_threads_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = _started(monkeypatch, tmp_path, RANK.format(main="work", threads=3))
    try:
        _await_pipe(ranks)
        for _ in range(5):
            for pid in ranks.alive().values():
                os.kill(pid, signal.SIGSTOP)
            text = "\n".join(ranks.stacks())
            assert " work" in text and "_answer_while_runs" in text, text
        assert ranks.codes() == {}
    finally:
        ranks.close()


@pytest.mark.real_start  # The rank must be a child of this process.
def test_a_rank_whose_library_call_keeps_the_interpreter_lock_shows_its_stacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = _started(monkeypatch, tmp_path, RANK.format(main="keep_the_lock", threads=0))
    try:
        _await_pipe(ranks)
        time.sleep(0.5)
        assert "keep_the_lock" in "\n".join(ranks.stacks())
    finally:
        ranks.close()


@pytest.mark.real_start  # The rank must be a child of this process.
def test_a_rank_that_still_imports_has_no_stacks_and_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_processes, "_STACK_WAIT_S", 0.2)
    ranks = _started(monkeypatch, tmp_path, "import time; time.sleep(60)")
    try:
        lines = ranks.stacks()
    finally:
        ranks.close()
    assert lines[0].startswith("rank 0, pid ")
    assert lines[1:] == ["  no answer within 0 s"]
