"""One per node: starts the ranks, watches them, restarts them while checkpoints advance, ends with a known exit code.

    python -m launcher.supervise --config C                                            one machine
    python -m launcher.supervise --config C --nodes 2 --node-rank K --master-addr H    the same on each of two

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

import argparse
import fcntl
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

from electra_dist.config import Config
from electra_dist.config_file import load_config
from electra_dist.errors import (
    EXIT_CRASH,
    EXIT_STOPPED,
    EXIT_UNHEALTHY,
    EXIT_USER_ERROR,
    UserError,
)
from electra_dist.store import writable
from electra_dist.telemetry.heartbeat import Hung, hang_limits, hung, read_heartbeats
from electra_dist.telemetry.ledger import read_ledger
from electra_dist.telemetry.strikes import add_strike, node_name, read_strikes
from launcher.findings import exit_code, strike_of
from launcher.meeting import MEETING_DIR, Meeting
from launcher.outcome import Outcome, StartEnd, awaits_ledger, newest_checkpoint, outcome
from launcher.placement import Placement
from launcher.preflight import check_gpus
from launcher.ranks import Ranks, mark_of, marked_pids

_POLL_S = 0.1
_FOLLOW_S = 10.0  # after a rank was lost here or elsewhere, the others have this long to end by themselves
_LEAVE_S = 120.0  # from a rank's last heartbeat, "done", to its end
_LEDGER_S = 60.0  # how much later a shared file system may show what rank 0 wrote on another node


class Log:
    """Lines on stdout and in RUN/supervise-K.log; holds the lock that makes this the only supervisor of this node.

    The lock bears the host's name: a supervisor that lives on behind a cut link holds up nobody on another host.
    """

    def __init__(self, run_dir: Path, node: int) -> None:
        path = run_dir / f"supervise-{node}.log"
        lock = run_dir / MEETING_DIR / f"node-{node}-{node_name()}.lock"
        with writable(path):
            lock.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            self._lock = os.open(lock, os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{lock}: another supervisor of this run is at work on this node; let it end, or stop it with "
                f"`touch {run_dir}/stop`"
            ) from None
        except OSError:  # a file system without locks
            pass

    def __call__(self, text: str) -> None:
        """Say one thing."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        print(f"supervise: {text}", flush=True)
        try:
            os.write(self._file, f"{now} {text}\n".encode())
        except OSError as error:  # a full disk must not end the watch
            print(f"supervise: the log cannot be written ({error.strerror})", flush=True)


@dataclass
class _Told:
    """Signals that this process was sent; the handler only notes them."""

    number: int = 0
    interrupts: int = 0

    def handle(self, number: int, frame: FrameType | None) -> None:
        self.interrupts += number == signal.SIGINT
        self.number = signal.SIGTERM if number == signal.SIGINT else number  # ranks take a second SIGINT as "at once"


