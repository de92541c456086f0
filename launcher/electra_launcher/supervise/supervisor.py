"""Supervise the ranks of one node: start them, watch them, and restart them while new checkpoints appear.

Guarantees: a hung rank is noticed within the limits of the config's `cluster` section, and its stacks are in the log
before it is killed. The limit in a training step is by default 5 times the step time that the rank has measured, and
at least 30 s. The run ends after `cluster.max_fruitless_restarts` (3) restarts in a row without a new checkpoint. The
exit code is one of errors.py, decided from the ledger and the exit codes of the ranks (start_outcome.py). Why a start
has failed is recorded (run/failures.py); a fault of code or data that comes back at the same step ends the run.
SIGTERM, SIGINT, SIGUSR1, SIGUSR2 and SIGHUP (unless started with nohup) make the ranks save and end with 75; a second
SIGINT kills them. Every decision is one line on stdout and in RUN/supervise-K.log, where K is the node's number.

The supervisor of node 0 holds the lease of the run folder, the exclusive right to train in it. If a supervisor is
killed, its ranks save and stop (rank_main.py), and the next supervisor of this run on this node kills the processes
that are left.

Limits: a supervisor that has ended is started again only by Slurm or by a person. If a node is cut off from the
network, its own supervisor ends its ranks.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from electra_dist.config import Config
from electra_dist.engine.rank_environment import PREFLIGHT_LIMIT_S
from electra_dist.errors import (
    EXIT_CRASH,
    EXIT_DONE,
    EXIT_STOPPED,
    EXIT_UNHEALTHY,
    EXIT_USER_ERROR,
    StorageLost,
    UserError,
)
from electra_dist.escapes import printable
from electra_dist.run.failures import (
    Failure,
    Strike,
    add_strike,
    output_file,
    read_failures,
    read_strikes,
    record_failure,
)
from electra_dist.run.folder import MEETING_DIR, STOP_FILE
from electra_dist.run.heartbeat import delete_preflight_heartbeat, read_heartbeats
from electra_dist.run.history import newest_checkpoint
from electra_dist.run.lease import TOKEN_VARIABLE, LeaseLost, RunLease, take_lease
from electra_dist.run.ledger import Ledger, LedgerEvent, read_jobs, read_ledger
from electra_dist.run.this_node import mark_of, marked_pids, node_name
from electra_dist.store.atomic_files import lock_file, writable
from electra_dist.store.patience import Patience, patient
from electra_dist.train.stop_request import JobEndTime
from electra_launcher.preflight.findings import exit_code, strike_of
from electra_launcher.preflight.gpu_checks import check_gpus
from electra_launcher.supervise.hangs import nccl_environment
from electra_launcher.supervise.messages import Log, event_of, notify
from electra_launcher.supervise.rank_processes import Placement, RankProcesses, kill_marked
from electra_launcher.supervise.rendezvous import Rendezvous
from electra_launcher.supervise.start_outcome import (
    FailedStart,
    StartEnd,
    StartOutcome,
    awaits_ledger,
    explain,
    kills_for_memory,
    outcome,
)
from electra_launcher.supervise.wait_for_ranks import ReceivedSignals, StartMonitor

_POLL_S = 0.5  # between two calls of `give_up` while the preflight process runs
_TAKE_OVER_S = 180.0  # how long a new job waits for the supervisor of the previous job, which must end its ranks
_LEDGER_S = 60.0  # how much later a shared file system may show what rank 0 wrote on another node


class Supervisor:
    """Supervisor of one node's ranks for a whole run: call `check` (optional) and then `run`, each at most once.

    It installs signal handlers, so it must be made in the main thread.
    """

    def __init__(
        self,
        config: Config,
        placement: Placement,
        arguments: Sequence[str],
        session: str = "",
        rank_options: Sequence[str] = (),
    ) -> None:
        """Install signal handlers, and make this process the run's only supervisor on its node. No rank is started.

        `arguments` name the config; launcher/pretrain.py and preflight get them. `rank_options` are only for
        launcher/pretrain.py. `session` is the job's name, the same on all nodes; with a name, the supervisor ends once
        a newer job has begun. A signal during the wait for the lease raises KeyboardInterrupt.
        """
        self._run_dir = Path(config.run_dir)
        self._global_batch = config.train.global_batch
        self._began = time.time()
        self._failure: Failure | None = None  # why the newest start has failed on this node
        self._cluster = config.cluster
        self._patience = Patience(config.cluster.storage_patience_s)
        self._arguments = arguments
        self._rank_options = rank_options
        self._placement = placement
        self._signals = ReceivedSignals()
        self._job_end = JobEndTime()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # stays ignored under nohup
                signal.signal(number, self._signals.handle)
        self._mark = mark_of(self._run_dir, placement.node)
        self._meeting = Rendezvous(self._run_dir, placement.node, placement.port, session, self._patience)
        self._lease: RunLease | None = None
        if placement.node == 0:
            self._lease = self._take_lease(session)
        else:
            # Held until this process ends.
            self._lock = lock_node(self._run_dir, placement.node, patience=self._patience)
            self._meeting.begin()
        self.log = Log(self._run_dir, placement.node, self._patience)

    def _take_lease(self, session: str) -> RunLease:
        """Take the lease of the run folder. With a session name, wait up to 180 s for an older job to release it."""
        self._meeting.begin()
        return take_lease(
            self._run_dir,
            "supervisor",
            say=lambda line: print(printable(f"supervise: {line}"), flush=True),
            take_over_s=_TAKE_OVER_S if session else 0.0,
            give_up=lambda: self._signals.number != 0,
            patience=self._patience,
        )

    def close(self) -> None:
        """Release the lease of the run folder. Call it when no rank runs any more."""
        if self._lease is not None:
            self._lease.release()

    def check(self) -> int:
        """Run the preflight checks of this node; return 0 if `run` may be called, otherwise the exit code to end with.

        The checks take at most 10 minutes. A new run may wait another `cluster.storage_patience_s` s for its storage.
        """
        patience_s = self._cluster.storage_patience_s
        first_rank = self._placement.ranks[0]
        place = ["--first-rank", str(first_rank), "--nodes", str(self._placement.num_nodes)]
        code = preflight(
            self._run_dir,
            [*self._arguments, "--storage-patience", str(patience_s), *place],
            PREFLIGHT_LIMIT_S + patience_s,
            give_up=lambda: self._signals.number != 0,
        )
        delete_preflight_heartbeat(self._run_dir, first_rank)
        if self._signals.number:
            return self._end(self._why_not_started())
        if code != EXIT_DONE:
            return self._end(StartOutcome(code=code, why="preflight failed; see its findings above and strikes.jsonl"))
        return code

    def run(self) -> int:
        """Start and restart this node's ranks until the run ends here, and return the exit code.

        The ranks are started again only after a crash, and not if a GPU of this node is then found unhealthy. Only
        node 0 counts restarts: the other nodes start their ranks when node 0 does, and end when its supervisor ends.
        """
        self._kill_orphans()
        num_fruitless = 0  # restarts in a row without a new checkpoint
        while True:
            checkpoint_before = newest_checkpoint(self._read_ledger())
            port = self._meeting.start(
                give_up=lambda: bool(self._signals.number or self._meeting.taken_over()),
                timeout_s=self._cluster.hang_setup_s,
            )
            if port is None or self._signals.number:
                return self._end(self._why_not_started())
            result = self._run_start(port)
            if result.code != EXIT_CRASH or self._signals.number:
                return self._end(result)
            if self._meeting.taken_over():
                return self._end(self._why_not_started())
            if newest_checkpoint(self._read_ledger()) > checkpoint_before:
                num_fruitless = 0
            final_result = self._why_not_restarted(result, num_fruitless)
            if final_result is not None:
                return self._end(final_result)
            self._meeting.end(EXIT_CRASH, final=False, ends_others=True)
            num_fruitless += 1
            limit = self._cluster.max_fruitless_restarts
            self.log(f"{result.why}; restart {num_fruitless} of {limit} without a new checkpoint")

    def _kill_orphans(self) -> None:
        """Kill processes that an earlier, killed supervisor of this run left on this node; they may hold the GPUs."""
        orphans = marked_pids(self._mark)
        if orphans:
            self.log(f"killing {len(orphans)} processes that an earlier supervisor left running")
            kill_marked(self._mark)

    def _why_not_restarted(self, crash: StartOutcome, num_fruitless: int) -> StartOutcome | None:
        """Return why this supervisor must end after a crash of its ranks; None if it may start the ranks again."""
        if self._lease is not None:
            try:
                self._lease.check()
            except LeaseLost as error:
                return StartOutcome(code=EXIT_USER_ERROR, why=str(error))
        if self._failure is not None and self._failure.repeated:
            why = f"{self._failure.description}; see `electra-dist why {shlex.quote(str(self._run_dir))}`"
            return StartOutcome(code=EXIT_USER_ERROR, why=why)
        # Only node 0 checks the number, because the other nodes follow its starts and its end. The number grows by one
        # at a time, so it reaches the limit and never exceeds it.
        if self._placement.node == 0 and num_fruitless == self._cluster.max_fruitless_restarts:
            why = f"{num_fruitless} restarts in a row without a new checkpoint; last {crash.why}"
            return StartOutcome(code=EXIT_CRASH, why=why)
        gpu_fault = self._strike_unhealthy_gpus() or self._strike_node_at_fault()
        if gpu_fault:
            return StartOutcome(code=EXIT_UNHEALTHY, why=gpu_fault)
        return None

    def _read_ledger(self) -> list[LedgerEvent]:
        return read_ledger(self._run_dir, patience=self._patience)

    def _run_start(self, port: int) -> StartOutcome:
        """Start the ranks once, watch them until they end or must be killed, and return how this start ended."""
        num_events_before = len(self._read_ledger())
        num_strikes_before = len(read_strikes(self._run_dir, patience=self._patience))
        num_killed_before = kills_for_memory()
        self._failure = None
        ranks = RankProcesses(self._mark, self._patience)
        token = self._lease.token if self._lease is not None else ""
        environment = {TOKEN_VARIABLE: token, **self._job_end.environment()}
        environment |= nccl_environment(ranks.state, os.environ)
        try:
            rank_arguments = [*self._arguments, *self._rank_options]
            ranks.start(self._placement, port, rank_arguments, environment)
            self.log(f"starting ranks {self._placement.names}, port {port}")
            monitor = StartMonitor(
                run_dir=self._run_dir,
                ranks=ranks,
                placement=self._placement,
                meeting=self._meeting,
                cluster=self._cluster,
                signals=self._signals,
                log=self.log,
            )
            why_killed = monitor.until_over()
            end = self._await_end(ranks, num_events_before, num_strikes_before)
        finally:
            unkillable = ranks.close()
            if unkillable:
                self.log(f"processes {unkillable} cannot be killed: they are blocked in the kernel; reboot this node")
        result = outcome(end)
        if self._signals.interrupts > 1 and result.code == EXIT_CRASH:
            why = "SIGINT received twice: ended without a save; the next start goes on from the newest checkpoint"
            self._record_end_without_save(ranks.pids(), why)
            return StartOutcome(code=EXIT_STOPPED, why=why)
        consequences: list[int] = []
        has_failed = result.code not in (EXIT_DONE, EXIT_STOPPED) or result.ends_alone
        if has_failed and not self._signals.number:
            num_killed = kills_for_memory() - num_killed_before
            consequences = self._explain_failure(ranks, end.codes, why_killed == "hung", num_killed)
        ranks.show_ends(hidden=consequences)
        if why_killed and result.code == EXIT_CRASH:
            return StartOutcome(code=EXIT_CRASH, why=f"{result.why} ({why_killed})")
        return result

    def _record_end_without_save(self, pids: Mapping[int, int], why: str) -> None:
        """Append the event "crash" to the ledger in place of rank 0, which was killed and could not record its end.

        `pids` maps the ranks of this node to their process ids. Only node 0 does so; an unusable disk is ignored.
        """
        if self._lease is None:
            return
        with contextlib.suppress(UserError, StorageLost):
            steps = [beat.step for beat in read_heartbeats(self._run_dir, pids) if beat.pid == pids[beat.rank]]
            if steps:  # Otherwise no rank has begun.
                with contextlib.closing(Ledger(self._run_dir, self._patience)) as ledger:
                    ledger.append("crash", max(steps), why=why)

    def _await_end(self, ranks: RankProcesses, num_events_before: int, num_strikes_before: int) -> StartEnd:
        """Return how the ranks ended; if all ended well, wait up to 60 s until the ledger has the event for it."""
        deadline = time.monotonic() + _LEDGER_S
        while True:
            new_strikes = read_strikes(self._run_dir, patience=self._patience)[num_strikes_before:]
            was_struck = any(strike.node == node_name() for strike in new_strikes)
            end = StartEnd(
                events=self._read_ledger()[num_events_before:],
                codes=ranks.codes(),
                num_ranks=len(self._placement.ranks),
                at_fault=was_struck or self._placement.num_nodes == 1,  # the only node is always at fault
            )
            if not awaits_ledger(end) or time.monotonic() > deadline:
                return end
            time.sleep(1.0)

    def _explain_failure(
        self, ranks: RankProcesses, codes: Mapping[int, int], is_hung: bool, num_killed_for_memory: int
    ) -> list[int]:
        """Find out, record and log why the ranks of this node failed; a disk that stays unusable is ignored.

        Returns the ranks that ended only because another one did, and whose output is in a file.
        """
        start = FailedStart(
            name=self._meeting.hang_folder().name,
            placement=self._placement,
            codes=codes,
            outputs=ranks.outputs(),
            pids=ranks.pids(),
            is_hung=is_hung,
            num_killed_for_memory=num_killed_for_memory,
            global_batch=self._global_batch,
        )
        with contextlib.suppress(UserError):
            submitted = [job.unix_s for job in read_jobs(self._run_dir) if job.event == "submit"]
            since = max(submitted, default=self._began)  # a person who starts again has probably corrected something
            earlier = [
                failure for failure in read_failures(self._run_dir, patience=self._patience) if failure.unix_s >= since
            ]
            failure = explain(start, read_heartbeats(self._run_dir), earlier)
            if failure is None:
                return []
            self._failure = failure
            # What a rank prints about a refusal is never held back, as a traceback is.
            if failure.kind.name == "refused":
                self.log(failure.description, quoted=failure.line)
            else:
                self.log(f"{failure.description}{': ' if failure.line else ''}{failure.line}")
            record_failure(self._run_dir, self._placement.node, failure, start.outputs, patience=self._patience)
            if failure.kind.is_consequence:
                return []
            consequences = [rank for rank, finding in start.findings().items() if finding.error.is_consequence]
            for rank in consequences[:1]:
                self.log(
                    f"{len(consequences)} of {len(self._placement.ranks)} ranks ended because of this one; what rank "
                    f"{rank} wrote: {output_file(self._run_dir, rank)}"
                )
            return consequences
        return []

    def _strike_node_at_fault(self) -> str:
        """Record and return the fault of this node that the output of its failed ranks shows; return "" for none."""
        failure = self._failure
        if failure is None or failure.kind.restart != "elsewhere":
            return ""
        strike = Strike(time=time.time(), node=node_name(), device="", reason=failure.line, by="supervise")
        add_strike(self._run_dir, strike, patience=self._patience)
        return f"this node is unhealthy: {failure.kind.title}: {failure.line}"

    def _strike_unhealthy_gpus(self) -> str:
        """Check this node's GPUs after a crash; record and return the fault of an unhealthy one, or return ""."""
        node = node_name()
        findings = check_gpus(node)
        if exit_code(findings, node) != EXIT_UNHEALTHY:
            return ""
        strike = strike_of(findings, node, time.time())
        assert strike is not None  # An unhealthy finding about this node gives a strike.
        add_strike(self._run_dir, strike, patience=self._patience)
        return f"this node is unhealthy: {strike.device} {strike.reason}"

    def _why_not_started(self) -> StartOutcome:
        """Return the exit code and the reason with which this supervisor ends without starting its ranks again."""
        if self._signals.number:
            return StartOutcome(code=EXIT_STOPPED, why=f"received {self._signals.name} while no ranks ran")
        newer_session = self._meeting.taken_over()
        if newer_session:
            return StartOutcome(code=EXIT_STOPPED, why=f"{newer_session} has taken the run over")
        left = self._meeting.left_by()
        if left is not None:
            node, code = left
            return StartOutcome(code=code, why=f"node {node} has ended for good; see its supervise-{node}.log")
        why = (
            f"node 0 has begun no start for {self._cluster.hang_setup_s:.0f} s; see supervise-0.log in the run folder"
        )
        return StartOutcome(code=EXIT_CRASH, why=why)

    def _end(self, end: StartOutcome) -> int:
        """Report to the other nodes that this supervisor ends, log the reason, and return the exit code."""
        has_run_folder = self._lease is None or not self._lease.is_lost
        if has_run_folder:
            # The exit code must be returned even if the report for the other nodes cannot be written.
            with contextlib.suppress(StorageLost):
                self._meeting.end(end.code, final=True, ends_others=end.ends_others)
        self.log(f"end, exit code {end.code}: {end.why}")
        # The command of the user is run if the run is done, needs a person or makes no progress.
        event = event_of(end.code, self._placement.node)
        was_killed = end.code == EXIT_CRASH and self._signals.number  # by a person or by Slurm
        if self._cluster.notify and event and not was_killed:
            notify(self._cluster.notify, self._run_dir, event, end.why, end.code, self.log)
        return end.code


