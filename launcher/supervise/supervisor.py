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
from launcher.supervise.supervisor_lock import lock_node
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
        self._lock = lock_node(self._run_dir, placement.node)  # held until this process ends
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
        self._kill_orphans()
        num_fruitless = 0  # restarts in a row without a new checkpoint
        while True:
            checkpoint_before = newest_checkpoint(read_ledger(self._run_dir))
            port = self._meeting.start(give_up=self._must_not_start, timeout_s=self._limits.setup_s)
            if port is None or self._signals.number:
                return self._end(self._why_not_started())
            result = self._run_start(port)
            if result.code != EXIT_CRASH or self._signals.number:
                return self._end(result)
            if self._meeting.taken_over():
                return self._end(self._why_not_started())
            if newest_checkpoint(read_ledger(self._run_dir)) > checkpoint_before:
                num_fruitless = 0
            final_result = self._why_not_restarted(result, num_fruitless)
            if final_result is not None:
                return self._end(final_result)
            self._meeting.end(result.code, final=False)
            num_fruitless += 1
            limit = self._cluster.max_fruitless_restarts
            self.log(f"{result.why}; restart {num_fruitless} of {limit} without a new checkpoint")

    def _kill_orphans(self) -> None:
        """Kill the processes that a killed supervisor of this run left on this node; they would hold the GPUs."""
        orphans = marked_pids(self._mark)
        if orphans:
            self.log(f"killing {len(orphans)} processes that an earlier supervisor left")
            RankProcesses(self._mark).close()

    def _why_not_restarted(self, crash: StartOutcome, num_fruitless: int) -> StartOutcome | None:
        """Return the result to end with if the ranks must not be started again after a crash; None if they may.

        Checks the GPUs of this node, and records a strike if one of them is unhealthy.

        Args:
            crash: the result of the start that crashed.
            num_fruitless: restarts in a row without a new checkpoint, the one that crashed included.
        """
        if self._placement.node == 0 and num_fruitless == self._cluster.max_fruitless_restarts:
            why = f"{num_fruitless} restarts in a row without a new checkpoint; last {crash.why}"
            return StartOutcome(code=EXIT_CRASH, why=why)
        gpu_fault = self._strike_unhealthy_gpus()
        if gpu_fault:
            return StartOutcome(code=EXIT_UNHEALTHY, why=gpu_fault)
        return None

    def _must_not_start(self) -> bool:
        """Return whether to stop waiting for the next start: a signal was received, or another job has taken over."""
        return bool(self._signals.number or self._meeting.taken_over())

    def _run_start(self, port: int) -> StartOutcome:
        """Start the ranks once, watch them until the start is over, kill what is left, and return what its end means.

        Args:
            port: port of the rendezvous of torch.distributed on node 0, for this start only.
        """
        num_events_before = len(read_ledger(self._run_dir))
        began = time.time()
        ranks = RankProcesses(self._mark)
        try:
            ranks.start(self._placement.command(ranks.state, port, self._arguments))
            self.log(f"starting ranks {self._placement.names}, port {port}")
            monitor = StartMonitor(
                run_dir=self._run_dir,
                ranks=ranks,
                placement=self._placement,
                meeting=self._meeting,
                limits=self._limits,
                signals=self._signals,
                log=self.log,
            )
            why_killed = monitor.until_over()
            end = self._await_end(ranks, num_events_before, began)
        finally:
            unkillable = ranks.close()
            if unkillable:
                self.log(f"processes {unkillable} cannot be killed: they wait for a device; reboot this node")
        result = outcome(end)
        if why_killed and result.code == EXIT_CRASH:
            return StartOutcome(code=EXIT_CRASH, why=f"{result.why} ({why_killed})")
        return result

    def _await_end(self, ranks: RankProcesses, num_events_before: int, began: float) -> StartEnd:
        """Collect the evidence of how one start of the ranks ended, and wait for the ledger if it may be late.

        If all ranks ended well but the ledger does not show it yet, waits up to 60 s for the shared file system.
        The arguments are those of `_read_end`.
        """
        end = self._read_end(ranks, num_events_before, began)
        deadline = time.monotonic() + _LEDGER_S
        while awaits_ledger(end) and time.monotonic() < deadline:
            time.sleep(1.0)
            end = self._read_end(ranks, num_events_before, began)
        return end

    def _read_end(self, ranks: RankProcesses, num_events_before: int, began: float) -> StartEnd:
        """Collect the evidence of how one start of the ranks ended.

        A node is at fault if a strike (a recorded fault) was added against it since the start. With one node, no other
        node can be at fault.

        Args:
            ranks: the processes of the start; their state folder must still exist.
            num_events_before: number of ledger events before the start.
            began: Unix time of the start.
        """
        strikes = read_strikes(self._run_dir)
        was_struck = any(strike.time >= began and strike.node == node_name() for strike in strikes)
        is_only_node = self._placement.num_nodes == 1
        return StartEnd(
            events=read_ledger(self._run_dir)[num_events_before:],
            codes=ranks.codes(),
            num_ranks=len(self._placement.ranks),
            at_fault=was_struck or is_only_node,
        )

    def _strike_unhealthy_gpus(self) -> str:
        """Check this node's GPUs after a crash; if one is unhealthy, record a strike and return the fault as one line.

        A strike is a recorded fault of a node; the next submission to Slurm leaves the node out. Returns an empty
        string if the GPUs are healthy.
        """
        node = node_name()
        findings = check_gpus(node)
        if exit_code(findings, node) != EXIT_UNHEALTHY:
            return ""
        strike = strike_of(findings, node, time.time())
        assert strike is not None  # An unhealthy finding about this node gives a strike.
        add_strike(self._run_dir, strike)
        return f"this node is unhealthy: {strike.device} {strike.reason}"

    def _why_not_started(self) -> StartOutcome:
        """Return the result to end with if this node joins no further start, with the exit code and the reason.

        The reasons, in this order: a signal was received, another job has taken the run over, another node has ended
        for good, or node 0 began no start within the time limit.
        """
        if self._signals.number:
            name = signal.Signals(self._signals.number).name
            return StartOutcome(code=EXIT_STOPPED, why=f"received {name} between two starts")
        newer_session = self._meeting.taken_over()
        if newer_session:
            return StartOutcome(code=EXIT_STOPPED, why=f"{newer_session} has taken the run over")
        left = self._meeting.left_by()
        if left is not None:
            node, code = left
            return StartOutcome(code=code, why=f"node {node} has ended for good; see its supervise-{node}.log")
        why = f"node 0 has begun no start for {self._limits.setup_s:.0f} s; see supervise-0.log in the run folder"
        return StartOutcome(code=EXIT_CRASH, why=why)

    def _end(self, end: StartOutcome) -> int:
        """Report the end of this supervisor to the other nodes, log it, and return its exit code.

        Args:
            end: the exit code, and the reason for the log; the other nodes receive the code only.
        """
        self._meeting.end(end.code, final=True)
        self.log(f"end, exit code {end.code}: {end.why}")
        return end.code
