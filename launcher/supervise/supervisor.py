"""One per node: starts the ranks, watches them, restarts them while checkpoints advance, ends with a known exit code.

Guarantees: a hung rank is noticed within the limits of the config's `cluster` section (5 learned step times), its
stacks are in the log before it is killed; after three restarts without a new checkpoint the run ends. The exit code
is one of errors.py, decided from the ledger and the codes that the ranks themselves left (outcome.py). SIGTERM,
SIGINT, SIGUSR1 and SIGUSR2 are passed on to the ranks, which save and end with 75; a second SIGINT kills. Every
decision is one line on stdout and in RUN/supervise-K.log, K the node's rank.

Cost: a process without torch, 40 MB, that looks ten times a second.

Where it stops: it must itself be kept alive, by Slurm or by a person; if it is killed, its ranks run on until they end
or until the next supervisor of this run on this node kills them. The ranks of a node that is cut off are ended by the
supervisor there.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from pathlib import Path

from electra_dist.analysis.hangs import hang_limits
from electra_dist.config import Config
from electra_dist.errors import EXIT_CRASH, EXIT_STOPPED, EXIT_UNHEALTHY
from electra_dist.run.ledger import newest_checkpoint, read_ledger
from electra_dist.run.processes import mark_of, marked_pids
from electra_dist.run.strikes import add_strike, node_name, read_strikes
from launcher.preflight.findings import exit_code, strike_of
from launcher.preflight.node_check import check_gpus, preflight
from launcher.supervise.log import Log
from launcher.supervise.monitor import ReceivedSignals, StartMonitor
from launcher.supervise.outcome import StartEnd, StartOutcome, awaits_ledger, outcome
from launcher.supervise.placement import Placement
from launcher.supervise.rank_processes import RankProcesses
from launcher.supervise.rendezvous import Rendezvous

_PREFLIGHT_S = 600.0
_LEDGER_S = 60.0  # how much later a shared file system may show what rank 0 wrote on another node


class Supervisor:
    """The watch over one node's ranks."""

    def __init__(self, config: Config, placement: Placement, arguments: Sequence[str], session: str = "") -> None:
        """`arguments`: of launcher/pretrain.py; `session`: see Rendezvous.

        Raises:
            UserError: the run folder cannot be written, or this node is supervised already.
        """
        self._run_dir, self._cluster, self._arguments = Path(config.run_dir), config.cluster, arguments
        self._placement, self._limits = placement, hang_limits(config.cluster)
        self.log = Log(self._run_dir, placement.node)
        self._mark = mark_of(self._run_dir, placement.node)
        self._meeting = Rendezvous(self._run_dir, placement.node, placement.port, session)
        self._told = ReceivedSignals()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, self._told.handle)

    def check(self) -> int:
        """Whether this node is fit, before anything is started on it: 0, or the exit code that it has then ended with;
        the findings are on stdout."""
        code = preflight(self._run_dir, self._arguments, _PREFLIGHT_S)
        return self._end(StartOutcome(code=code, why="preflight")) if code else code

    def run(self) -> int:
        """Until the run is done, stopped or beyond help here; returns the exit code."""
        restarts = 0  # in a row without a new checkpoint
        if orphans := marked_pids(self._mark):
            self.log(f"killing {len(orphans)} processes that an earlier supervisor left")
            RankProcesses(self._mark).close()
        while True:
            before = newest_checkpoint(read_ledger(self._run_dir))
            port = self._meeting.start(
                lambda: bool(self._told.number or self._meeting.taken_over()), self._limits.setup_s
            )
            if port is None or self._told.number:
                return self._end(self._unmet())
            end = self._one_start(port)
            if end.code != EXIT_CRASH or self._told.number:
                return self._end(end)
            if self._meeting.taken_over():
                return self._end(self._unmet())
            restarts = 0 if newest_checkpoint(read_ledger(self._run_dir)) > before else restarts
            if self._placement.node == 0 and restarts == self._cluster.max_fruitless_restarts:
                why = f"{restarts} restarts in a row without a new checkpoint; last {end.why}"
                return self._end(StartOutcome(code=EXIT_CRASH, why=why))
            if sick := self._sick():
                return self._end(StartOutcome(code=EXIT_UNHEALTHY, why=sick))
            self._meeting.end(end.code, final=False)
            restarts += 1
            self.log(f"{end.why}; restart {restarts} of {self._cluster.max_fruitless_restarts} without a checkpoint")

    def _one_start(self, port: int) -> StartOutcome:
        events, began = len(read_ledger(self._run_dir)), time.time()
        ranks = RankProcesses(self._mark)
        try:
            ranks.start(self._placement.command(ranks.state, port, self._arguments))
            self.log(f"starting ranks {self._placement.names}, port {port}")
            watch = StartMonitor(
                self._run_dir, ranks, self._placement, self._meeting, self._limits, self._told, self.log
            )
            why = watch.until_over()
            end = self._ended(ranks, events, began)
            deadline = time.monotonic() + _LEDGER_S
            while awaits_ledger(end) and time.monotonic() < deadline:
                time.sleep(1.0)
                end = self._ended(ranks, events, began)
        finally:
            if left := ranks.close():
                self.log(f"processes {left} cannot be killed: they wait for a device; reboot this node")
        found = outcome(end)
        return StartOutcome(
            code=found.code, why=f"{found.why} ({why})" if why and found.code == EXIT_CRASH else found.why
        )

    def _ended(self, ranks: RankProcesses, events: int, began: float) -> StartEnd:
        struck = any(s.time >= began and s.node == node_name() for s in read_strikes(self._run_dir))
        return StartEnd(
            events=read_ledger(self._run_dir)[events:],
            codes=ranks.codes(),
            num_ranks=len(self._placement.ranks),
            at_fault=struck or self._placement.num_nodes == 1,
        )

    def _sick(self) -> str:
        """After a fault: what is wrong with this node's GPUs, if anything; it gets a strike."""
        node = node_name()
        findings = check_gpus(node)
        if exit_code(findings, node) != EXIT_UNHEALTHY:
            return ""
        strike = strike_of(findings, node, time.time())
        assert strike is not None
        add_strike(self._run_dir, strike)
        return f"this node is unhealthy: {strike.device} {strike.reason}"

    def _unmet(self) -> StartOutcome:
        if self._told.number:
            return StartOutcome(
                code=EXIT_STOPPED, why=f"told {signal.Signals(self._told.number).name} between two starts"
            )
        if other := self._meeting.taken_over():
            return StartOutcome(code=EXIT_STOPPED, why=f"{other} has taken the run over")
        if left := self._meeting.left_by():
            return StartOutcome(code=left[1], why=f"node {left[0]} has ended for good")
        return StartOutcome(code=EXIT_CRASH, why=f"node 0 has begun no start for {self._limits.setup_s:.0f} s")

    def _end(self, end: StartOutcome) -> int:
        self._meeting.end(end.code, final=True)
        self.log(f"end, exit code {end.code}: {end.why}")
        return end.code