def preflight(
    run_dir: Path, arguments: Sequence[str], limit_s: float, give_up: Callable[[], bool] = lambda: False
) -> int:
    """Run `electra_launcher.preflight` as a separate process and return its exit code; 0 means that the node is fit.

    After `limit_s` seconds the process is killed, a strike (recorded fault of this node) is written, and the result is
    EXIT_UNHEALTHY. The end of the process is not awaited, because a hung driver may keep it alive. `give_up` is polled
    twice per second; once it returns True, the process is killed, and the result is EXIT_STOPPED.
    """
    process = subprocess.Popen([sys.executable, "-m", "electra_launcher.preflight", *arguments])
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(min(_POLL_S, limit_s))
        if give_up():
            process.kill()
            return EXIT_STOPPED
    process.kill()
    reason = f"the preflight checks were not over within {limit_s:.0f} s; look for a hung GPU driver or mount"
    strike = Strike(time=time.time(), node=node_name(), device="", reason=reason, by="preflight")
    add_strike(run_dir, strike)
    return EXIT_UNHEALTHY


@patient
def lock_node(run_dir: Path, node: int, *, patience: Patience | None = None) -> int:
    """Take the lock that prevents a second supervisor of this run and node number; raise UserError if it is taken.

    On node 0, the lease of the run folder does this. Returns the descriptor of the lock file. Keep it open: the kernel
    releases the lock when it is closed, or when this process ends in any way. On a file system without locks nothing
    is locked.
    """
    # The host name is in the file's name, so that a supervisor that is cut off from the network does not block the one
    # that takes over its node number on another host.
    path = run_dir / MEETING_DIR / f"node-{node}-{node_name()}.lock"
    with writable(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        lock_file(descriptor, wait=False)
    except BlockingIOError:
        raise UserError(
            f"{path}: another supervisor of this run is active on this node; wait until it ends, or stop it with "
            f"`touch {shlex.quote(str(run_dir / STOP_FILE))}`"
        ) from None
    return descriptor
