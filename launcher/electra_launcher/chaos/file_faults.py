"""Inflict the faults of a drill that hit files: a checkpoint, the metrics, the ledger, the lease, and a full disk.

Guarantee: only files in the run's folder, and on the disk that `fill_disk` fills, are changed.

How: a fault that damages a file first kills all processes of the run, so that no process repairs or replaces the file
before the next start of the run reads it. Each function can be used as `Fault.act` or `Fault.undo` (faults.py). An
`act` returns what it hit, as text for the table that the drill prints.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
from pathlib import Path

from electra_dist.checkpoint.checkpoint import checkpoints
from electra_dist.checkpoint.manifest import MANIFEST
from electra_dist.errors import UserError
from electra_dist.run import lease
from electra_dist.run.folder import LEASE_DIR, LEDGER_FILE, METRICS_FILE
from electra_dist.store.local_store import LocalStore
from electra_launcher.chaos.victim import Act, Victim, kill_everything

FILLER = "chaos-filler"  # the file with which `fill_disk` fills a disk


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
    """Return a function that kills the run and appends an unfinished line to the file `name` in the run folder.

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
    """Return a random file of the newest complete checkpoint; it may be the manifest only if `with_manifest`.

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
    must repeat a save that fails on the full disk until the save succeeds, and go on.
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
