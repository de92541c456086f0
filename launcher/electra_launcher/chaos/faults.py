"""List all kinds of faults of a drill (`FAULTS`), find the run that a drill hits (`Victim`), and inflict them on it.

Guarantee: only processes and files of that run are touched, and the disk that `fill_disk` fills. A process belongs to
the run if it is the supervisor that the drill started, or if its environment has the variable that a supervisor sets
for all processes that it starts, with a value that names exactly this run folder (run/this_node.py).

How: a fault that damages a file first kills all processes of the run, so that no process repairs or replaces the file
before the next start of the run reads it.
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

from electra_dist.checkpoint.manifest import MANIFEST
from electra_dist.checkpoint.stored_copies import checkpoints
from electra_dist.config import CHECKPOINTS_DIR
from electra_dist.errors import EXIT_CRASH, EXIT_STOPPED, EXIT_USER_ERROR, UserError
from electra_dist.run import lease
from electra_dist.run.folder import LEASE_DIR, LEDGER_FILE, METRICS_FILE, STOP_FILE
from electra_dist.run.this_node import mark_of, marked_pids
from electra_dist.store.open_store import LocalStore

FILLER = "chaos-filler"  # the file with which `fill_disk` fills a disk
_KILLED = -signal.SIGKILL  # exit code that `subprocess` reports for a process that SIGKILL has ended


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
        """Return the folder whose disk `fill_disk` fills."""
        return self.disk or self.checkpoints

    def pids(self) -> list[int]:
        """Return the pids of the running processes that the run's supervisor has started."""
        return marked_pids(mark_of(self.run_dir, 0))

    def ranks(self) -> dict[int, int]:
        """Return number -> pid for each rank that runs on this machine."""
        pids = {}
        for pid in self.pids():
            process = Path(f"/proc/{pid}")
            try:
                command_line = (process / "cmdline").read_bytes()
                environment = (process / "environ").read_bytes()
            except OSError:  # The process has ended.
                continue
            # Only the command line of a rank contains this option; processes that it starts inherit its variables.
            if b"--state" not in command_line:
                continue
            for variable in environment.split(b"\0"):
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


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One kind of fault: what is done to the run, and how the run must react to pass the drill.

    If a fault has `undo`, it lasts until the drill calls `undo`: after the run has ended if `then` is "ends",
    otherwise `lasts_s` seconds after the call of `act`.
    """

    act: Act  # inflicts the fault and returns what was hit, for the table that the drill prints
    then: Literal["goes on", "restarts", "ends"]  # required: no restart, restart by the supervisor, end of the run
    code: int | None  # required exit code of the ranks ("restarts") or of the supervisor ("ends"); None: "goes on"
    bad_checkpoint: bool = False  # whether it damages a checkpoint, which the next start must set aside
    needs_save: bool = False  # whether half of these faults should hit the run while it writes a checkpoint
    undo: Undo | None = None  # ends a fault that lasts; None: the fault is over when `act` returns
    lasts_s: float = 0.0  # seconds between `act` and `undo`


def _to_a_rank(number: int) -> Act:
    """Return a fault's action that sends signal `number` to one random rank of the run."""

    def act(victim: Victim, draw: random.Random) -> str:
        ranks = victim.ranks()
        rank = draw.choice(sorted(ranks))
        send_signal([ranks[rank]], number)
        return f"rank {rank}"

    return act


def _to_supervisor(number: int) -> Act:
    """Return a fault's action that sends signal `number` to the supervisor of the run."""

    def act(victim: Victim, draw: random.Random) -> str:
        send_signal([victim.supervisor], number)
        return "supervisor"

    return act


def _continue_ranks(victim: Victim) -> None:
    """Continue the rank that SIGSTOP has stopped, by a SIGCONT to all ranks, which running ranks ignore."""
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


def cut_file(victim: Victim, draw: random.Random) -> str:
    """Kill the run, and cut a random file of the newest checkpoint to a random size, as a power loss may do."""
    kill_everything(victim)
    file = random_checkpoint_file(victim, draw)
    size = draw.randrange(file.stat().st_size)
    os.truncate(file, size)
    return f"{file.parent.name}/{file.name} cut to {size} bytes"


def flip_byte(victim: Victim, draw: random.Random) -> str:
    """Kill the run, and change one random byte of a random file of the newest checkpoint."""
    kill_everything(victim)
    file = random_checkpoint_file(victim, draw)
    data = bytearray(file.read_bytes())
    offset = draw.randrange(len(data))
    data[offset] ^= draw.randrange(1, 256)  # at least one bit changes
    file.write_bytes(data)
    return f"{file.parent.name}/{file.name} byte {offset}"


