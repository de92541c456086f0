"""Find out whether ranks send no heartbeats because their run folder cannot be written.

Guarantee: while the run folder is full, read-only, or does not answer, no rank counts as hung, up to the longest time
that a rank may wait for storage. Once the folder can be written again, the silence of each rank is counted from that
moment. If the supervisor itself did not execute for more than 5 s (it was blocked in a read, or suspended), the
silence of each rank is counted from the next round of the supervisor's loop.

How: a thread sets the modification time of the supervisor's log file, for which the disk or the file server must
write. If that takes more than a second, the folder counts as not answering. A thread is needed because a blocked
system call cannot be interrupted.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from electra_dist.store.atomic_files import disk_problem
from electra_dist.store.failure_kinds import is_worth_waiting_for, os_failure

_ANSWER_S = 1.0  # If a probe takes longer, the folder counts as not answering.
_PAUSE_S = 5.0  # A longer time between two rounds means that the supervisor itself did not execute.


class FolderWatch:
    """Watcher of the run folder that decides whether ranks send no heartbeats only because of the folder.

    Make one for each start of the ranks, and call `round_begins` in each round of the supervisor's loop. Call
    `explains_silence` when a rank has sent no heartbeat for too long, and in each round while `is_away` is True.
    """

    def __init__(
        self,
        probe: Callable[[], str],
        patience_s: float,
        log: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take `probe`, which returns why the folder cannot be written, or "" if it can; `probe` may block."""
        self._probe = probe
        self._patience_s = patience_s
        self._log = log
        self._clock = clock
        self._answer: list[str] = []  # result of the newest probe; empty while it is in progress
        self._thread: threading.Thread | None = None  # of a probe that is in progress
        self._last_round = clock()
        self._away_since: float | None = None
        self.back_since = -math.inf
        """Time of `clock` from which the silence of ranks counts: heartbeats could not be written or read before."""

    @property
    def is_away(self) -> bool:
        """Return whether the folder could not be written or did not answer at the last call of `explains_silence`."""
        return self._away_since is not None

    def round_begins(self) -> None:
        """Record that the supervisor's loop runs. After a pause of over 5 s, `back_since` becomes the current time."""
        now = self._clock()
        pause_s = now - self._last_round
        self._last_round = now
        if pause_s > _PAUSE_S:
            self._log(
                f"this supervisor did not run for {pause_s:.0f} s (blocked by storage, or suspended): the silence of "
                f"its ranks counts from now on"
            )
            self.back_since = now

    def explains_silence(self) -> bool:
        """Probe the folder for up to a second; return whether ranks may be silent only because of the folder.

        The result is True while probes fail, for at most `patience_s` seconds after the first failure. When the folder
        is back, the result is True once more, because the ranks had no time to send heartbeats yet, and `back_since`
        becomes the current time.
        """
        problem = self._probe_for_one_second()
        now = self._clock()
        self._last_round = now  # The time of the probe must not count as a time in which the supervisor was blocked.
        if problem == "":
            if not self.is_away:
                return False
            self._log("the run folder takes bytes again: the silence of the ranks counts from now on")
            self._away_since = None
            self.back_since = now
            return True
        if self._away_since is None:
            self._away_since = now
            self._log(f"no heartbeats: the run folder: {problem}; waiting up to {self._patience_s:.0f} s for it")
        return now - self._away_since < self._patience_s

    def _probe_for_one_second(self) -> str:
        """Call `probe` or wait for its last call; return its result, or "no answer" if it takes over a second."""
        if self._thread is None:
            self._answer = []
            self._thread = threading.Thread(target=self._run_probe, name="folder-watch", daemon=True)
            self._thread.start()
        self._thread.join(_ANSWER_S)
        if self._thread.is_alive():
            return "no answer"
        self._thread = None
        return self._answer[0]

    def _run_probe(self) -> None:
        self._answer.append(self._probe())


def probe_folder(run_dir: Path, file: Path) -> str:
    """Return why a run folder cannot be written now, such as "read-only file system"; "" if it can be written.

    The test sets the modification time of `file`, and blocks for as long as the file system does not answer. An error
    that would not go away with time, such as a missing file, also gives "".
    """
    problem = disk_problem(run_dir)
    if problem:
        return problem
    try:
        os.utime(file)
    except OSError as error:
        return os_failure(error).reason if is_worth_waiting_for(error) else ""
    return ""
