"""Let the supervisors of several nodes agree on each start of the ranks, by one small file of each node.

    RUN/meeting/SESSION/node-0.json    the newest start, its port, and why its ranks must end on all nodes
    RUN/meeting/SESSION/node-K.json    how the ranks of node K have ended in its newest start
    RUN/meeting/sessions               one line for each session; supervisors of all but the last one must end

The ranks of a run are started on all nodes at once, and again after a crash; these starts are numbered. A session is
one job, for example one Slurm job. Each node replaces its own file, in one atomic step. Node 0 reads the files of all
nodes about once per second, and the other nodes that of node 0.

Guarantees: only node 0 begins starts; every other node joins each start at most once. A node reports when its ranks
have ended, so that the ranks of other nodes, which would wait in a collective for minutes, are ended within seconds. A
node that was cut off from the network never joins the job that replaced its own. Without a session name, a node may
join a start of an earlier job, until it sees the new start of node 0. Starts use 64 ports in turn, so that no rank of
an earlier start can connect to the current one. A run on one node writes the same file and waits for nothing.

Limits: on NFS, another node may see a new file a minute late. A network failure between nodes is not reported through
these files: the supervisors on each side then find their own ranks hung. If the supervisor of node 0 is killed, its
ranks save and stop, and with them the ranks of all nodes; what other nodes report then reaches nobody.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from electra_dist.engine.rank_environment import is_free
from electra_dist.errors import EXIT_CRASH, EXIT_STOPPED, EXIT_USER_ERROR, StoreError
from electra_dist.run.folder import HANGS_DIR, MEETING_DIR
from electra_dist.run.records import Count
from electra_dist.store.atomic_files import read_regular, replacing, writable
from electra_dist.store.json_file import DamagedJson, parse_json_object, validate_json
from electra_dist.store.patience import Patience, waits
from electra_launcher.supervise.rank_processes import NUM_PORTS

_FILE_NAME = re.compile(r"node-(?P<node>0|[1-9][0-9]{0,5})\.json")
_POLL_S = 1.0  # shortest time between two reads of the files by `news`


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """What a node reports to the others: the content of its file node-K.json."""

    start: Count  # number of its newest start of the ranks; 0: none yet
    code: Annotated[int, Field(ge=0, lt=256)] | None = None  # of its ranks as a whole, errors.py; None: they run
    final: bool = False  # whether its supervisor has ended, too, and joins no further start
    ends_others: bool = False  # whether the ranks of the other nodes must end because of this end
    port: Annotated[int, Field(ge=0, lt=1 << 16)] = 0  # node 0 only: port to which all ranks connect first
    why: str = ""  # node 0 only: why the ranks of all nodes must end; "": nothing is known

    def ended(self, node: int) -> str:
        """Return in words, for the log, how the ranks of `node` ended."""
        return f"the ranks of node {node} have ended with exit code {self.code}"


_REPORT = TypeAdapter(NodeReport)


class Rendezvous:
    """Agreement of one node's supervisor with the supervisors of the other nodes on each start of the ranks.

    A supervisor calls `begin` once, `start` before it starts its ranks, polls `news` while they run, and calls `end`
    after they have ended.
    """

    def __init__(
        self, run_dir: Path, node: int, port: int | None, session: str = "", patience: Patience | None = None
    ) -> None:
        """Prepare to agree on starts with the other nodes as node number `node`; no file is read or written yet.

        The first start uses `port`, the next one the port after it, and after 64 ports `port` again. If `port` is
        None, which only a single node may pass, each start uses any free port. `session` is the job's name, or "". If
        the run folder is full or does not respond, `begin`, `start` and `end` wait for it as long as `patience` says
        (None: they raise an error at once).
        """
        self.patience = patience
        self._node = node
        self._port = port
        self._session = session
        meeting_folder = Path(run_dir) / MEETING_DIR
        self._sessions = meeting_folder / "sessions"  # file with the names of all jobs of the run, oldest first
        self._folder = meeting_folder / session  # has one report, node-K.json, of each node of this job
        self._hangs = Path(run_dir) / HANGS_DIR
        self._own = NodeReport(start=0)  # this node's report; start 0: it has taken part in no start yet
        self._has_begun_session = False
        self._next_look = 0.0  # time.monotonic() from which `news` reads the files again

    @property
    def number(self) -> int:
        """Return the number of the start in which this node takes part; 0 before its first start."""
        return self._own.start

    @waits
    def begin(self) -> None:
        """Join this job: node 0 lists the job's name in a file, another node deletes its report of an older job."""
        with writable(self._sessions):
            if self._node != 0:
                self._file(self._node).unlink(missing_ok=True)
            elif self._session and not self._has_begun_session:
                self._sessions.parent.mkdir(parents=True, exist_ok=True)
                with open(self._sessions, "a", encoding="ascii") as sessions:
                    sessions.write(self._session + "\n")  # Older jobs read this file and end.
                self._has_begun_session = True

    def start(self, give_up: Callable[[], bool], timeout_s: float) -> int | None:
        """Agree on the next start of the ranks and return its port: node 0 announces it, the other nodes wait for it.

        Returns None if this node must start no ranks: another node's supervisor has ended, the wait has lasted for
        `timeout_s` seconds, or `give_up`, which is polled during the wait, has returned True.
        """
        if self._node == 0:
            another_node_left = self.left_by() is not None
            return None if another_node_left else self._announce()
        deadline = time.monotonic() + timeout_s
        while not give_up() and time.monotonic() < deadline:
            zero = self._read(0)
            if zero is not None and zero.start > self.number and not zero.final:
                self._own = NodeReport(start=zero.start)
                return zero.port
            # If node 0 left in a newer start, that start may be of an earlier job: wait for a start of this job.
            if self.number > 0 and zero is not None and zero.final and zero.start == self.number:
                return None
            time.sleep(_POLL_S / 4)
        return None

    @waits
    def end(self, code: int, *, final: bool, ends_others: bool) -> None:
        """Report to the other nodes the exit code of this node's ranks.

        `final` says that this supervisor ends, too; `ends_others`, that ranks still running on other nodes must be
        ended.
        """
        report = dataclasses.replace(self._own, code=code, final=final, ends_others=ends_others)
        self._write(report)

    def news(self) -> str:
        """Return in one line why this node's ranks should end, or "" if there is no reason.

        The reasons are: a newer job has taken the run over, node 0 has begun a newer start, the ranks of another node
        have ended in this start in a way that ends the others, or the supervisor of another node has ended in the
        previous start. The files are read at most once per second; calls in between return "".
        """
        if time.monotonic() < self._next_look:
            return ""
        self._next_look = time.monotonic() + _POLL_S
        newer_session = self.taken_over()
        if newer_session:
            return f"{newer_session} has taken the run over"
        if self._node == 0:
            return self._collect_news()
        zero = self._read(0)
        if zero is None or zero.start < self.number:
            return ""
        if zero.start > self.number:
            return "node 0 has begun a new start"
        return zero.why or (zero.ended(0) if zero.ends_others else "")

    def left_by(self) -> tuple[int, int] | None:
        """Return (node, exit code) if the supervisor of another node has ended, otherwise None.

        This node's supervisor must end with the code: EXIT_CRASH or EXIT_USER_ERROR if the other one ended with it,
        otherwise EXIT_STOPPED, because this node is not at fault. Node 0 knows of all nodes, the other nodes only of
        node 0.
        """
        for node, report in self._others().items():
            if report.final and report.start in (self.number - 1, self.number):
                return node, report.code if report.code in (EXIT_CRASH, EXIT_USER_ERROR) else EXIT_STOPPED
        return None

    def taken_over(self) -> str:
        """Return the session name of the newer job that has replaced this node's job, or "" if there is none.

        If there is a newer job, this node was cut off from the network, and must not start ranks again. If this job
        has no session name, the result is "", too.
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
        zero = self._read(0) if self._node != 0 else None
        return zero is not None and zero.start > self.number

    def hang_folder(self) -> Path:
        """Return the folder for the report of a hang in this start, such as RUN/hangs/job-4711-0-start-000007."""
        prefix = f"{self._session}-" if self._session else ""
        return self._hangs / f"{prefix}start-{self.number:06d}"

    @waits
    def _announce(self) -> int:
        """Announce the next start of the ranks as node 0, and return its port."""
        self.begin()
        # Reports on the previous start count (`left_by`). The first start of a job skips a number, so that the reports
        # with which the nodes left an earlier job are not about its previous start.
        increment = 2 if self.number == 0 else 1
        earlier = [report.start for report in (self._own, self._read(0), *self._others().values()) if report]
        number = max(earlier) + increment
        # The port is not that of the start before, so that no rank of it can connect to this one.
        port = _free_port() if self._port is None else self._next_port(self._port, number)
        announcement = NodeReport(start=number, port=port)
        self._write(announcement)
        self._own = announcement  # Set only now, so that a repeated call announces the same number after a failure.
        return port

    def _next_port(self, first: int, number: int) -> int:
        """Choose the port of start `number` among the 64 from `first` on: not the last start's, if possible free."""
        # The port of the start before is the next one if that start skipped ports in use, so it is left out.
        turn = number % NUM_PORTS
        ports = [first + (turn + offset) % NUM_PORTS for offset in range(NUM_PORTS)]
        other_ports = [port for port in ports if port != self._own.port]
        for port in other_ports:
            if is_free(port):
                return port
        return other_ports[0]

    def _collect_news(self) -> str:
        """Return why all ranks must end, or "", from the files of the other nodes. Only node 0 calls this.

        It writes the reason into its own file, which the other nodes read.
        """
        if self._own.why:
            return self._own.why
        for node, report in self._others().items():
            has_left_before = report.final and report.start == self.number - 1
            if has_left_before or (report.ends_others and report.start == self.number):
                told = dataclasses.replace(self._own, why=report.ended(node))
                # If the disk refuses it now, the next call tries again.
                with contextlib.suppress(OSError, StoreError):
                    self._write(told)
                    self._own = told
                return told.why
        return ""

    def _others(self) -> dict[int, NodeReport]:
        """Return node -> report of the nodes that this one follows: on node 0 all others, elsewhere only node 0.

        A report that cannot be read now is left out.
        """
        reports = {node: self._read(node) for node in (self._nodes_with_files() if self._node == 0 else [0])}
        return {node: report for node, report in reports.items() if report is not None}

    def _nodes_with_files(self) -> list[int]:
        """Return the numbers of the nodes other than 0 that have a file in the folder of this job, ascending."""
        try:
            names = [_FILE_NAME.fullmatch(path.name) for path in self._folder.iterdir()]
        except OSError:  # The folder does not exist yet, or cannot be read now.
            return []
        return sorted({int(name["node"]) for name in names if name is not None} - {0})

    def _read(self, node: int) -> NodeReport | None:
        """Return a node's report; None if there is none, or if it is damaged or cannot be read now."""
        with contextlib.suppress(OSError, StoreError, DamagedJson):
            return validate_json(_REPORT, parse_json_object(read_regular(self._file(node))))
        return None

    def _file(self, node: int) -> Path:
        return self._folder / f"node-{node}.json"

    def _write(self, report: NodeReport) -> None:
        """Replace this node's file in one atomic step, so that no node reads half a line."""
        with replacing(self._file(self._node)) as temporary:
            temporary.write(json.dumps(dataclasses.asdict(report)).encode() + b"\n")


def _free_port() -> int:
    """Return a TCP port of this host that is free now; another process may take it before the ranks use it."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))  # Port 0 lets the kernel choose.
        _, port = s.getsockname()
        return int(port)