class Supervisor:
    """The watch over one node's ranks."""

    def __init__(self, config: Config, placement: Placement, arguments: Sequence[str], session: str = "") -> None:
        """`arguments`: of launcher/pretrain.py; `session`: see Meeting.

        Raises:
            UserError: the run folder cannot be written, or this node is supervised already.
        """
        self._run_dir, self._cluster, self._arguments = Path(config.run_dir), config.cluster, arguments
        self._placement, self._limits = placement, hang_limits(config.cluster)
        self.log = Log(self._run_dir, placement.node)
        self._mark = mark_of(self._run_dir, placement.node)
        self._meeting = Meeting(self._run_dir, placement.node, placement.port, session)
        self._told = _Told()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, self._told.handle)

    def run(self) -> int:
        """Until the run is done, stopped or beyond help here; returns the exit code."""
        restarts = 0  # in a row without a new checkpoint
        if orphans := marked_pids(self._mark):
            self.log(f"killing {len(orphans)} processes that an earlier supervisor left")
            Ranks(self._mark).close()
        while True:
            before = newest_checkpoint(read_ledger(self._run_dir))
            port = self._meeting.start(lambda: bool(self._told.number), self._limits.setup_s)
            if port is None or self._told.number:
                return self._end(self._unmet())
            end = self._one_start(port)
            if end.code != EXIT_CRASH or self._told.number:
                return self._end(end)
            restarts = 0 if newest_checkpoint(read_ledger(self._run_dir)) > before else restarts
            if self._placement.node == 0 and restarts == self._cluster.max_fruitless_restarts:
                why = f"{restarts} restarts in a row without a new checkpoint; last {end.why}"
                return self._end(Outcome(code=EXIT_CRASH, why=why))
            if sick := self._sick():
                return self._end(Outcome(code=EXIT_UNHEALTHY, why=sick))
            self._meeting.end(end.code, final=False)
            restarts += 1
            self.log(f"{end.why}; restart {restarts} of {self._cluster.max_fruitless_restarts} without a checkpoint")

    def _one_start(self, port: int) -> Outcome:
        events, began = len(read_ledger(self._run_dir)), time.time()
        ranks = Ranks(self._mark)
        try:
            ranks.start(self._placement.command(ranks.state, port, self._arguments))
            self.log(f"starting ranks {self._placement.names}, port {port}")
            why = self._watch(ranks)
            end = self._ended(ranks, events, began)
            deadline = time.monotonic() + _LEDGER_S
            while awaits_ledger(end) and time.monotonic() < deadline:
                time.sleep(1.0)
                end = self._ended(ranks, events, began)
        finally:
            if left := ranks.close():
                self.log(f"processes {left} cannot be killed: they wait for a device; reboot this node")
        found = outcome(end)
        return Outcome(code=found.code, why=f"{found.why} ({why})" if why and found.code == EXIT_CRASH else found.why)

    def _ended(self, ranks: Ranks, events: int, began: float) -> StartEnd:
        struck = any(s.time >= began and s.node == node_name() for s in read_strikes(self._run_dir))
        return StartEnd(
            events=read_ledger(self._run_dir)[events:],
            codes=ranks.codes(),
            num_ranks=len(self._placement.ranks),
            at_fault=struck or self._placement.num_nodes == 1,
        )

    def _watch(self, ranks: Ranks) -> str:
        """Return when all ranks have ended, or should be ended: then why."""
        passed_on, orphaned, lost_at = 0, False, None
        lost: list[int] = []
        while True:
            alive = ranks.alive()
            if not alive and (not ranks.launcher_runs() or len(ranks.codes()) == len(self._placement.ranks)):
                return ""
            if not ranks.launcher_runs() and not orphaned:
                orphaned = True
                self.log(f"deepspeed's launcher is gone, {len(alive)} ranks are not: going on with them")
            if self._told.number:
                if passed_on != self._told.number:
                    passed_on = self._told.number
                    self.log(f"told {signal.Signals(passed_on).name}: passing it on, the ranks save and end")
                ranks.tell(passed_on)
            if not orphaned and (passed_on or ranks.codes()) and not self._placement.missing(alive, ranks.codes()):
                orphaned = True
                ranks.dismiss_launcher()
                self.log("the ranks end: deepspeed's launcher, which would not let them finish, is dismissed")
            if self._told.interrupts > 1:
                return "interrupted twice"
            failed = sorted({*ranks.lost(), *(r for r, code in ranks.codes().items() if code == EXIT_CRASH)})
            if failed and failed != lost:
                self.log(f"rank {', '.join(map(str, failed))} lost, {len(alive)} left here")
                lost, lost_at = failed, lost_at or time.monotonic()
            if news := self._meeting.news():
                if lost_at is None:
                    self.log(f"{news}; this node's follow")
                if self._meeting.superseded():
                    return news
                lost_at = lost_at or time.monotonic()
            if lost_at is not None and (not alive or time.monotonic() - lost_at > _FOLLOW_S):
                return ""
            if silent := self._hung(ranks, alive):
                self._show(ranks, silent)
                return "hung"
            time.sleep(_POLL_S)

    def _hung(self, ranks: Ranks, alive: dict[int, int]) -> list[Hung]:
        """Ranks of this start that are silent for too long, the likely culprit first."""
        ended, now = ranks.codes(), time.time()
        here = {rank for rank in self._placement.ranks if rank not in ended}
        beats = [beat for beat in read_heartbeats(self._run_dir) if alive.get(beat.rank) == beat.pid]
        stuck = [beat for beat in beats if beat.phase == "done" and now - beat.time > _LEAVE_S]
        return hung(beats, now, self._limits, started=ranks.started, ranks=here) + [
            Hung(rank=b.rank, host=b.host, phase="done", step=b.step, quiet_s=now - b.time, limit_s=_LEAVE_S)
            for b in stuck
        ]

    def _show(self, ranks: Ranks, silent: Sequence[Hung]) -> None:
        first, stopped = silent[0], ranks.stopped()
        self.log(
            f"hung: rank {first.rank} in phase {first.phase} at step {first.step:,}, silent for {first.quiet_s:.1f} s "
            f"(limit {first.limit_s:.1f} s); silent too: {[h.rank for h in silent[1:]]}; not even running: {stopped}"
        )
        for line in ranks.stacks():
            self.log(f"  {line}")

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

    def _unmet(self) -> Outcome:
        if self._told.number:
            return Outcome(code=EXIT_STOPPED, why=f"told {signal.Signals(self._told.number).name} between two starts")
        if left := self._meeting.left_by():
            return Outcome(code=left[1], why=f"node {left[0]} has ended for good")
        return Outcome(code=EXIT_CRASH, why=f"node 0 has begun no start for {self._limits.setup_s:.0f} s")

    def _end(self, end: Outcome) -> int:
        self._meeting.end(end.code, final=True)
        self.log(f"end, exit code {end.code}: {end.why}")
        return end.code


def main(argv: Sequence[str] | None = None) -> int:
    """Supervise this node's part of a run. Returns the process's exit code."""
    args = _parse(argv)
    arguments = ["--config", args.config, *(part for override in args.set for part in ("--set", override))]
    try:
        config = load_config(args.config, args.set)
        placement = Placement.from_options(
            nodes=args.nodes,
            node=args.node_rank,
            ranks_per_node=args.gpus_per_node,
            address=args.master_addr,
            port=args.master_port,
            hostfile=args.hostfile,
        )
        return Supervisor(config, placement, arguments, args.session).run()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_USER_ERROR


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="supervise.py", description="Start, watch and restart one node's ranks.")
    parser.add_argument("--config", required=True, help="YAML file of the run")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override, may repeat")
    parser.add_argument("--nodes", type=int, help="nodes of the job; default: those of --hostfile, else 1")
    parser.add_argument("--node-rank", type=int, default=0, help="this node's number, from 0")
    parser.add_argument("--gpus-per-node", type=int, help="ranks per node; default: the GPUs here, else 1")
    parser.add_argument("--master-addr", help="address of node 0; needed with several nodes")
    parser.add_argument("--master-port", type=int, help="first of 64 ports; default: 29500, alone: any free one")
    parser.add_argument("--session", default="", help="the same word on all nodes, another in each job")
    parser.add_argument("--hostfile", type=Path, help="DeepSpeed's: HOST slots=N a line; default: as the options say")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
