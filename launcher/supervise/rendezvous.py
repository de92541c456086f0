"""Let the supervisors of several nodes agree on the next start of the ranks by files in RUN/meeting/SESSION/.

    start-000007.json           by node 0: start 7 begins, on this port
    end-000007-node-1.json      by node 1: its ranks of start 7 ended with this code; `final`: its supervisor ends, too
    ../sessions                 one line for each session that began; supervisors of all but the last one must end

Guarantees: node 0 decides when there is another start; the other nodes join a start that they have not joined yet. A
node whose ranks ended reports it, so that ranks elsewhere, which would wait in a collective for minutes, are ended
within seconds. A session is one job: a node that was cut off from the network never joins the job that replaced its
own. Without a session name, a node may join a stale start of an earlier job, until it sees the new start of node 0.
Each start has its own port, so that no rank of an earlier start can connect to it.

Cost: one listing of a small folder per second. With one node the same files are written, and nothing is waited for.

Limits: on NFS a file may become visible a minute late, and with it the report. A cut network is not reported through
these files: then each side finds its own ranks hung.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from electra_dist.errors import EXIT_CRASH, EXIT_DONE, EXIT_STOPPED, EXIT_USER_ERROR
from electra_dist.run.folder import MEETING_DIR
from electra_dist.store.atomic_files import replacing

_KEPT_STARTS = 3  # files of older starts are deleted
_NUM_PORTS = 64  # consecutive starts use the ports in turn
_POLL_S = 1.0


@dataclass(frozen=True, kw_only=True)
class _End:
    """Report of one node on one start of the ranks: how they ended. The content of one file end-*.json."""

    number: int  # of the start
    node: int
    code: int
    final: bool  # whether the node's supervisor ended, too


class Rendezvous:
    """One node's part in the agreement of all nodes on the starts of a run's ranks.

    `number` is the number of the start that this node takes part in, 0 before the first.

    A supervisor calls `start` before each start of its ranks, polls `news` while they run, and calls `end` after it.
    """

    def __init__(self, run_dir: Path, node: int, port: int | None, session: str = "") -> None:
        """Prepare this node to agree with the others on starts. Nothing is read or written.

        Args:
            run_dir: the run folder, on a file system that all nodes share.
            node: number of this node, from 0; node 0 announces the starts.
            port: the first of the 64 ports that starts use in turn; None (one node only): any free one.
            session: a name that all nodes of a job know and no other job has; empty: there is none.
        """
        self._folder = Path(run_dir) / MEETING_DIR / session
        self._node = node
        self._port = port
        self._session = session
        self._sessions = Path(run_dir) / MEETING_DIR / "sessions"
        self.number = 0
        self._next_look = 0.0

    def start(self, give_up: Callable[[], bool], timeout_s: float) -> int | None:
        """Agree on the next start and return its port: node 0 announces it at once, the other nodes wait for it.

        Args:
            give_up: polled while waiting; the wait ends when it returns True.
            timeout_s: how long to wait, seconds.

        Returns:
            The port of the start; None if another node has ended for good, if the wait was given up, or on timeout.
        """
        if self._node == 0:
            another_node_left = self.left_by() is not None
            return None if another_node_left else self._announce()
        deadline = time.monotonic() + timeout_s
        while not give_up() and time.monotonic() < deadline:
            newest = self._newest_start()
            node_0_left = any(end.number == newest and end.node == 0 and end.final for end in self._ends())
            is_new = newest > self.number
            if is_new and not node_0_left:
                self.number = newest
                announcement = json.loads(self._start_file(newest).read_text())
                return int(announcement["port"])
            # If node 0 left in a newer start, that start may be one of an earlier job: keep waiting for this job's.
            took_part = self.number > 0 and newest == self.number
            if took_part and node_0_left:
                return None
            time.sleep(_POLL_S / 4)
        return None

    def end(self, code: int, *, final: bool) -> None:
        """Report to the other nodes how this node's ranks ended.

        Args:
            code: an exit code of `electra_dist/errors.py`.
            final: whether this supervisor ends, too, and joins no further start.
        """
        self._write(self._folder / f"end-{self.number:06d}-node-{self._node}.json", {"code": code, "final": final})

    def news(self) -> str:
        """Return why this node's ranks should end, as one line; empty if there is no reason.

        The reasons are: another job has taken the run over, node 0 has begun a new start, another node's ranks have
        crashed in this start, or another node's supervisor ended in the start before it. Reads the folder at most once
        per second; other calls return "".
        """
        if time.monotonic() < self._next_look:
            return ""
        self._next_look = time.monotonic() + _POLL_S
        newer_session = self.taken_over()
        if newer_session:
            return f"{newer_session} has taken the run over"
        if self.superseded():
            return "node 0 has begun a new start"
        ends = self._ends_of_others(since=self.number - 1)
        crashes = [end for end in ends if end.number == self.number and end.code not in (EXIT_DONE, EXIT_STOPPED)]
        left_before = [end for end in ends if end.number < self.number and end.final]
        reasons = crashes + left_before
        if not reasons:
            return ""
        first_end = reasons[0]
        return f"the ranks of node {first_end.node} have ended with exit code {first_end.code}"

    def left_by(self) -> tuple[int, int] | None:
        """Return (node, exit code for this node) if another node's supervisor ended in this start or the one before.

        A crash or a user error of the other node becomes the exit code of this one; anything else becomes
        EXIT_STOPPED, because this node is not at fault. None if no supervisor of another node has ended.
        """
        for end in self._ends_of_others(since=self.number - 1):
            if end.final and end.code in (EXIT_CRASH, EXIT_USER_ERROR):
                return end.node, end.code
            if end.final:
                return end.node, EXIT_STOPPED
        return None

    def taken_over(self) -> str:
        """Return the name of the job that has taken the run over from this node's job; empty if there is none.

        If there is one, this node was cut off from the network: the caller must not start ranks again. The file
        RUN/meeting/sessions has one line for each job, in the order in which the jobs began.
        """
        if not self._session or not self._sessions.exists():
            return ""
        sessions = self._sessions.read_text().split()
        if self._session not in sessions:
            return ""  # A shared file system may show an old version of the file, without this job.
        newest = sessions[-1]
        return "" if newest == self._session else newest

    def superseded(self) -> bool:
        """Return whether node 0 has begun a newer start, so that the end of this one no longer matters.

        Always False on node 0, which itself begins the starts.
        """
        if self._node == 0:
            return False
        return self._newest_start() > self.number

    def _announce(self) -> int:
        """Begin the next start as node 0, delete the files of old starts, and return the port.

        The first start of a job also appends the job's name to RUN/meeting/sessions, which ends older jobs.
        """
        is_first = self.number == 0
        if self._session and is_first:
            self._sessions.parent.mkdir(parents=True, exist_ok=True)
            with open(self._sessions, "a", encoding="ascii") as sessions:
                sessions.write(self._session + "\n")
        # The first start of a job skips a number, so that nodes that left the earlier job do not count as having left.
        increment = 2 if is_first else 1
        self.number = self._newest_start() + increment
        # Each start has a port of its own, so that no rank of an earlier start can connect to it.
        port = _free_port() if self._port is None else self._port + self.number % _NUM_PORTS
        self._write(self._start_file(self.number), {"port": port})
        self._delete_old_files()
        return port

    def _delete_old_files(self) -> None:
        """Delete the files of all starts but the newest three, of which `self.number` is the last."""
        for file in self._folder.glob("*-*.json"):
            # For example start-000007.json or end-000007-node-1.json.
            start_number = int(file.name.split("-")[1].removesuffix(".json"))
            if start_number <= self.number - _KEPT_STARTS:
                file.unlink(missing_ok=True)

    def _ends_of_others(self, since: int) -> list[_End]:
        """Return the ends that other nodes reported for the starts from number `since` to the current one."""
        return [end for end in self._ends() if since <= end.number <= self.number and end.node != self._node]

    def _newest_start(self) -> int:
        """Return the number of the newest start that node 0 has announced; 0 before the first one.

        The names of the files have the form start-000007.json.
        """
        return max((int(file.stem.removeprefix("start-")) for file in self._folder.glob("start-*.json")), default=0)

    def _ends(self) -> list[_End]:
        """Return the ends of starts that all nodes, this one included, have reported, in no particular order."""
        ends = []
        for file in self._folder.glob("end-*.json"):
            numbers = re.fullmatch(r"end-(?P<start>\d+)-node-(?P<node>\d+)", file.stem)
            assert numbers, file
            with contextlib.suppress(FileNotFoundError):  # Node 0 may have deleted the file since it was listed.
                content = json.loads(file.read_text())
                ends.append(_End(number=int(numbers["start"]), node=int(numbers["node"]), **content))
        return ends

    def _start_file(self, number: int) -> Path:
        """Return the path of the file that announces start `number`."""
        return self._folder / f"start-{number:06d}.json"

    def _write(self, file: Path, content: dict[str, int]) -> None:
        """Replace a file by one line of JSON in one step, so that no other node reads half a line."""
        with replacing(file) as temporary:
            temporary.write(json.dumps(content).encode() + b"\n")


def _free_port() -> int:
    """Return a TCP port of this host that is free now; another process may take it before the ranks use it."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))  # Port 0 lets the kernel choose.
        _, port = s.getsockname()
        return int(port)
