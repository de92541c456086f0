"""Find the hung ranks of a node, and record in RUN/hangs/START/ what the ranks of all nodes were doing then.

    hangs/job-4711-0-start-000002/node-0.txt      why the ranks are ended, and the stacks of all ranks of node 0
    hangs/job-4711-0-start-000002/nccl-3          NCCL's record of the last collectives of rank 3 (flight recorder)

Guarantee: a rank is hung if it has sent no heartbeat for too long, unless the run folder is the reason. A jump of a
wall clock, on this node or another, neither hides nor makes a hang. While the run folder is full, read-only, or does
not answer, no rank counts as hung, up to the longest time that a rank may wait for storage. Once the folder can be
written again, the silence of each rank is counted from that moment. If the supervisor itself did not execute for more
than 5 s (it was blocked in a read, or suspended), the silence is counted from its next look. The supervisor that finds
a hung rank writes the file of its node before it kills its ranks, and first waits up to 10 s for the files of the
other nodes: when the ranks of one node are killed, the collectives of the others fail, and their stacks no longer show
the hang.

How: the supervisor looks at the heartbeats twice per second and dates each by its own clock, which never jumps, when
it first sees it. The heartbeats of other nodes' ranks are read only while a rank of this node has been silent for a
quarter of its limit. To learn whether the folder is the reason, a thread sets the modification time of the
supervisor's log file, for which the disk or the file server must write. If that takes more than a second, the folder
counts as not answering. A thread is needed because a blocked system call cannot be interrupted. The supervisor that
finds a hung rank creates the folder of the report. The others look for it once per second, and write their files then.

Limits: if the culprit's node has lost its power, the silence of its ranks counts from the first look at them, so that
the hang is noticed up to a quarter of the limit later. If a file of the report cannot be written, one line in the log
names the reason. NCCL's records exist only on GPUs: torch writes the record of a rank after something was written into
the rank's pipe (TORCH_NCCL_DEBUG_INFO_PIPE_FILE). The program `torchfrtrace` reads the records.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from electra_dist.config import ClusterConfig
from electra_dist.run.folder import supervise_log
from electra_dist.run.heartbeat import Beat, Hung, hung, read_heartbeats, silence_limit_s, storage_limit_s
from electra_dist.store.atomic_files import disk_problem
from electra_dist.store.failure_kinds import is_worth_waiting_for, os_failure
from electra_launcher.supervise.rank_processes import write_to_pipe

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
            of_process = (beat.pid, beat.phase, beat.phase_since)
            if of_process == (earlier.pid, earlier.phase, earlier.phase_since):
                phase_since = dated_earlier.phase_since
        dated = dataclasses.replace(beat, time=now, phase_since=phase_since)
        self._seen[beat.rank] = (beat, dated)
        return dated


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
            self._thread = threading.Thread(
                target=lambda: self._answer.append(self._probe()), name="folder-watch", daemon=True
            )
            self._thread.start()
        self._thread.join(_ANSWER_S)
        if self._thread.is_alive():
            return "no answer"
        self._thread = None
        return self._answer[0]


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


# Prefixes of the names of two files per rank in the temporary state folder of a node; the rank's number follows.
_NCCL_TRACE = "nccl-trace-"
_NCCL_PIPE = "nccl-pipe-"
_TRACE_EVENTS = "2000"  # how many of its newest collectives the record of a rank holds
_OTHER_NODES_S = 10.0  # how long the node with the hung rank waits for the files of the other nodes
_POLL_S = 0.2  # between two looks for the files of the other nodes


class HangReport:
    """Report of a hang, to which the supervisor of each node adds a file. Make a new one for each start of the ranks.

    The supervisor that finds a hung rank calls `begin`, `write` and `await_other_nodes`. The supervisors of the other
    nodes poll `was_begun`; when it is True, they call `write`.
    """

    def __init__(self, folder: Path, node: int, num_nodes: int, log: Callable[[str], None]) -> None:
        self._folder = folder
        self._node = node
        self._num_nodes = num_nodes
        self._log = log

    @property
    def was_begun(self) -> bool:
        """Return whether any node has found a hung rank since the ranks were started (the report's folder exists)."""
        return self._folder.exists()

    def begin(self) -> None:
        """Create the folder of the report, which makes the supervisors of the other nodes write their files."""
        with self._logging_failures():
            self._folder.mkdir(parents=True, exist_ok=True)

    def write(self, why: str, stacks: Sequence[str], state: Path) -> None:
        """Write `why` and the `stacks` into this node's file of the report; copy NCCL's records from `state` to it."""
        with self._logging_failures():
            for trace in sorted(state.glob(f"{_NCCL_TRACE}*")):
                shutil.copyfile(trace, self._folder / f"nccl-{trace.name.removeprefix(_NCCL_TRACE)}")
            unfinished = self._folder / f"node-{self._node}.tmp"
            unfinished.write_text("\n".join([why, *stacks, ""]), encoding="utf-8")
            unfinished.rename(self._folder / f"node-{self._node}.txt")

    def await_other_nodes(self) -> None:
        """Wait until all nodes, this one included, have written their files of the report, but at most 10 s."""
        deadline = time.monotonic() + _OTHER_NODES_S
        while time.monotonic() < deadline:
            num_written = len(list(self._folder.glob("node-*.txt")))
            if num_written >= self._num_nodes:
                return
            time.sleep(_POLL_S)

    @contextlib.contextmanager
    def _logging_failures(self) -> Iterator[None]:
        """Log an OSError of the `with` block instead of raising it, because the ranks must be killed in any case."""
        try:
            yield
        except OSError as error:
            self._log(f"{self._folder}: the report of the hang is not complete ({error.strerror})")


def nccl_environment(state: Path, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables with which torch 2.13 records a rank's NCCL collectives in a file below `state`.

    torch writes the record when a collective times out, and when `request_nccl_traces` is called. torch also ends a
    process whose collective failed or timed out. Variables in `inherited` are left out: the user's values apply.
    """
    variables = {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",  # End the process without NCCL's clean-up, which may hang, too.
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_BUFFER_SIZE": _TRACE_EVENTS,
        # torch appends the rank's number to both paths.
        "TORCH_FR_DUMP_TEMP_FILE": str(state / _NCCL_TRACE),
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(state / _NCCL_PIPE),
    }
    return {name: value for name, value in variables.items() if name not in inherited}


def request_nccl_traces(state: Path) -> None:
    """Ask torch to write NCCL's records of this node's ranks into the folder `state`; return before it has."""
    for pipe in state.glob(f"{_NCCL_PIPE}*"):
        write_to_pipe(pipe, b"1\n")