def delete_part(victim: Victim, draw: random.Random) -> str:
    """Kill the run, and delete a random file of the newest checkpoint, but not its manifest (list of files)."""
    kill_everything(victim)
    file = random_checkpoint_file(victim, draw, with_manifest=False)
    file.unlink()
    return f"{file.parent.name}/{file.name} deleted"


def tear_tail(name: str) -> Act:
    """Return a fault's action that kills the run and appends an unfinished line to the file `name` of its folder.

    A power loss in the middle of a write leaves such a line. The next start of the run must remove that line and
    nothing else. The file must hold at least one line of JSON.
    """

    def act(victim: Victim, draw: random.Random) -> str:
        kill_everything(victim)
        file = victim.run_dir / name
        last_line = file.read_bytes().rstrip(b"\n").rpartition(b"\n")[2]
        size = draw.randrange(1, len(last_line))
        with file.open("ab") as out:
            out.write(last_line[:size])
        return f"{name} with {size} bytes of a line at its end"

    return act


tear_metrics = tear_tail(METRICS_FILE)
tear_ledger = tear_tail(LEDGER_FILE)


def steal_lease(victim: Victim, draw: random.Random) -> str:
    """Take the lease (exclusive right to write to the run folder) away from the run, until `return_lease` is called.

    The run must then end without another save, as if someone had started the run a second time.
    """
    folder = victim.run_dir / LEASE_DIR
    created = None
    while created is None:  # `create` returns None if another process has taken this number first.
        number = lease.find_newest(folder).number + 1
        created = lease.create(folder, number, "supervisor")
    _, lock = created
    os.close(lock)
    return f"lease {number}"


def return_lease(victim: Victim) -> None:
    """Release the lease that `steal_lease` took, so that the next start of the run need not wait until it expires.

    Call it when the run has ended. The newest lease of the folder, which it releases, is then the stolen one.
    """
    lease.release(lease.find_newest(victim.run_dir / LEASE_DIR).path)


def random_checkpoint_file(victim: Victim, draw: random.Random, with_manifest: bool = True) -> Path:
    """Return a random file of the newest complete checkpoint; never the manifest if `with_manifest` is False.

    A checkpoint is complete once it has a manifest (list of its files); the run ignores folders without one. Raises
    IndexError if there is no complete checkpoint.
    """
    folder = victim.checkpoints / checkpoints([LocalStore(victim.checkpoints)])[0].folder
    files = sorted(folder.glob("*.safetensors"))
    if with_manifest:
        files.append(folder / MANIFEST)
    return draw.choice(files)


def fill_disk(victim: Victim, draw: random.Random) -> str:
    """Fill the disk of `victim.filled_folder` to the last byte with one file, which `free_disk` deletes.

    Mount a small file system at that folder first (`SmallDisk`); otherwise the machine's own disk is filled. The run
    must repeat a save that fails on the full disk until it succeeds, and then continue.
    """
    num_written = 0
    with (victim.filled_folder / FILLER).open("wb", buffering=0) as file:
        # Large blocks fill most of the disk quickly; smaller ones and single bytes fill what is left.
        for block_size in (1 << 20, 1 << 12, 1):
            with contextlib.suppress(OSError):  # such as ENOSPC: the disk has no room for another block of this size
                while True:
                    num_written += file.write(bytes(block_size))
    return f"{num_written:,} bytes"


def free_disk(victim: Victim) -> None:
    """Delete the file with which `fill_disk` has filled a disk, if there is one, so that the run can save again."""
    (victim.filled_folder / FILLER).unlink(missing_ok=True)


class SmallDisk:
    """Small file system in memory, mounted at a run's checkpoint folder, so that `fill_disk` fills no real disk.

    Mounting needs root. Call `close` at the end.
    """

    def __init__(self, folder: Path, size_bytes: int) -> None:
        """Create `folder`, which must not exist yet, and mount a tmpfs of `size_bytes` there."""
        self._folder = folder
        folder.mkdir(parents=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "chaos", str(folder)]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
        if done.returncode:
            raise UserError(
                f"fault `disk` cannot mount its file system at {folder} ({done.stderr.strip()}); run as root, or "
                f"leave out `disk` in --faults"
            )

    def close(self) -> None:
        """Unmount the file system; its files, except that of `fill_disk`, move to the same folder on the real disk."""
        (self._folder / FILLER).unlink(missing_ok=True)
        copy = self._folder.with_name(f"{self._folder.name}-copy")
        shutil.copytree(self._folder, copy)
        subprocess.run(["umount", str(self._folder)], check=True)
        self._folder.rmdir()
        copy.rename(self._folder)


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
