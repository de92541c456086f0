"""Inflict the faults of a drill on a run, with one function for each kind of fault.

Guarantee: only processes and files of that run are touched. A process belongs to the run if it is the supervisor that
the drill started, or if its environment has the variable that a supervisor sets for all processes that it starts,
with a value that names exactly this run folder (run/marked_processes.py).
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

from electra_dist.checkpoint.checkpoint_manifest import committed
from electra_dist.config import CHECKPOINTS_DIR
from electra_dist.errors import EXIT_CRASH, EXIT_STOPPED, EXIT_USER_ERROR, UserError
from electra_dist.run.marked_processes import mark_of, marked_pids
from electra_dist.store.local_store import LocalStore

FILLER = "chaos-filler"  # the file with which the fault `disk` fills the checkpoint folder


@dataclass(frozen=True, kw_only=True)
class Victim:
    """The run that a fault hits: its folder, and its processes on this machine, which are looked up at each call."""

    run_dir: Path
    supervisor: int | None  # pid of the supervisor; None if it has ended

    @property
    def checkpoints(self) -> Path:
        """The run's checkpoint folder; in a drill a run saves only there."""
        return self.run_dir / CHECKPOINTS_DIR

    def pids(self, words: str = "") -> list[int]:
        """Return the pids of the run's processes, without the supervisor.

        Args:
            words: text that the command line must contain, its arguments joined by spaces; empty selects all.
        """
        matching = []
        for pid in marked_pids(mark_of(self.run_dir, 0)):
            with contextlib.suppress(OSError):  # The process may have ended.
                arguments = Path(f"/proc/{pid}/cmdline").read_bytes()  # each ends with a zero byte
                command_line = arguments.replace(b"\0", b" ").decode(errors="replace")
                if words in command_line:
                    matching.append(pid)
        return matching

    def ranks(self) -> dict[int, int]:
        """Return a dict from rank to pid of the running ranks.

        A process is a rank if its command line contains the option --state. Its number is the value of its environment
        variable RANK.
        """
        pids = {}
        for pid in self.pids("--state"):
            with contextlib.suppress(OSError):  # The process may have ended.
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                for variable in variables:
                    if variable.startswith(b"RANK="):
                        pids[int(variable.removeprefix(b"RANK="))] = pid
        return pids


