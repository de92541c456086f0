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

from electra_dist.run.processes import MARK, is_alive, mark_of, marked_pids
from launcher.supervise import rank_processes
from launcher.supervise.rank_processes import RankProcesses, condensed, delete_old_state_folders
from launcher.supervise.supervisor_watch import write_owner

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


def test_close_kills_descendants_outside_the_session_and_no_process_of_another_run_or_node(tmp_path: Path) -> None:
    mine, other_node, other_run = mark_of(tmp_path, 0), mark_of(tmp_path, 1), mark_of(tmp_path / "x", 0)
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    strangers = [
        subprocess.Popen(sleep, env={**os.environ, MARK: mark}, start_new_session=True)
        for mark in (other_node, other_run)
    ]
    try:
        ranks = RankProcesses(mine)
        # The started process leaves a child in its own session and ends at once, so that the child is an orphan.
        code = f"import subprocess; subprocess.Popen({sleep!r}, start_new_session=True)"
        ranks.start([sys.executable, "-c", code], {})
        deadline = time.monotonic() + 20
        while ranks.launcher_runs() or len(marked_pids(mine)) != 1:
            assert time.monotonic() < deadline
            time.sleep(0.01)
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


def test_a_state_folder_that_another_user_could_have_made_is_neither_read_nor_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mark = mark_of(tmp_path / "run", 0)
    own, of_other_mode, with_pipe, elsewhere = [tmp_path / name for name in ("own", "mode", "pipe", "elsewhere")]
    folders = [tmp_path / f"electra-dist-ranks-{folder.name}" for folder in (own, of_other_mode, with_pipe)]
    for folder in (*folders, elsewhere):
        folder.mkdir(mode=0o700)
    for folder in (*folders[:2], elsewhere):
        write_owner(folder, mark)
    folders[1].chmod(0o777)
    os.mkfifo(folders[2] / "mark")  # whoever reads it waits for ever
    folders[2].chmod(0o755)
    link = tmp_path / "electra-dist-ranks-link"
    link.symlink_to(elsewhere)
    delete_old_state_folders(mark)
    assert [folder.exists() for folder in (*folders, link, elsewhere)] == [False, True, True, True, True]
