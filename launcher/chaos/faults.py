"""What chaos can do to a run, one function a fault. They touch the processes and files of that run and nothing else.

A process belongs to the run if it carries the supervisor's mark of exactly this run folder in its environment
(run/processes.py), or is the supervisor that the drill itself started.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from electra_dist.checkpoint.manifest import committed
from electra_dist.config import CHECKPOINTS_DIR
from electra_dist.errors import EXIT_CRASH, EXIT_STOPPED, EXIT_USER_ERROR, UserError
from electra_dist.run.processes import mark_of, marked_pids
from electra_dist.store.local import LocalStore

FILLER = "chaos-filler"


@dataclass(frozen=True, kw_only=True)
class Victim:
    """The run that is hit, on this machine."""

    run_dir: Path
    supervisor: int | None  # pid, while it runs

    @property
    def checkpoints(self) -> Path:
        """Where the drill has the run save."""
        return self.run_dir / CHECKPOINTS_DIR

    def pids(self, words: str = "") -> list[int]:
        """Processes of the run, but for the supervisor, whose command line has `words`."""
        found = []
        for pid in marked_pids(mark_of(self.run_dir, 0)):
            with contextlib.suppress(OSError):
                if words in Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"):
                    found.append(pid)
        return found

    def ranks(self) -> dict[int, int]:
        """Rank -> pid."""
        found = {}
        for pid in self.pids("--state"):
            with contextlib.suppress(OSError):
                environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                found.update({int(entry[5:]): pid for entry in environ if entry.startswith(b"RANK=")})
        return found


Act = Callable[[Victim, random.Random], str]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One kind: what is done, and what must come of it."""

    act: Act  # returns what was hit, for the table
    then: Literal["goes on", "restarts", "ends"]
    code: int | None  # of the start (EXIT_CRASH: the supervisor starts again) or of the supervisor; None: it goes on
    bad_checkpoint: bool = False  # the next start must set one aside
    needs_save: bool = False  # more telling while a checkpoint is being written


def _send(pids: Iterable[int | None], number: int) -> None:
    for pid in filter(None, pids):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _to_a_rank(number: int) -> Act:
    def act(victim: Victim, draw: random.Random) -> str:
        ranks = victim.ranks()
        rank = draw.choice(sorted(ranks))
        _send([ranks[rank]], number)
        return f"rank {rank}"

    return act


def _kill_launcher(victim: Victim, draw: random.Random) -> str:
    pids = victim.pids("deepspeed.launcher.launch")
    _send(pids, signal.SIGKILL)
    return "deepspeed.launcher.launch"


def _term_node(victim: Victim, draw: random.Random) -> str:
    _send([victim.supervisor], signal.SIGTERM)
    return "supervisor"


def _usr2_step(victim: Victim, draw: random.Random) -> str:
    pids = [victim.supervisor, *victim.pids()]
    _send(pids, signal.SIGUSR2)
    return f"{len(pids)} processes"


def kill_everything(victim: Victim) -> int:
    """kill -9, the supervisor first, again for what was just being born; returns how many there were."""
    _send([victim.supervisor], signal.SIGKILL)
    killed = 1
    while pids := victim.pids():
        _send(pids, signal.SIGKILL)
        killed = max(killed, len(pids) + 1)
    return killed


def _power(victim: Victim, draw: random.Random) -> str:
    return f"{kill_everything(victim)} processes"


def _tear(victim: Victim, draw: random.Random) -> str:
    kill_everything(victim)
    file = _checkpoint_file(victim, draw)
    size = draw.randrange(file.stat().st_size)
    os.truncate(file, size)
    return f"{file.parent.name}/{file.name} cut to {size} bytes"


def _flip(victim: Victim, draw: random.Random) -> str:
    kill_everything(victim)
    file = _checkpoint_file(victim, draw)
    data = bytearray(file.read_bytes())
    place = draw.randrange(len(data))
    data[place] ^= draw.randrange(1, 256)
    file.write_bytes(data)
    return f"{file.parent.name}/{file.name} byte {place}"


def _checkpoint_file(victim: Victim, draw: random.Random) -> Path:
    """A file of the newest committed checkpoint, each as likely as the other."""
    folder = victim.checkpoints / committed(LocalStore(victim.checkpoints))[-1][2]
    return draw.choice(sorted(file for file in folder.iterdir() if file.stat().st_size))


def _fill_disk(victim: Victim, draw: random.Random) -> str:
    """To the last byte; `SmallDisk.free` makes room again."""
    size = 0
    with (victim.checkpoints / FILLER).open("wb", buffering=0) as file:
        for length in (1 << 20, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while True:
                    size += file.write(bytes(length))
    return f"{size:,} bytes"


FAULTS: dict[str, Fault] = {
    "kill": Fault(act=_to_a_rank(signal.SIGKILL), then="restarts", code=EXIT_CRASH, needs_save=True),
    "hang": Fault(act=_to_a_rank(signal.SIGSTOP), then="restarts", code=EXIT_CRASH),
    "launcher": Fault(act=_kill_launcher, then="goes on", code=None),
    "term": Fault(act=_term_node, then="ends", code=EXIT_STOPPED),
    "term-rank": Fault(act=_to_a_rank(signal.SIGTERM), then="ends", code=EXIT_STOPPED),
    "usr2": Fault(act=_usr2_step, then="ends", code=EXIT_STOPPED),
    "power": Fault(act=_power, then="ends", code=-signal.SIGKILL, needs_save=True),
    "torn": Fault(act=_tear, then="ends", code=-signal.SIGKILL, bad_checkpoint=True),
    "flip": Fault(act=_flip, then="ends", code=-signal.SIGKILL, bad_checkpoint=True),
    "disk": Fault(act=_fill_disk, then="ends", code=EXIT_USER_ERROR),
}


class SmallDisk:
    """A file system of a few MB over a run's checkpoint folder, so that `disk` fills that and nothing else. Root's."""

    def __init__(self, folder: Path, size_bytes: int) -> None:
        """Mount it.

        Raises:
            UserError: this user may not.
        """
        self._folder = folder
        folder.mkdir(parents=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "chaos", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise UserError(f"fault `disk` needs a small file system; {done.stderr.strip()}; leave `disk` out")

    def free(self) -> None:
        """Make room again."""
        (self._folder / FILLER).unlink(missing_ok=True)

    def close(self) -> None:
        """Unmount; what was in it stays in the folder."""
        self.free()
        copy = self._folder.with_name(f"{self._folder.name}-copy")
        shutil.copytree(self._folder, copy)
        subprocess.run(["umount", str(self._folder)], check=True)
        self._folder.rmdir()
        copy.rename(self._folder)
