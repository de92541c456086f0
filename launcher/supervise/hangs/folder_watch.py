"""Find out whether ranks are silent because the run folder takes no heartbeats: full, read-only, or not answering.

Guarantee: while the run folder takes no bytes, no rank counts as hung, for as long as a rank may wait for storage.
When the folder is back, the silence of each rank counts anew from that moment. A supervisor that did not run itself
for a while, because it was blocked in a read or suspended, begins anew, too.

How: a thread sets the modification time of the supervisor's log file, which asks the disk or the server of the folder
for a write. A call that is not over after a second counts as a folder that does not answer. A thread is needed because
such a call cannot be interrupted.

Cost: none while all ranks send heartbeats.
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

_ANSWER_S = 1.0  # a write that takes longer counts as one that hangs
_PAUSE_S = 5.0  # a longer time between two rounds means that the supervisor itself did not run


class FolderWatch:
    """Judge of whether the run folder explains that ranks are silent, for one start of the ranks.

    Call `round_begins` in each round of the supervisor. Call `explains_silence` when ranks are silent, and again in
    each round while `is_away`.
    """

    def __init__(
        self,
        probe: Callable[[], str],
        patience_s: float,
        log: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with a folder that answers.

        Args:
            probe: returns why the folder takes no bytes, "" if it takes some; it may block. See `probe_folder`.
            patience_s: seconds for which the folder explains that ranks are silent, from the first failed probe on.
            log: receives one line when the folder goes away, and one when it is back.
            clock: seconds of a clock that never jumps.
        """
        self._probe = probe
        self._patience_s = patience_s
        self._log = log
        self._clock = clock
        self._answer: list[str] = []  # of the newest probe, once it is over
        self._thread: threading.Thread | None = None
        self._last_round = clock()
        self._away_since: float | None = None
        self.back_since = -math.inf
        """Time of the clock before which no heartbeat could be written, or none could be read."""

    @property
    def is_away(self) -> bool:
        """Whether the newest probe has found a folder that takes no bytes."""
        return self._away_since is not None

    def round_begins(self) -> None:
        """Record that the supervisor runs; a long time since the last call counts as an outage that is over."""
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
        """Return whether ranks may be silent because the folder takes no bytes now, or took none until now.

        Blocks for up to one second if the folder does not answer.
        """
        problem = self._ask()
        now = self._clock()
        self._last_round = now
        if problem == "":
            was_away = self.is_away
            if was_away:
                self._log("the run folder takes bytes again: the silence of the ranks counts from now on")
                self._away_since = None
                self.back_since = now
            return was_away
        if self._away_since is None:
            self._away_since = now
            self._log(f"no heartbeats: the run folder: {problem}; waiting up to {self._patience_s:.0f} s for it")
        return now - self._away_since < self._patience_s

    def _ask(self) -> str:
        """Return the answer of a probe of the folder, or that it gives none if the probe takes more than a second."""
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
        """Run the probe. The body of the thread."""
        self._answer.append(self._probe())


def probe_folder(run_dir: Path, file: Path) -> str:
    """Return why a run folder takes no bytes now, such as "read-only file system"; "" if it takes some. May block.

    Args:
        run_dir: the run folder.
        file: a file in it of this process's own, whose modification time is set; it may be missing.
    """
    problem = disk_problem(run_dir)
    if problem:
        return problem
    try:
        os.utime(file)
    except OSError as error:
        return os_failure(error).reason if is_worth_waiting_for(error) else ""
    return ""
