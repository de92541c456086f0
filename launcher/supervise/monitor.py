"""The watch over one start of one node's ranks: from their first sign of life to the moment when they should be gone.

Guarantee: it returns when all ranks have ended, and otherwise as soon as they should be ended: some are hung (their
stacks are then in the log), or some are lost, here or on another node, and the others did not follow within seconds.
It ends nothing itself but DeepSpeed's launcher, which would kill ranks that still save.

Where it stops: what the end means is outcome.py's; killing is rank_processes.py's.
"""

from __future__ import annotations

import functools
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from electra_dist.analysis.hangs import HangLimits, Hung, hung
from electra_dist.errors import EXIT_CRASH
from electra_dist.run.heartbeat import read_heartbeats
from launcher.supervise.placement import Placement
from launcher.supervise.rank_processes import RankProcesses
from launcher.supervise.rendezvous import Rendezvous

_POLL_S = 0.1
_LOOK_S = 0.5  # between two looks at the heartbeats, which may lie on a shared file system
_FOLLOW_S = 10.0  # after a rank was lost here or elsewhere, the others have this long to end by themselves
_LEAVE_S = 120.0  # from a rank's last heartbeat, "done", or its exit code, to the end of its process


@dataclass
class ReceivedSignals:
    """Signals that this process was sent; the handler only notes them."""

    number: int = 0
    interrupts: int = 0

    def handle(self, number: int, frame: FrameType | None) -> None:
        """For signal.signal."""
        self.interrupts += number == signal.SIGINT
        self.number = signal.SIGTERM if number == signal.SIGINT else number  # ranks take a second SIGINT as "at once"


class StartMonitor:
    """One start."""

    def __init__(
        self,
        run_dir: Path,
        ranks: RankProcesses,
        placement: Placement,
        meeting: Rendezvous,
        limits: HangLimits,
        told: ReceivedSignals,
        log: Callable[[str], None],
    ) -> None:
        self._run_dir, self._ranks, self._placement, self._meeting = run_dir, ranks, placement, meeting
        self._limits, self._told, self._log = limits, told, log
        self._has_launcher = True
        self._passed_on = 0  # the signal
        self._lost: list[int] = []
        self._follow_until: float | None = None
        self._next_look = 0.0
        self._leaving: dict[int, float] = {}  # ranks that need only end, since when

    def until_over(self) -> str:
        """Return when all ranks have ended, or should be ended: then why, if the exit codes do not say."""
        while True:
            alive, codes = self._ranks.alive(), self._ranks.codes()
            if not alive and (not self._ranks.launcher_runs() or not self._placement.missing(codes)):
                return ""
            self._look_at_launcher(alive, codes)
            self._pass_on()
            if self._told.interrupts > 1:
                return "interrupted twice"
            if self._look_for_lost(alive, codes) and self._meeting.superseded():
                return "node 0 has begun a new start"
            if self._follow_until is not None and (not alive or time.monotonic() > self._follow_until):
                return ""
            if silent := self._hung(alive, codes):
                self._show(silent)
                return "hung"
            time.sleep(_POLL_S)

    def _look_at_launcher(self, alive: dict[int, int], codes: dict[int, int]) -> None:
        if not self._has_launcher:
            return
        if not self._ranks.launcher_runs():
            self._has_launcher = False
            self._log(f"deepspeed's launcher is gone, {len(alive)} ranks are not: going on with them")
        elif (self._passed_on or any(codes.values())) and not self._placement.missing(alive, codes):
            self._has_launcher = False
            self._ranks.dismiss_launcher()
            self._log("the ranks end: deepspeed's launcher, which would not let them finish, is dismissed")

    def _pass_on(self) -> None:
        if self._told.number and self._passed_on != self._told.number:
            self._passed_on = self._told.number
            self._log(f"told {signal.Signals(self._passed_on).name}: passing it on, the ranks save and end")
        if self._passed_on:
            self._ranks.tell(self._passed_on)

    def _look_for_lost(self, alive: dict[int, int], codes: dict[int, int]) -> str:
        """News from other nodes, if there are any."""
        lost = sorted({*self._ranks.lost(), *(rank for rank, code in codes.items() if code == EXIT_CRASH)})
        news = self._meeting.news()
        if lost and lost != self._lost:
            self._lost = lost
            self._log(f"rank {', '.join(map(str, lost))} lost, {len(alive)} left here")
        if news and self._follow_until is None:
            self._log(f"{news}; the ranks here follow")
        if (lost or news) and self._follow_until is None:
            self._follow_until = time.monotonic() + _FOLLOW_S
        return news

    def _hung(self, alive: dict[int, int], codes: dict[int, int]) -> list[Hung]:
        """Ranks of this start that are silent for too long, the likely culprit first."""
        if time.monotonic() < self._next_look:
            return []
        self._next_look = time.monotonic() + _LOOK_S
        now, here = time.time(), self._placement.missing(codes)
        beats = [beat for beat in read_heartbeats(self._run_dir, alive) if alive[beat.rank] == beat.pid]
        for rank in alive.keys() & {*codes, *(beat.rank for beat in beats if beat.phase == "done")}:
            self._leaving.setdefault(rank, now)
        stuck = [
            Hung(rank=rank, host="", phase="done", step=0, quiet_s=now - since, limit_s=_LEAVE_S)
            for rank, since in self._leaving.items()
            if rank in alive and now - since > _LEAVE_S
        ]
        working = [beat for beat in beats if beat.rank in here]
        everyone = functools.partial(read_heartbeats, self._run_dir)
        silent = hung(working, now, self._limits, started=self._ranks.started, ranks=here, everyone=everyone)
        return silent + stuck

    def _show(self, silent: Sequence[Hung]) -> None:
        first, stopped = silent[0], self._ranks.stopped()
        self._log(
            f"hung: rank {first.rank} in phase {first.phase} at step {first.step:,}, silent for {first.quiet_s:.1f} s "
            f"(limit {first.limit_s:.1f} s); silent too: {[h.rank for h in silent[1:]]}; not even running: {stopped}"
        )
        for line in self._ranks.stacks():
            self._log(f"  {line}")
