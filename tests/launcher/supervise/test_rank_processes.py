"""Processes of one start: the summary of their stacks, and killing them with their descendants."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from electra_dist.run.marked_processes import MARK, is_alive, mark_of, marked_pids
from launcher.supervise.rank_processes import RankProcesses, condensed

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
