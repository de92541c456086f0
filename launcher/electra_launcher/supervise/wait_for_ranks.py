"""Watch a node's ranks after one start, and decide when they have ended or must be killed.

Guarantee: `StartMonitor.until_over` returns when all ranks of the node have ended. It returns earlier if the caller
should kill them:
- ranks are hung, on this node or another; the stacks of this node's ranks are then in the log;
- ranks are lost, on this node or another, and the rest have not ended by themselves within 10 s;
- SIGINT was received twice, or node 0 has begun a new start.

Limits: start_outcome.py decides what the end of a start means for the run. rank_processes.py kills the ranks.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from electra_dist.config import ClusterConfig
from electra_dist.run.heartbeat import Hung
from electra_dist.train.stop_request import INTERRUPT_SIGNAL
from electra_launcher.supervise.hangs import HangReport, SilenceWatch, request_nccl_traces
from electra_launcher.supervise.rank_processes import Placement, RankProcesses, is_lost
from electra_launcher.supervise.rendezvous import Rendezvous
from electra_launcher.supervise.start_outcome import describe_code

_POLL_S = 0.1  # between two looks at the processes
_LOOK_FOR_HANG_S = 1.0  # between two checks whether another node has found a hung rank
_FOLLOW_S = 10.0  # how long the remaining ranks may take to end by themselves after a rank of any node was lost


@dataclass
class ReceivedSignals:
    """Record of the signals that the supervisor has received; `StartMonitor` passes them on to the ranks."""

    number: int = 0  # the newest signal to pass on to the ranks; 0: none yet
    interrupts: int = 0  # how often SIGINT was received

    @property
    def name(self) -> str:
        """Return the name of what was received, as a user knows it."""
        return "Ctrl-C" if self.interrupts else signal.Signals(self.number).name

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Record a received signal; pass this method to `signal.signal` as the handler."""
        if number == signal.SIGINT:
            self.interrupts += 1
        self.number = INTERRUPT_SIGNAL if number == signal.SIGINT else number


class StartMonitor:
    """Monitor of this node's ranks that also passes signals on to them and reads the reports of other nodes.

    Make a new monitor each time the ranks are started, and call `until_over` once.
    """

    def __init__(
        self,
        run_dir: Path,
        ranks: RankProcesses,
        placement: Placement,
        meeting: Rendezvous,
        cluster: ClusterConfig,
        signals: ReceivedSignals,
        log: Callable[[str], None],
    ) -> None:
        """Prepare to watch ranks that were started already; the handlers of `signals` must be installed."""
        self._ranks = ranks
        self._placement = placement
        self._meeting = meeting
        self._signals = signals
        self._log = log
        self._passed_on = 0  # the signal that the ranks receive; 0: none yet
        self._lost: list[int] = []
        self._follow_until: float | None = None  # until when the other ranks may end by themselves; None: no loss yet
        self._silence = SilenceWatch(run_dir, placement.node, cluster, log)
        self._report = HangReport(meeting.hang_folder(), placement.node, placement.num_nodes, log)
        self._next_look_for_hang = 0.0

    def until_over(self) -> str:
        """Block until all ranks of this node have ended or should be killed; return why to kill them, or "".

        The result is "" if all ranks have ended, and also if ranks, here or on another node, were killed or crashed
        and the others have had 10 s to end. The caller must kill the remaining ranks, and then call
        `start_outcome.outcome` to judge how the start ended.
        """
        while True:
            self._silence.round_begins()
            alive = self._ranks.alive()
            codes = self._ranks.codes()
            if len(codes) == len(self._placement.ranks):
                return ""
            self._pass_on_signal()
            if self._signals.interrupts > 1:
                return "SIGINT received twice"
            if self._hang_elsewhere():
                self._describe_ranks("a rank of another node is hung")
                return "a rank of another node is hung"
            news = self._meeting.news()
            self._look_for_lost(alive, codes, news)
            if news and self._meeting.superseded():
                return "node 0 has begun a new start"
            if self._follow_until is not None:
                is_too_late = time.monotonic() > self._follow_until
                if is_too_late or not alive:
                    return ""
            hung_ranks = self._silence.find_hung(alive, self._ranks.started)
            if hung_ranks:
                self._report_hung(hung_ranks)
                return "hung"
            time.sleep(_POLL_S)

    def _pass_on_signal(self) -> None:
        """Pass the newest received signal on to each rank that has a handler for it and has not got it yet."""
        newest_signal = self._signals.number  # 0: none yet
        if newest_signal != 0 and newest_signal != self._passed_on:
            self._passed_on = newest_signal
            again = "; a second Ctrl-C ends them at once, without one" if self._signals.interrupts else ""
            self._log(
                f"received {self._signals.name}: passing it on to the ranks, which save a checkpoint, if steps are "
                f"left, and end{again}"
            )
        if self._passed_on != 0:
            self._ranks.tell(self._passed_on)

    def _look_for_lost(self, alive: dict[int, int], codes: dict[int, int], news: str) -> None:
        """Log newly lost ranks (killed or crashed) and `news` of ranks that ended elsewhere.

        The first of either sets the time, 10 s later, after which the other ranks of this node are killed.
        """
        lost = sorted(rank for rank, code in codes.items() if is_lost(code))
        if lost and lost != self._lost:
            self._lost = lost
            names = ", ".join(f"{rank} ({describe_code(codes[rank])})" for rank in lost)
            others = "1 other rank" if len(alive) == 1 else f"{len(alive)} other ranks"
            self._log(f"rank {names} lost; {others} of this node get {_FOLLOW_S:.0f} s to end before they are killed")
        is_first_loss = self._follow_until is None
        if news and is_first_loss:
            self._log(f"{news}; ending the ranks of this node too")
        if (lost or news) and is_first_loss:
            self._follow_until = time.monotonic() + _FOLLOW_S

    def _report_hung(self, hung_ranks: Sequence[Hung]) -> None:
        """Report that ranks of this node hang, the likely culprit first, and wait up to 10 s for the other nodes."""
        self._report.begin()
        culprit, *others = hung_ranks
        silent_too = [other.rank for other in others]
        stopped = self._ranks.stopped()
        why = (
            f"hung: rank {culprit.rank} in phase {culprit.phase} at step {culprit.step:,}, silent for "
            f"{culprit.quiet_s:.1f} s (limit {culprit.limit_s:.1f} s); also silent: {silent_too}; "
            f"stopped or blocked in the kernel: {stopped}; the stacks of all ranks follow"
        )
        self._describe_ranks(why)
        self._report.await_other_nodes()

    def _describe_ranks(self, why: str) -> None:
        """Write `why` and the stacks of this node's ranks to the log and, with NCCL's records, to the hang report."""
        self._log(why)
        request_nccl_traces(self._ranks.state)
        stacks = self._ranks.stacks()
        for line in stacks:
            self._log(f"  {line}")
        self._report.write(why, stacks, self._ranks.state)

    def _hang_elsewhere(self) -> bool:
        """Return whether another node has found a hung rank; False if the previous check was under a second ago."""
        if self._placement.num_nodes == 1 or time.monotonic() < self._next_look_for_hang:
            return False
        self._next_look_for_hang = time.monotonic() + _LOOK_FOR_HANG_S
        return self._report.was_begun
