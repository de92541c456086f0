"""List all kinds of faults of a drill (`FAULTS`), and inflict those that hit processes.

Guarantee: only processes and files of the run are touched (victim.py).

Limits: the faults that damage files are inflicted by file_faults.py.
"""

from __future__ import annotations

import random
import signal
from dataclasses import dataclass
from typing import Literal

from electra_dist.errors import EXIT_CRASH, EXIT_STOPPED, EXIT_USER_ERROR
from electra_dist.run.folder import STOP_FILE
from electra_launcher.chaos.file_faults import (
    cut_file,
    delete_part,
    fill_disk,
    flip_byte,
    free_disk,
    return_lease,
    steal_lease,
    tear_ledger,
    tear_metrics,
)
from electra_launcher.chaos.victim import Act, Undo, Victim, kill_everything, send_signal

_KILLED = -signal.SIGKILL  # exit code that `subprocess` reports for a process that SIGKILL has ended


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One kind of fault: what is done to the run, and how the run must react to pass the drill.

    A fault with `undo` lasts until the drill calls `undo`. The drill does so once the run has ended if `then` is
    "ends", otherwise `lasts_s` seconds after the call of `act`.
    """

    act: Act  # inflicts the fault and returns what was hit, for the table that the drill prints
    then: Literal["goes on", "restarts", "ends"]  # required: no restart, restart by the supervisor, end of the run
    code: int | None  # required exit code of the ranks ("restarts") or of the supervisor ("ends"); None: "goes on"
    bad_checkpoint: bool = False  # whether it damages a checkpoint, which the next start must set aside
    needs_save: bool = False  # whether half of these faults should hit the run while it writes a checkpoint
    undo: Undo | None = None  # ends a fault that lasts; None: the fault is over when `act` returns
    lasts_s: float = 0.0  # seconds between `act` and `undo`


def _to_a_rank(number: int) -> Act:
    """Return a function that inflicts a fault: it sends signal `number` to one random rank of a run."""

    def act(victim: Victim, draw: random.Random) -> str:
        ranks = victim.ranks()
        rank = draw.choice(sorted(ranks))
        send_signal([ranks[rank]], number)
        return f"rank {rank}"

    return act


def _to_supervisor(number: int) -> Act:
    """Return a function that inflicts a fault: it sends signal `number` to the supervisor of a run."""

    def act(victim: Victim, draw: random.Random) -> str:
        send_signal([victim.supervisor], number)
        return "supervisor"

    return act


def _continue_ranks(victim: Victim) -> None:
    """Continue the rank that SIGSTOP has stopped. SIGCONT goes to all ranks; it does nothing to the running ones."""
    send_signal(victim.ranks().values(), signal.SIGCONT)


def _signal_all_processes(victim: Victim, draw: random.Random) -> str:
    """Send SIGUSR2 to all processes of the run, as `scancel --signal=USR2` does to all processes of a job step."""
    pids = [victim.supervisor, *victim.pids()]
    send_signal(pids, signal.SIGUSR2)
    return f"{len(pids)} processes"


def _request_stop(victim: Victim, draw: random.Random) -> str:
    """Create the file `stop` in the run folder, as a user does who wants the run to save and end."""
    (victim.run_dir / STOP_FILE).touch()
    return f"file {STOP_FILE}"


def _power(victim: Victim, draw: random.Random) -> str:
    """Kill all processes of the run, as a power loss does."""
    return f"{kill_everything(victim)} processes"


FAULTS: dict[str, Fault] = {
    "kill": Fault(act=_to_a_rank(signal.SIGKILL), then="restarts", code=EXIT_CRASH, needs_save=True),
    "hang": Fault(act=_to_a_rank(signal.SIGSTOP), then="restarts", code=EXIT_CRASH),
    "pause": Fault(act=_to_a_rank(signal.SIGSTOP), then="goes on", code=None, undo=_continue_ranks, lasts_s=0.5),
    "term": Fault(act=_to_supervisor(signal.SIGTERM), then="ends", code=EXIT_STOPPED),
    "hup": Fault(act=_to_supervisor(signal.SIGHUP), then="ends", code=EXIT_STOPPED),
    "int": Fault(act=_to_supervisor(signal.SIGINT), then="ends", code=EXIT_STOPPED),
    "term-rank": Fault(act=_to_a_rank(signal.SIGTERM), then="ends", code=EXIT_STOPPED),
    "usr2": Fault(act=_signal_all_processes, then="ends", code=EXIT_STOPPED),
    "stop-file": Fault(act=_request_stop, then="ends", code=EXIT_STOPPED),
    "supervisor": Fault(act=_to_supervisor(signal.SIGKILL), then="ends", code=_KILLED),
    "lease": Fault(act=steal_lease, then="ends", code=EXIT_USER_ERROR, undo=return_lease),
    "power": Fault(act=_power, then="ends", code=_KILLED, needs_save=True),
    "metrics": Fault(act=tear_metrics, then="ends", code=_KILLED),
    "ledger": Fault(act=tear_ledger, then="ends", code=_KILLED),
    "torn": Fault(act=cut_file, then="ends", code=_KILLED, bad_checkpoint=True),
    "flip": Fault(act=flip_byte, then="ends", code=_KILLED, bad_checkpoint=True),
    "missing": Fault(act=delete_part, then="ends", code=_KILLED, bad_checkpoint=True),
    "disk": Fault(act=fill_disk, then="goes on", code=None, undo=free_disk, lasts_s=1.5),
}
