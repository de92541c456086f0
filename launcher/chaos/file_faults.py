"""Faults of a drill that damage files of a run: checkpoints, records, the lease, and the disk below them."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
from pathlib import Path

from electra_dist.checkpoint.checkpoint_manifest import MANIFEST, committed
from electra_dist.errors import UserError
from electra_dist.run.folder import LEASE_DIR, LEDGER_FILE, METRICS_FILE
from electra_dist.run.lease import lease_file
from electra_dist.store.local_store import LocalStore
from launcher.chaos.victim import Act, Victim, kill_everything

FILLER = "chaos-filler"  # the file with which the fault `disk` fills a disk


def cut_file(victim: Victim, draw: random.Random) -> str:
    """Kill all processes of the run, and cut a file of the newest checkpoint to a random shorter size.

    A power loss may leave such a file, if its last bytes never reached the disk. The next start must notice it.
    """
    kill_everything(victim)
    file = random_checkpoint_file(victim, draw)
    size = draw.randrange(file.stat().st_size)
    os.truncate(file, size)
    return f"{file.parent.name}/{file.name} cut to {size} bytes"


def flip_byte(victim: Victim, draw: random.Random) -> str:
    """Kill all processes of the run, and change one random byte of a file of the newest checkpoint.

    The next start must notice that the file is damaged.
    """
    kill_everything(victim)
    file = random_checkpoint_file(victim, draw)
    data = bytearray(file.read_bytes())
    offset = draw.randrange(len(data))
    data[offset] ^= draw.randrange(1, 256)  # at least one bit changes
    file.write_bytes(data)
    return f"{file.parent.name}/{file.name} byte {offset}"


def delete_part(victim: Victim, draw: random.Random) -> str:
    """Kill all processes of the run, and delete a tensor file of the newest checkpoint.

    A file system that lost a directory entry leaves such a checkpoint. The next start must notice that it is damaged.
    """
    kill_everything(victim)
    file = random_checkpoint_file(victim, draw, with_manifest=False)
    file.unlink()
    return f"{file.parent.name}/{file.name} deleted"


def tear_tail(name: str) -> Act:
    """Return the action of a fault that kills all processes of the run, and leaves half a line at the end of a file.

    A power loss in the middle of an append leaves that. The next start must drop the half line and nothing else.

    Args:
        name: name of a file of JSON lines in the run folder, METRICS_FILE or LEDGER_FILE.
    """

    def act(victim: Victim, draw: random.Random) -> str:
        """Append the beginning of the file's last line to it, and return how many bytes."""
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
    """Take the lease of the run folder for this process, as another start of the run would; return its number.

    The run must end without another save. `return_lease` ends the fault. `draw` is not used.

    Raises:
        OSError: the lease folder cannot be read.
        StoreError: the lease folder cannot be written.
    """
    folder = victim.run_dir / LEASE_DIR
    created = None
    while created is None:
        number = lease_file.find_newest(folder).number + 1
        created = lease_file.create(folder, number, "supervisor")
    _, lock = created
    os.close(lock)
    return f"lease {number}"


def return_lease(victim: Victim) -> None:
    """Release the lease that `steal_lease` has taken, so that the next start of the run can take it at once."""
    lease_file.release(lease_file.find_newest(victim.run_dir / LEASE_DIR).path)


def random_checkpoint_file(victim: Victim, draw: random.Random, with_manifest: bool = True) -> Path:
    """Return a random file of the newest checkpoint that is completely written; empty files are not chosen.

    Args:
        victim: the run.
        draw: source of the choice.
        with_manifest: whether the manifest may be chosen, without which there is no checkpoint.
    """
    newest_checkpoint = committed(LocalStore(victim.checkpoints))[-1]
    _step, _attempt, folder_name = newest_checkpoint
    folder = victim.checkpoints / folder_name
    files = [file for file in folder.iterdir() if file.stat().st_size > 0]
    if not with_manifest:
        files = [file for file in files if file.name != MANIFEST]
    return draw.choice(sorted(files))


def fill_disk(victim: Victim, draw: random.Random) -> str:
    """Fill a disk of the run to the last byte, with one file that `free_disk` deletes; return the bytes written.

    A small file system must be mounted there (`SmallDisk`); without it, the machine's own disk is filled. A write that
    meets the full disk is repeated until it succeeds, so the run waits and goes on. `draw` is not used.
    """
    num_written = 0
    with (victim.filled_folder / FILLER).open("wb", buffering=0) as file:
        # Large blocks fill most of the disk quickly; smaller ones and single bytes fill what is left.
        for block_size in (1 << 20, 1 << 12, 1):
            with contextlib.suppress(OSError):  # the disk has no room for another block
                while True:
                    num_written += file.write(bytes(block_size))
    return f"{num_written:,} bytes"


def free_disk(victim: Victim) -> None:
    """Delete the file with which `fill_disk` has filled a disk of the run, so that it can save again."""
    (victim.filled_folder / FILLER).unlink(missing_ok=True)


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
