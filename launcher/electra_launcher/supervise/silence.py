"""Find the hung ranks of a node: those that have sent no heartbeat for too long, unless the run folder is the reason.

Guarantee: a jump of a wall clock, on this node or another, neither hides nor makes a hang. While the run folder is
full, read-only, or does not answer, no rank counts as hung, up to the longest time that a rank may wait for storage.
Once the folder can be written again, the silence of each rank is counted from that moment. If the supervisor itself
did not execute for more than 5 s (it was blocked in a read, or suspended), the silence is counted from its next look.

How: the supervisor looks at the heartbeats twice per second and dates each by its own clock, which never jumps, when
it first sees it. The heartbeats of other nodes' ranks are read only while a rank of this node has been silent for a
quarter of its limit. To learn whether the folder is the reason, a thread sets the modification time of the
supervisor's log file, for which the disk or the file server must write. If that takes more than a second, the folder
counts as not answering. A thread is needed because a blocked system call cannot be interrupted.

Limits: if the culprit's node has lost its power, the silence of its ranks counts from the first look at them, so that
the hang is noticed up to a quarter of the limit later.
"""

from __future__ import annotations

import dataclasses
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from electra_dist.config import ClusterConfig
from electra_dist.run.folder import supervise_log
from electra_dist.run.heartbeat import Beat, Hung, hung, read_heartbeats, silence_limit_s, storage_limit_s
from electra_dist.store.atomic_files import disk_problem
from electra_dist.store.failure_kinds import is_worth_waiting_for, os_failure

_LOOK_S = 0.5  # between two looks at the heartbeats, which may lie on a shared file system
_LEAVE_S = 120.0  # how long a process may still exist after its last heartbeat ("done")
_ANSWER_S = 1.0  # If a probe takes longer, the folder counts as not answering.
_PAUSE_S = 5.0  # A longer time between two rounds means that the supervisor itself did not execute.


class SilenceWatch:
    """Watcher of the heartbeats of this node's ranks. Make one for each start of the ranks."""

    def __init__(self, run_dir: Path, node: int, cluster: ClusterConfig, log: Callable[[str], None]) -> None:
        self._run_dir = run_dir
        self._cluster = cluster
        self._next_look = 0.0
        self._first_seen = FirstSeen()
        own_file = supervise_log(run_dir, node)
        self._folder = FolderWatch(lambda: probe_folder(run_dir, own_file), storage_limit_s(cluster), log)

    def round_begins(self) -> None:
        """Record that the supervisor's loop runs; call it in each round."""
        self._folder.round_begins()

    def find_hung(self, alive: Mapping[int, int], started: float) -> list[Hung]:
        """Return this node's hung ranks, the likely culprit first; [] if the previous call was less than 0.5 s ago.

        A rank that finished its work over 120 s ago but still exists is hung, too. `alive` maps the ranks that run to
        their pids; `started` is when they were started, by `time.monotonic`.
        """
        if time.monotonic() < self._next_look:
            return []
        self._next_look = time.monotonic() + _LOOK_S
        # The files may hold heartbeats of an earlier start, which had other pids.
        read = [beat for beat in read_heartbeats(self._run_dir, alive) if alive[beat.rank] == beat.pid]
        now = time.monotonic()
        beats = self._first_seen.date(read, now)
        silent = hung(
            beats,
            now,
            self._cluster,
            started=started,
            ranks=alive,
            all_beats=self._beats_of_all_nodes(beats, now),
            not_before=self._folder.back_since,
        )
        if (silent or self._folder.is_away) and self._folder.explains_silence():
            silent = []
        lingering = [
            Hung(rank=beat.rank, host="", phase="done", step=0, quiet_s=now - beat.time, limit_s=_LEAVE_S)
            for beat in beats
            if beat.phase == "done" and now - beat.time > _LEAVE_S
        ]
        return silent + lingering

    def _beats_of_all_nodes(self, own_beats: Iterable[Beat], now: float) -> list[Beat]:
        """Return the heartbeats of all ranks if one of this node may be waiting for another node's, otherwise []."""
        if any(now - beat.time > silence_limit_s(beat, self._cluster) / 4 for beat in own_beats):
            return self._first_seen.date(read_heartbeats(self._run_dir), now)
        return []


class FirstSeen:
    """Record of when this process first saw each rank's newest heartbeat and its phase, by `time.monotonic`."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Beat, Beat]] = {}  # rank -> its newest heartbeat as read, and as dated

    def date(self, beats: Iterable[Beat], now: float) -> list[Beat]:
        """Return heartbeats, read at `now`, with the times at which they and their phases were first seen.

        These times replace those of the ranks' own clocks, which may jump or differ.
        """
        return [self._date(beat, now) for beat in beats]

    def _date(self, beat: Beat, now: float) -> Beat:
        phase_since = now
        is_first_of_phase = beat.phase_since == beat.time
        if not is_first_of_phase:
            phase_since = math.nextafter(now, -math.inf)  # `now` would mean that the phase has just begun
        if beat.rank in self._seen:
            earlier, dated_earlier = self._seen[beat.rank]
            if beat == earlier:
                return dated_earlier
            if _is_same_phase(earlier, beat):
                phase_since = dated_earlier.phase_since
        dated = dataclasses.replace(beat, time=now, phase_since=phase_since)
        self._seen[beat.rank] = (beat, dated)
        return dated


def _is_same_phase(earlier: Beat, beat: Beat) -> bool:
    """Return whether a rank was the same process, in the same phase of its work, at both heartbeats."""
    return (earlier.pid, earlier.phase, earlier.phase_since) == (beat.pid, beat.phase, beat.phase_since)


class FolderWatch:
    """Watcher of the run folder that decides whether ranks send no heartbeats only because of the folder.

    Call `round_begins` in each round of the supervisor's loop. Call `explains_silence` when a rank has sent no
    heartbeat for too long, and at each look while `is_away` is True.
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
        """Call `probe`, or wait for its unfinished call; return its result, or "no answer" after a second."""
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