Act = Callable[[Victim, random.Random], str]  # (the run, source of random choices) -> what was hit, as text


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One kind of fault: what is done to the run, and how the run must react.

    `FAULTS` lists all kinds by their names on the command line.
    """

    act: Act  # inflicts the fault and returns what was hit, for the table
    then: Literal["goes on", "restarts", "ends"]  # what the run does: no restart, a restart by the supervisor, an end
    code: int | None  # exit code of the ranks (EXIT_CRASH, before a restart) or the supervisor; None: the run goes on
    bad_checkpoint: bool = False  # whether the next start must set a checkpoint aside
    needs_save: bool = False  # whether half of these faults should hit the run while it writes a checkpoint


def _send(pids: Iterable[int | None], number: int) -> None:
    """Send signal `number` to processes. None in place of a pid and processes that have ended are skipped."""
    for pid in pids:
        if pid is None:
            continue
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _to_a_rank(number: int) -> Act:
    """Return a function that sends signal `number` to one random rank of a run, as the action of a fault."""

    def act(victim: Victim, draw: random.Random) -> str:
        """Send the signal to one rank of the run, and return which rank it was."""
        ranks = victim.ranks()
        rank = draw.choice(sorted(ranks))
        _send([ranks[rank]], number)
        return f"rank {rank}"

    return act


def _kill_launcher(victim: Victim, draw: random.Random) -> str:
    """Kill the DeepSpeed process that has started the ranks; the ranks must go on without it.

    `draw` is not used, because there is only one such process (deepspeed.launcher.launch) on a node.
    """
    pids = victim.pids("deepspeed.launcher.launch")
    _send(pids, signal.SIGKILL)
    return "deepspeed.launcher.launch"


def _term_node(victim: Victim, draw: random.Random) -> str:
    """Send SIGTERM to the supervisor, as Slurm does at the end of a job; return what was hit.

    The ranks must then save a checkpoint and end with exit code 75. `draw` is not used.
    """
    _send([victim.supervisor], signal.SIGTERM)
    return "supervisor"


def _usr2_step(victim: Victim, draw: random.Random) -> str:
    """Send SIGUSR2 to all processes of the run, as `scancel --signal=USR2` does; return how many there were.

    The ranks must then save a checkpoint and end with exit code 75. `draw` is not used.
    """
    pids = [victim.supervisor, *victim.pids()]
    _send(pids, signal.SIGUSR2)
    return f"{len(pids)} processes"


def kill_everything(victim: Victim) -> int:
    """Send SIGKILL to the supervisor and then to all processes of the run, until none is left.

    It is repeated because a process may start a new one before it is killed.

    Returns:
        The largest number of processes seen at once, the supervisor included.
    """
    _send([victim.supervisor], signal.SIGKILL)
    most_pids = 0
    pids = victim.pids()
    while pids:
        most_pids = max(most_pids, len(pids))
        _send(pids, signal.SIGKILL)
        pids = victim.pids()
    return most_pids + 1


def _power(victim: Victim, draw: random.Random) -> str:
    """Kill all processes of the run at once, as a power loss does; return how many there were."""
    return f"{kill_everything(victim)} processes"


def _tear(victim: Victim, draw: random.Random) -> str:
    """Kill all processes of the run, and cut a file of the newest checkpoint to a random shorter size.

    A power loss may leave such a file, if its last bytes never reached the disk. The next start must notice it.
    """
    kill_everything(victim)
    file = _checkpoint_file(victim, draw)
    size = draw.randrange(file.stat().st_size)
    os.truncate(file, size)
    return f"{file.parent.name}/{file.name} cut to {size} bytes"


def _flip(victim: Victim, draw: random.Random) -> str:
    """Kill all processes of the run, and change one random byte of a file of the newest checkpoint.

    The next start must notice that the file is damaged.
    """
    kill_everything(victim)
    file = _checkpoint_file(victim, draw)
    data = bytearray(file.read_bytes())
    offset = draw.randrange(len(data))
    data[offset] ^= draw.randrange(1, 256)  # at least one bit changes
    file.write_bytes(data)
    return f"{file.parent.name}/{file.name} byte {offset}"


def _checkpoint_file(victim: Victim, draw: random.Random) -> Path:
    """Return a random file of the newest checkpoint that is completely written; empty files are not chosen."""
    newest_checkpoint = committed(LocalStore(victim.checkpoints))[-1]
    _step, _attempt, folder_name = newest_checkpoint
    folder = victim.checkpoints / folder_name
    files = sorted(file for file in folder.iterdir() if file.stat().st_size > 0)
    return draw.choice(files)


def _fill_disk(victim: Victim, draw: random.Random) -> str:
    """Fill the disk of the checkpoint folder to the last byte, with one file that `SmallDisk.free` deletes.

    A `SmallDisk` must be mounted there; without it, the machine's own disk is filled. The return value names the bytes
    written. `draw` is not used.
    """
    num_written = 0
    with (victim.checkpoints / FILLER).open("wb", buffering=0) as file:
        # Large blocks fill most of the disk quickly; smaller ones and single bytes fill what is left.
        for block_size in (1 << 20, 1 << 12, 1):
            with contextlib.suppress(OSError):  # the disk has no room for another block
                while True:
                    num_written += file.write(bytes(block_size))
    return f"{num_written:,} bytes"


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
    """Small file system in memory, mounted at a run's checkpoint folder, for the fault `disk` to fill.

    Mounting needs root. Call `close` at the end.
    """

    def __init__(self, folder: Path, size_bytes: int) -> None:
        """Create the folder and mount a tmpfs of `size_bytes` there.

        Args:
            folder: the checkpoint folder, which must not exist.
            size_bytes: size of the file system; it must be enough for all checkpoints that the run keeps at a time.

        Raises:
            UserError: this user may not mount file systems.
        """
        self._folder = folder
        folder.mkdir(parents=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "chaos", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise UserError(
                f"fault `disk` cannot mount its file system at {folder} ({done.stderr.strip()}); run as root, or "
                f"leave out `disk` in --faults"
            )

    def free(self) -> None:
        """Delete the file with which the fault `disk` filled the file system, so that the run can save again."""
        (self._folder / FILLER).unlink(missing_ok=True)

    def close(self) -> None:
        """Unmount the file system, and keep its files: they are copied to the machine's disk, into the same folder."""
        self.free()
        copy = self._folder.with_name(f"{self._folder.name}-copy")
        shutil.copytree(self._folder, copy)
        subprocess.run(["umount", str(self._folder)], check=True)
        self._folder.rmdir()
        copy.rename(self._folder)
