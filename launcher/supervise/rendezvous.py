"""How the supervisors of several nodes meet again after a fault, through small files in RUN/meeting/SESSION/.

    start-000007.json           node 0: the seventh start, on this port
    end-000007-node-1.json      node 1: my ranks of it have ended, with this code; `final`: and I end too
    ../sessions                 a line for each session that began: whoever is of an earlier one was given up, and ends

Guarantees: node 0 decides when there is another start; the others join one that they have not joined yet. A node
whose ranks ended tells the others, so that ranks that would wait in a collective for minutes are ended in seconds. A
session is one job: a node that lives on behind a cut link never joins the job that took over. Without a word for it, a
start of an earlier job is joined at worst until node 0's new one is seen. Each start has a port of its own, so that
no rank of an earlier one meets it.

Cost: one listing of a small folder a second. Alone (one node) it is the same files and nobody to wait for.

Where it stops: on NFS a file may be seen a minute late, and so is the news. A cut network says nothing here: then each
side finds its ranks hung by itself.
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
from electra_dist.store.files import replacing

_KEPT, _PORTS, _POLL_S = 3, 64, 1.0


@dataclass(frozen=True, kw_only=True)
class _End:
    number: int
    node: int
    code: int
    final: bool


class Rendezvous:
    """This node's view. `number` is the start that it takes part in."""

    def __init__(self, run_dir: Path, node: int, port: int | None, session: str = "") -> None:
        """Take part, as node number `node`.

        Args:
            port: the first of the ports that starts use in turn; None (one node): any free one.
            session: a word that all nodes of a job know and no other job has; empty: there is none.
        """
        self._folder, self._node, self._port = Path(run_dir) / MEETING_DIR / session, node, port
        self._session, self._sessions = session, Path(run_dir) / MEETING_DIR / "sessions"
        self.number = 0
        self._next_look = 0.0

    def start(self, give_up: Callable[[], bool], timeout_s: float) -> int | None:
        """Node 0: announce a start. Others: wait for one that is new to them. Returns its port.

        None if another node has ended for good, if `give_up` says so, or after `timeout_s`.
        """
        if self._node == 0:
            return None if self.left_by() else self._announce()
        deadline = time.monotonic() + timeout_s
        while not give_up() and time.monotonic() < deadline:
            newest = max(self._starts(), default=0)
            gone = any(end.number == newest and end.node == 0 and end.final for end in self._ends())
            if newest > self.number and not gone:
                self.number = newest
                return int(json.loads(self._start_file(newest).read_text())["port"])
            if newest == self.number > 0 and gone:
                return None
            time.sleep(_POLL_S / 4)
        return None

    def end(self, code: int, *, final: bool) -> None:
        """Tell the others how this node's ranks ended."""
        self._write(self._folder / f"end-{self.number:06d}-node-{self._node}.json", {"code": code, "final": final})

    def news(self) -> str:
        """Why this node's ranks should end too; empty if there is no reason. Looks once a second."""
        if time.monotonic() < self._next_look:
            return ""
        self._next_look = time.monotonic() + _POLL_S
        if other := self.taken_over():
            return f"{other} has taken the run over"
        if self._node and max(self._starts(), default=0) > self.number:
            return "node 0 has begun a new start"
        failed = [end for end in self._others(since=self.number) if end.code not in (EXIT_DONE, EXIT_STOPPED)]
        failed += [end for end in self._others(since=self.number - 1) if end.final and end.number < self.number]
        return f"the ranks of node {failed[0].node} have ended with {failed[0].code}" if failed else ""

    def left_by(self) -> tuple[int, int] | None:
        """A node that has ended for good, in this start or just before it, and what follows from that for this one."""
        for end in self._others(since=self.number - 1):
            if end.final:
                return end.node, end.code if end.code in (EXIT_CRASH, EXIT_USER_ERROR) else EXIT_STOPPED
        return None

    def taken_over(self) -> str:
        """The session that has begun after this one: this node was cut off, given up, and must not start again."""
        if not self._session or not self._sessions.exists():
            return ""
        begun = self._sessions.read_text().split()  # in an old view of the file this session may be missing
        return begun[-1] if self._session in begun and begun[-1] != self._session else ""

    def superseded(self) -> bool:
        """Whether node 0 has moved on, so that this start's end says nothing."""
        return bool(self._node) and max(self._starts(), default=0) > self.number

    def _announce(self) -> int:
        if self._session and not self.number:
            self._sessions.parent.mkdir(parents=True, exist_ok=True)
            with open(self._sessions, "a", encoding="ascii") as sessions:
                sessions.write(self._session + "\n")
        # The first number of a job leaves a gap: nobody who left an earlier job shall count as having left this one.
        self.number = max(self._starts(), default=0) + (1 if self.number else 2)
        port = _free_port() if self._port is None else self._port + self.number % _PORTS
        self._write(self._start_file(self.number), {"port": port})
        for file in self._folder.glob("*-*.json"):
            if int(file.name.split("-")[1].removesuffix(".json")) <= self.number - _KEPT:
                file.unlink(missing_ok=True)
        return port

    def _others(self, since: int) -> list[_End]:
        return [end for end in self._ends() if since <= end.number <= self.number and end.node != self._node]

    def _starts(self) -> list[int]:
        return [int(file.stem.partition("-")[2]) for file in self._folder.glob("start-*.json")]

    def _ends(self) -> list[_End]:
        ends = []
        for file in self._folder.glob("end-*.json"):
            match = re.fullmatch(r"end-(\d+)-node-(\d+)", file.stem)
            with contextlib.suppress(FileNotFoundError):  # node 0 tidies up
                assert match, file
                ends.append(_End(number=int(match[1]), node=int(match[2]), **json.loads(file.read_text())))
        return ends

    def _start_file(self, number: int) -> Path:
        return self._folder / f"start-{number:06d}.json"

    def _write(self, file: Path, content: dict[str, int]) -> None:
        with replacing(file) as temporary:
            temporary.write(json.dumps(content).encode() + b"\n")


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
