"""Find the processes of the run that a drill hits, and send signals to them.

Guarantee: only processes of that run are found. A process belongs to the run if it is the supervisor that the drill
started, or if its environment has the variable that a supervisor sets for all processes that it starts, with a value
that names exactly this run folder (run/processes.py).
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from electra_dist.config import CHECKPOINTS_DIR
from electra_dist.run.processes import mark_of, marked_pids


@dataclass(frozen=True, kw_only=True)
class Victim:
    """The run that a fault hits: its folder and its processes on this machine. Each call looks for the processes."""

    run_dir: Path
    supervisor: int | None  # pid of the supervisor; None if it has ended
    disk: Path | None = None  # folder on the disk that `fill_disk` fills; None: the checkpoint folder

    @property
    def checkpoints(self) -> Path:
        """Return the run's checkpoint folder. A run in a drill saves checkpoints nowhere else."""
        return self.run_dir / CHECKPOINTS_DIR

    @property
    def filled_folder(self) -> Path:
        """Return the folder whose disk is filled when the drill injects a full disk (`fill_disk`)."""
        return self.disk or self.checkpoints

    def pids(self) -> list[int]:
        """Return the pids of the running processes that the run's supervisor has started."""
        return marked_pids(mark_of(self.run_dir, 0))

    def ranks(self) -> dict[int, int]:
        """Return number -> pid for each rank that runs on this machine."""
        pids = {}
        for pid in self.pids():
            with contextlib.suppress(OSError):  # The process may have ended.
                process = Path(f"/proc/{pid}")
                # Only the command line of a rank contains this option; processes that it starts have its variables.
                if b"--state" not in (process / "cmdline").read_bytes():
                    continue
                for variable in (process / "environ").read_bytes().split(b"\0"):
                    if variable.startswith(b"RANK="):
                        pids[int(variable.removeprefix(b"RANK="))] = pid
        return pids


Act = Callable[[Victim, random.Random], str]  # inflicts a fault: (run, source of choices) -> text on what was hit
Undo = Callable[[Victim], None]  # ends a fault that lasts until it is undone


def send_signal(pids: Iterable[int | None], number: int) -> None:
    """Send signal `number` to each process in `pids`; skip None and processes that have ended."""
    for pid in pids:
        if pid is None:
            continue
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def kill_everything(victim: Victim) -> int:
    """Send SIGKILL to the supervisor and all other processes of the run until none is left.

    The processes are listed and killed repeatedly, because a process may start another one before it is killed.
    Returns roughly how many processes were killed.
    """
    send_signal([victim.supervisor], signal.SIGKILL)
    most_pids = 0
    pids = victim.pids()
    while pids:
        most_pids = max(most_pids, len(pids))
        send_signal(pids, signal.SIGKILL)
        pids = victim.pids()
    return most_pids + 1
