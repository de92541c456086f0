"""Supervise the ranks of one node: start them, watch them, and restart them while new checkpoints appear.

Guarantees: a hung rank is noticed within the limits of the config's `cluster` section (5 learned step times), and its
stacks are in the log before it is killed. The run ends after `cluster.max_fruitless_restarts` (3) restarts in a row
without a new checkpoint. The exit code is one of errors.py, decided from the ledger and the exit codes that the ranks
wrote themselves (start_outcome.py). SIGTERM, SIGINT, SIGUSR1 and SIGUSR2 are passed on to the ranks, which save and
end with 75; a second SIGINT kills them. Every decision is one line on stdout and in RUN/supervise-K.log, where K is
the node's number.

Cost: a process of 40 MB without torch, which polls ten times per second.

Limits: Slurm or a person must keep the supervisor itself alive. If it is killed, its ranks run on until they end or
until the next supervisor of this run on this node kills them. The ranks of a node that is cut off are ended by the
supervisor of that node.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from pathlib import Path

from electra_dist.analysis.hung_ranks import hang_limits
from electra_dist.config import Config
from electra_dist.errors import EXIT_CRASH, EXIT_DONE, EXIT_STOPPED, EXIT_UNHEALTHY
from electra_dist.run.ledger import newest_checkpoint, read_ledger
from electra_dist.run.marked_processes import mark_of, marked_pids
from electra_dist.run.node_strikes import add_strike, node_name, read_strikes
from launcher.preflight.findings import exit_code, strike_of
from launcher.preflight.node_check import check_gpus, preflight
from launcher.supervise.rank_placement import Placement
from launcher.supervise.rank_processes import RankProcesses
from launcher.supervise.rendezvous import Rendezvous
from launcher.supervise.start_monitor import ReceivedSignals, StartMonitor
from launcher.supervise.start_outcome import StartEnd, StartOutcome, awaits_ledger, outcome
from launcher.supervise.supervisor_log import Log

_PREFLIGHT_S = 600.0  # time limit of the preflight checks
_LEDGER_S = 60.0  # how much later a shared file system may show what rank 0 wrote on another node


class Supervisor:
    """Supervisor of one node's ranks for a whole run: call `check` (optional) and then `run`, both once.

    The constructor installs signal handlers, so it must be called in the main thread.
    """

    def __init__(self, config: Config, placement: Placement, arguments: Sequence[str], session: str = "") -> None:
        """Open the log, take the lock of this node and install the signal handlers. No rank is started.

        Args:
            config: the resolved config of the run.
            placement: which ranks run on this node.
            arguments: command-line arguments of launcher/pretrain.py.
            session: name of the job, see `Rendezvous`; empty: none.

        Raises:
            UserError: the run folder cannot be written, or this node already has a supervisor of this run.
        """
        self._run_dir = Path(config.run_dir)
        self._cluster = config.cluster
        self._arguments = arguments
        self._placement = placement
        self._limits = hang_limits(config.cluster)
        self.log = Log(self._run_dir, placement.node)
        self._mark = mark_of(self._run_dir, placement.node)
        self._meeting = Rendezvous(self._run_dir, placement.node, placement.port, session)
        self._signals = ReceivedSignals()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, self._signals.handle)

    def check(self) -> int:
        """Run preflight on this node; return 0 if the node is healthy, otherwise the exit code to end with.

        The findings are printed to stdout. If preflight fails, the end of this node is reported to the other nodes
        and `run` must not be called. Takes at most 10 minutes.
        """
        code = preflight(self._run_dir, self._arguments, _PREFLIGHT_S)
        if code != EXIT_DONE:
            return self._end(StartOutcome(code=code, why="preflight failed; see its findings above and strikes.jsonl"))
        return code

    def run(self) -> int:
        """Start and restart the ranks until this node must not start them again, and return the exit code.

        First kills processes that a killed supervisor of this run left on this node. The ranks are started again only
        after a crash: on node 0 at most `cluster.max_fruitless_restarts` times in a row without a new checkpoint, and
        never on a node whose GPUs are found unhealthy after the crash. The other nodes follow node 0.
        """
        num_fruitless = 0  # restarts in a row without a new checkpoint
        orphans = marked_pids(self._mark)
        if orphans:
            self.log(f"killing {len(orphans)} processes that an earlier supervisor left")
            RankProcesses(self._mark).close()
        while True:
            checkpoint_before = newest_checkpoint(read_ledger(self._run_dir))
            port = self._meeting.start(self._must_not_start, self._limits.setup_s)
            if port is None or self._signals.number:
                return self._end(self._why_not_started())
            end = self._run_start(port)
            if end.code != EXIT_CRASH or self._signals.number:
                return self._end(end)
            if self._meeting.taken_over():
                return self._end(self._why_not_started())
            if newest_checkpoint(read_ledger(self._run_dir)) > checkpoint_before:
                num_fruitless = 0
            if self._placement.node == 0 and num_fruitless == self._cluster.max_fruitless_restarts:
                why = f"{num_fruitless} restarts in a row without a new checkpoint; last {end.why}"
                return self._end(StartOutcome(code=EXIT_CRASH, why=why))
            gpu_fault = self._strike_unhealthy_gpus()
            if gpu_fault:
                return self._end(StartOutcome(code=EXIT_UNHEALTHY, why=gpu_fault))
            self._meeting.end(end.code, final=False)
            num_fruitless += 1
            limit = self._cluster.max_fruitless_restarts
            self.log(f"{end.why}; restart {num_fruitless} of {limit} without a new checkpoint")

    def _must_not_start(self) -> bool:
        """Return whether to stop waiting for the next start: a signal was received, or another job has taken over."""
        return bool(self._signals.number or self._meeting.taken_over())

    def _run_start(self, port: int) -> StartOutcome:
        """Start the ranks once, watch them until the start is over, kill what is left, and return what its end means.

        If all ranks ended well but the ledger does not show it yet, waits up to 60 s for the shared file system.
        """
        num_events_before = len(read_ledger(self._run_dir))
        began = time.time()
        ranks = RankProcesses(self._mark)
        try:
            ranks.start(self._placement.command(ranks.state, port, self._arguments))
            self.log(f"starting ranks {self._placement.names}, port {port}")
            monitor = StartMonitor(
                self._run_dir, ranks, self._placement, self._meeting, self._limits, self._signals, self.log
            )
            why_killed = monitor.until_over()
            end = self._read_end(ranks, num_events_before, began)
            deadline = time.monotonic() + _LEDGER_S
            while awaits_ledger(end) and time.monotonic() < deadline:
                time.sleep(1.0)
                end = self._read_end(ranks, num_events_before, began)
        finally:
            unkillable = ranks.close()
            if unkillable:
                self.log(f"processes {unkillable} cannot be killed: they wait for a device; reboot this node")
        result = outcome(end)
        if why_killed and result.code == EXIT_CRASH:
            return StartOutcome(code=EXIT_CRASH, why=f"{result.why} ({why_killed})")
        return result

    def _read_end(self, ranks: RankProcesses, num_events_before: int, began: float) -> StartEnd:
        """Collect the evidence of how one start of the ranks ended.

        Args:
            ranks: the processes of the start; their state folder must still exist.
            num_events_before: number of ledger events before the start.
            began: Unix time of the start; if a fault of this node was recorded since then (a strike),
                this node is the one at fault.
        """
        struck = any(strike.time >= began and strike.node == node_name() for strike in read_strikes(self._run_dir))
        return StartEnd(
            events=read_ledger(self._run_dir)[num_events_before:],
            codes=ranks.codes(),
            num_ranks=len(self._placement.ranks),
            at_fault=struck or self._placement.num_nodes == 1,
        )

    def _strike_unhealthy_gpus(self) -> str:
        """Check this node's GPUs after a crash; if one is unhealthy, record a strike and return the fault as one line.

        Returns an empty string if the GPUs are healthy.
        """
        node = node_name()
        findings = check_gpus(node)
        if exit_code(findings, node) != EXIT_UNHEALTHY:
            return ""
        strike = strike_of(findings, node, time.time())
        assert strike is not None
        add_strike(self._run_dir, strike)
        return f"this node is unhealthy: {strike.device} {strike.reason}"

    def _why_not_started(self) -> StartOutcome:
        """Return why there is no further start on this node: a signal, another job, a node that left, or a timeout."""
        if self._signals.number:
            name = signal.Signals(self._signals.number).name
            return StartOutcome(code=EXIT_STOPPED, why=f"received {name} between two starts")
        newer_session = self._meeting.taken_over()
        if newer_session:
            return StartOutcome(code=EXIT_STOPPED, why=f"{newer_session} has taken the run over")
        left = self._meeting.left_by()
        if left:
            node, code = left
            return StartOutcome(code=code, why=f"node {node} has ended for good; see its supervise-{node}.log")
        return StartOutcome(
            code=EXIT_CRASH,
            why=f"node 0 has begun no start for {self._limits.setup_s:.0f} s; see supervise-0.log in the run folder",
        )

    def _end(self, end: StartOutcome) -> int:
        """Report the end of this supervisor to the other nodes, log it, and return its exit code."""
        self._meeting.end(end.code, final=True)
        self.log(f"end, exit code {end.code}: {end.why}")
        return end.code
