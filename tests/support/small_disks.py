"""Small disks that tests fill, free and make read-only under the folders of a real run, and the watch over it."""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from support.real_runs import REPOSITORY, free_port

BALLAST = "ballast"


def can_mount() -> bool:
    """Return whether this process may mount a file system: it is root, and no container forbids it."""
    if os.geteuid() != 0:
        return False
    probe = "d=$(mktemp -d); mount -t tmpfs tmpfs $d && umount $d; e=$?; rmdir $d; exit $e"
    return subprocess.run(probe, shell=True, capture_output=True).returncode == 0


def folder_in_memory() -> Path | None:
    """Return a folder in memory with 2 GB of room, or None, which is the default folder for temporary files.

    SIGKILL loses nothing that the kernel holds, so the kind of the disk changes no result; writing to it takes time.
    """
    folder = Path("/dev/shm")
    if folder.is_dir() and os.access(folder, os.W_OK) and shutil.disk_usage(folder).free > 2e9:
        return folder
    return None


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int = 4) -> Iterator[Path]:
    """Mount an empty tmpfs of so many MiB on a folder, which is created, and unmount it at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


@contextlib.contextmanager
def freezable_disk(folder: Path, megabytes: int = 16) -> Iterator[Path]:
    """Mount an empty ext4 file system at a folder during a `with` block; mounting needs root.

    After `fsfreeze --freeze FOLDER`, every write to it blocks until `fsfreeze --unfreeze FOLDER`, as on a network
    share whose server does not answer. Unfreeze it before the block ends.

    Args:
        folder: the folder, which is created if it is missing; the image of the file system is written beside it.
        megabytes: size of the file system in MiB.
    """
    folder.mkdir(parents=True, exist_ok=True)
    image = folder.with_name(f"{folder.name}.ext4")
    with image.open("wb") as file:
        file.truncate(megabytes << 20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def fill_command(disk: Path) -> str:
    """Return the shell command that fills a disk to its last byte."""
    return f"cat /dev/zero > {shlex.quote(str(disk / BALLAST))} 2>/dev/null; true"


def free(disk: Path) -> None:
    """Free what `fill_command` has filled."""
    (disk / BALLAST).unlink()


def remount_command(disk: Path, option: str) -> str:
    """Return the shell command that makes a disk read-only ("ro") or writable ("rw")."""
    return f"mount -o remount,{option} {shlex.quote(str(disk))}"


def storage_event(run_dir: Path) -> dict | None:
    """Return the last event of a run's ledger if it is `storage`, otherwise None."""
    lines = (run_dir / "ledger.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    return last if last["event"] == "storage" else None


@dataclass
class Watched:
    """End of a watched run: its exit code, its output, and what `electra-dist status` said while it waited."""

    code: int
    output: str
    status: list[str] = field(default_factory=list)  # lines about storage, each text once

    @property
    def errors(self) -> list[str]:
        """The lines of the output that begin with "error: "."""
        return [line for line in self.output.splitlines() if line.startswith("error: ")]


FAULTY_PRETRAIN = str(REPOSITORY / "tests" / "train" / "faulty_pretrain.py")


class ForkedRun:
    """Run of one rank in a fork of this process, which has imported what takes seconds to import.

    The process must not have used torch's threads before. The methods are those of `subprocess.Popen`.
    """

    def __init__(self, arguments: list[str], out: int, environment: dict[str, str]) -> None:
        """Fork, and run faulty_pretrain.py with the arguments; its output goes to the file descriptor `out`."""
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.dup2(out, 1)
                os.dup2(out, 2)
                os.environ.update(environment)
                sys.argv = [FAULTY_PRETRAIN, *arguments]
                runpy.run_path(FAULTY_PRETRAIN, run_name="__main__")
                code = 0
            except SystemExit as end:
                code = int(end.code or 0)
            except BaseException:  # noqa: BLE001  (a fork must not return into the drill)
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)

    def poll(self) -> int | None:
        """Return the exit code of the run, or None while it goes on."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def kill(self) -> None:
        """Kill the run."""
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        """Wait for the end of the run."""
        while self.poll() is None:
            time.sleep(0.05)


def start(
    config: Path, ranks: int, out: int, environment: dict[str, str], overrides: Sequence[str]
) -> ForkedRun | subprocess.Popen[bytes]:
    """Start a run with the faults of faulty_pretrain.py: one rank in a fork, several by `deepspeed`."""
    arguments = ["--config", str(config), *(part for override in overrides for part in ("--set", override))]
    if ranks == 1:
        return ForkedRun(arguments, out, environment)
    deepspeed = str(Path(sys.executable).parent / "deepspeed")
    command = [deepspeed, "--num_gpus", str(ranks), "--master_port", str(free_port()), FAULTY_PRETRAIN, *arguments]
    return subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **environment})


def watch(
    config: Path,
    run_dir: Path,
    faults: dict[str, object],
    *,
    ranks: int = 1,
    away_s: float = 0.0,
    cure: Callable[[], None] | None = None,
    env: dict[str, str] | None = None,
    overrides: Sequence[str] = (),
    timeout_s: float = 300.0,
) -> Watched:
    """Run with faults to the end; apply the cure once the run has waited for storage for `away_s` seconds.

    Args:
        config: config of the run.
        run_dir: its run folder.
        faults: as of tests/train/faulty_pretrain.py.
        ranks: number of ranks.
        away_s: seconds from the first line about a wait for storage until the cure.
        cure: makes space, or brings the storage back; None: nobody does.
        env: variables to add to the environment.
        overrides: of the config, as KEY=VALUE.
        timeout_s: after which the run is killed and the test fails.
    """
    log = run_dir.parent / f"{run_dir.name}.out"
    environment = {"FAULTS": json.dumps(faults), **(env or {})}
    status: list[str] = []
    with log.open("wb") as out:
        process = start(config, ranks, out.fileno(), environment, overrides)
        deadline = time.monotonic() + timeout_s
        waits_since: float | None = None
        while process.poll() is None:
            if time.monotonic() > deadline:
                process.kill()
                process.wait()
                raise AssertionError(f"the run did not end within {timeout_s} s:\n{log.read_text()[-3000:]}")
            lines = _storage_lines(run_dir)
            status += [line for line in lines if line not in status]
            if waits_since is None and (lines or "waiting up to" in log.read_text(errors="replace")):
                waits_since = time.monotonic()
            if cure is not None and waits_since is not None and time.monotonic() >= waits_since + away_s:
                cure()
                cure = None
            time.sleep(0.2)
    assert process.returncode is not None
    return Watched(code=process.returncode, output=log.read_text(errors="replace"), status=status)


def _storage_lines(run_dir: Path) -> list[str]:
    """Return the lines about storage of `electra-dist status`, without the seconds; none before the run has begun."""
    from electra_launcher.cli.run_facts import gather, waits_for_storage

    with contextlib.suppress(Exception):  # a file is being written, or there is no run yet
        seen = gather(run_dir)
        waits = waits_for_storage(seen.run, seen.disk_problem, seen.beats, seen.now)
        return [f"{'the run folder' if wait['rank'] is None else wait['rank']}: {wait['reason']}" for wait in waits]
    return []
