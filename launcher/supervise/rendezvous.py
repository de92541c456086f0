"""Let the supervisors of several nodes agree on each start of the ranks, by files in RUN/meeting/SESSION/.

    start-000007.json           by node 0: start 7 begins, on this port
    end-000007-node-1.json      by node 1: its ranks of start 7 ended with this code; `final`: its supervisor ends, too
    summary.json                by node 0: the newest start and all reports on it, which the other nodes read
    ../sessions                 one line for each session that began; supervisors of all but the last one must end

The ranks of a run are started on all nodes at once, and again after a crash; these starts are numbered. A session is
one job, for example one Slurm job.

Guarantees: only node 0 begins starts; every other node joins each start at most once. A node reports when its ranks
have ended, so that the ranks of other nodes, which would wait in a collective for minutes, are ended within seconds. A
node that was cut off from the network never joins the job that replaced its own. Without a session name, a node may
join a start of an earlier job, until it sees the new start of node 0. Starts use 64 ports in turn, so that no rank of
an earlier start can connect to the current one. A run on one node writes the same files and waits for nothing.

Limits: on NFS, another node may see a new file a minute late. A network failure between nodes is not reported through
these files: the supervisors on each side then find their own ranks hung. If the supervisor of node 0 is killed, the
other nodes wait ten seconds before they read each other's reports directly.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from electra_dist.engine.rank_environment import is_free
from electra_dist.errors import EXIT_CRASH, EXIT_DONE, EXIT_STOPPED, EXIT_USER_ERROR
from electra_dist.run.folder import HANGS_DIR, MEETING_DIR
from electra_dist.store.atomic_files import replacing
from electra_dist.store.json_file import read_json_as
from electra_dist.store.regular_files import read_regular
from launcher.supervise.meeting.reports import End, MeetingFolder
from launcher.supervise.meeting.summary import Summary, SummaryReader, SummaryWriter
from launcher.supervise.rank_placement import NUM_PORTS

_KEPT_STARTS = 3  # newest starts whose files are kept
_POLL_S = 1.0  # shortest time between two reads of the files by `news`


@dataclass(frozen=True, kw_only=True)
class _Announcement:
    """Announcement by node 0 that the ranks are to be started: the content of one file start-START.json."""

    port: Annotated[int, Field(gt=0, lt=1 << 16)]  # port of node 0 to which all ranks connect first


_ANNOUNCEMENT = TypeAdapter(_Announcement)


class Rendezvous:
    """Agreement of one node's supervisor with the supervisors of the other nodes on each start of the ranks.

    A supervisor calls `start` before it starts its ranks, polls `news` while they run, and calls `end` after they have
    ended. `number` is the number of the start in which this node takes part; 0 before its first start.
    """

    def __init__(self, run_dir: Path, node: int, port: int | None, session: str = "") -> None:
        """Touch no file. `port` is the first of 64 that starts use in turn; None (one node only): any free one."""
        self._folder = Path(run_dir) / MEETING_DIR / session
        self._hangs = Path(run_dir) / HANGS_DIR
        self._node = node
        self._port = port
        self._session = session
        self._sessions = Path(run_dir) / MEETING_DIR / "sessions"
        self.number = 0
        self._has_begun_session = False
        self._next_look = 0.0
        self._files = MeetingFolder(self._folder)
        self._summary = SummaryReader(self._folder)  # on nodes other than 0
        self._summary_writer = SummaryWriter(self._folder)  # on node 0
        self._announced_port = 0  # port of the newest start; used on node 0 only

    def start(self, give_up: Callable[[], bool], timeout_s: float) -> int | None:
        """Agree on the next start of the ranks and return its port: node 0 announces it, the other nodes wait for it.

        None means that this node must start no ranks: another node's supervisor has ended, or the wait has lasted for
        `timeout_s` seconds, or `give_up`, which is polled during the wait, has returned True.
        """
        if self._node == 0:
            another_node_left = self.left_by() is not None
            return None if another_node_left else self._announce()
        deadline = time.monotonic() + timeout_s
        while not give_up() and time.monotonic() < deadline:
            summary = self._look(oldest_start=self.number)
            newest = summary.start
            node_0_left = any(end.number == newest and end.node == 0 and end.final for end in summary.ends)
            is_new = newest > self.number
            if is_new and not node_0_left:
                self.number = newest
                return summary.port or self._announced_port_of(newest)
            # If node 0 left in a newer start, that start may be of an earlier job: wait for a start of this job.
            took_part = self.number > 0 and newest == self.number
            if took_part and node_0_left:
                return None
            time.sleep(_POLL_S / 4)
        return None

    def begin_session(self) -> None:
        """Append this job's session name, if any, once to RUN/meeting/sessions. Older jobs read that file and end."""
        if not self._session or self._has_begun_session:
            return
        self._sessions.parent.mkdir(parents=True, exist_ok=True)
        with open(self._sessions, "a", encoding="ascii") as sessions:
            sessions.write(self._session + "\n")
        self._has_begun_session = True

    def end(self, code: int, *, final: bool) -> None:
        """Report the exit code of this node's ranks to the other nodes. `final`: this supervisor ends, too."""
        self._write(self._folder / f"end-{self.number:06d}-node-{self._node}.json", {"code": code, "final": final})
        self._look(oldest_start=self.number - 1)  # puts the report of node 0 into the summary

    def news(self) -> str:
        """Return why this node's ranks should end, as one line; empty if there is no reason.

        The reasons are: a newer job has taken the run over, node 0 has begun a newer start, the ranks of another node
        have crashed or failed in this start, or the supervisor of another node has ended in the previous start. Reads
        the files at most once per second; calls in between return "".
        """
        if time.monotonic() < self._next_look:
            return ""
        self._next_look = time.monotonic() + _POLL_S
        newer_session = self.taken_over()
        if newer_session:
            return f"{newer_session} has taken the run over"
        summary = self._look(oldest_start=self.number - 1)
        if self._node != 0 and summary.start > self.number:
            return "node 0 has begun a new start"
        ends = self._of_other_nodes(summary)
        crashes = [end for end in ends if end.number == self.number and end.code not in (EXIT_DONE, EXIT_STOPPED)]
        left_before = [end for end in ends if end.number < self.number and end.final]
        reasons = crashes + left_before
        if not reasons:
            return ""
        first_end = reasons[0]
        return f"the ranks of node {first_end.node} have ended with exit code {first_end.code}"

    def left_by(self) -> tuple[int, int] | None:
        """Return the number of another node whose supervisor has ended, and a code; None if no supervisor has ended.

        The code is the one with which this node's supervisor must end: EXIT_CRASH or EXIT_USER_ERROR if the other
        supervisor ended with it, otherwise EXIT_STOPPED, because this node is not at fault.
        """
        for end in self._of_other_nodes(self._look(oldest_start=self.number - 1)):
            if end.final and end.code in (EXIT_CRASH, EXIT_USER_ERROR):
                return end.node, end.code
            if end.final:
                return end.node, EXIT_STOPPED
        return None

    def taken_over(self) -> str:
        """Return the session name of the newer job that has replaced this node's job; "" if there is none.

        If there is a newer job, this node was cut off from the network, and must not start ranks again. The result is
        also "" if this job has no session name.
        """
        if not self._session:
            return ""
        try:
            sessions = read_regular(self._sessions).decode("ascii", "replace").split()
        except OSError:  # No job with a name has begun, or the file system cannot read the file now.
            return ""
        # The last line is the name of the newest job.
        if self._session not in sessions:
            return ""  # A shared file system may show an old version of the file, without this job.
        newest = sessions[-1]
        return "" if newest == self._session else newest

    def superseded(self) -> bool:
        """Return whether node 0 has begun a newer start. This node must then kill its ranks and join that start."""
        if self._node == 0:
            return False
        return self._look(oldest_start=self.number).start > self.number

    def hang_folder(self) -> Path:
        """Return the folder for the report of a hang in this start, such as RUN/hangs/job-4711-0-start-000007."""
        prefix = f"{self._session}-" if self._session else ""
        return self._hangs / f"{prefix}start-{self.number:06d}"

    def _announce(self) -> int:
        """Announce the next start of the ranks as node 0: write its file, delete old files, and return its port."""
        is_first = self.number == 0
        self.begin_session()
        # Reports on the previous start count (`left_by`). The first start of a job skips a number, so that the reports
        # with which the nodes left an earlier job are not about its previous start.
        increment = 2 if is_first else 1
        number = self._files.newest_start() + increment
        # The port is not that of the start before, so that no rank of it can connect to this one.
        port = _free_port() if self._port is None else self._next_port(self._port, number)
        self._write(self._start_file(number), {"port": port})
        self.number = number  # Set only now, so that a repeated call announces the same number after a failed write.
        self._announced_port = port
        self._look(oldest_start=self.number - 1)  # puts the announcement into the summary
        self._files.delete_starts(self.number - _KEPT_STARTS)  # all but the newest three, the current one included
        return port

    def _next_port(self, first: int, number: int) -> int:
        """Choose one of the 64 ports from `first` on for start `number`: never the last start's; if possible, free."""
        # The port of the start before is the next one if that start skipped ports in use, so it is left out.
        turn = number % NUM_PORTS
        ports = [first + (turn + offset) % NUM_PORTS for offset in range(NUM_PORTS)]
        other_ports = [port for port in ports if port != self._announced_port]
        for port in other_ports:
            if is_free(port):
                return port
        return other_ports[0]

    def _look(self, oldest_start: int) -> Summary:
        """Summarize the newest start and the reports since `oldest_start` or before; node 0 also writes a file."""
        if self._node == 0:
            ends = tuple(self._files.ends(since=self.number - 1))
            summary = Summary(start=self.number, port=self._announced_port, ends=ends)
            if self._announced_port:
                self._summary_writer.write(summary)
            return summary
        from_node_0 = self._summary.read()
        if from_node_0 is not None:
            return from_node_0
        newest = self._files.newest_start()
        return Summary(start=newest, port=0, ends=tuple(self._files.ends(since=min(oldest_start, newest))))

    def _announced_port_of(self, number: int) -> int:
        next_step = "delete the folder of this file and start the run again on all nodes"
        return read_json_as(self._start_file(number), _ANNOUNCEMENT, next_step).port

    def _of_other_nodes(self, summary: Summary) -> list[End]:
        """Return the reports of other nodes that are about this node's current start or the start before it."""
        numbers = (self.number - 1, self.number)
        return [end for end in summary.ends if end.number in numbers and end.node != self._node]

    def _start_file(self, number: int) -> Path:
        return self._folder / f"start-{number:06d}.json"

    def _write(self, file: Path, content: dict[str, int]) -> None:
        """Write `content` as one line of JSON by an atomic replacement, so that no node reads half a line."""
        with replacing(file) as temporary:
            temporary.write(json.dumps(content).encode() + b"\n")


def _free_port() -> int:
    """Return a TCP port of this host that is free now; another process may take it before the ranks use it."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))  # Port 0 lets the kernel choose.
        _, port = s.getsockname()
        return int(port)
