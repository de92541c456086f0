"""Ends real runs in every way in which a machine without a GPU can, and asks `electra-dist why` for the reason.

    python tests/drills/reasons.py [--only WORD ...]

Each case is a supervised run of two ranks. In one of its steps rank 1 executes a few lines of Python, either in every
start, as a mistake in the code does, or in the first start only. The drill compares the class that `why` names, what
follows from it and the exit code of the supervisor with what is expected, prints them, and exits with 1 if a verdict
is bad. It needs root, for small disks, a quota of btrfs and a memory limit of the kernel (cgroup version 1).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from drill import Drill, chosen, command, judge, options
from support.small_disks import can_mount, disk_with_quota, fill_command, small_disk
from support.supervised_runs import supervised

STEP = 7  # it lies between the saves after steps 5 and 10
FAULT = "FAULT"  # environment variable: the lines of Python
ONCE = "FAULT_ONCE"  # environment variable: file that the first start creates, if the fault is in the first start only
MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")
MEMORY_LIMIT = 3 << 30


class Case(NamedTuple):
    """A way in which a run ends, and what must follow."""

    name: str
    fault: str
    error: str | None  # class that `why` names; None if the end is no failure
    code: int  # of the supervisor
    starts: int
    is_once: bool = False
    has_memory_limit: bool = False
    disk: Callable[[Path, int], AbstractContextManager[Path]] | None = None
    disk_name: str = "checkpoints"  # of the folder in the run's that is on the disk
    overrides: tuple[str, ...] = ()


EXHAUST = f"held = bytearray({2 * MEMORY_LIMIT}); [held.__setitem__(place, 1) for place in range(0, len(held), 4096)]"
FILL = "subprocess.run(os.environ['FILL'], shell=True, check=True)"
WRITE = "open(os.environ['DISK'] + '/notes.txt', 'wb').write(bytes(8 << 20))"
PATIENCE = ("cluster.storage_patience_s=4",)
CASES = (
    Case("exception in every start", "raise ValueError('row 3 has the label 7')", "exception", 78, 2),
    Case("exception in one start", "raise ValueError('row 3 has the label 7')", None, 0, 2, is_once=True),
    Case("module that is missing", "import a_module_that_nobody_has", "import", 78, 2),
    Case("segmentation fault", "import ctypes; ctypes.string_at(0)", "native-crash", 78, 2),
    Case("killed from outside", "os.kill(os.getpid(), 9)", None, 0, 2, is_once=True),
    Case("stopped by SIGTERM", "os.kill(os.getpid(), 15)", None, 75, 1),
    Case("memory limit of the kernel", EXHAUST, "host-out-of-memory", 78, 2, has_memory_limit=True),
    Case(
        "checkpoints full for too long",
        FILL,
        "storage-away",
        75,
        1,
        disk=small_disk,
        overrides=PATIENCE,
    ),
    Case(
        "quota of the checkpoints used up for too long",
        FILL,
        "disk-quota",
        75,
        1,
        disk=disk_with_quota,
        overrides=PATIENCE,
    ),
    Case("quota used up in user code", WRITE, "disk-quota", 1, 4, disk=disk_with_quota, disk_name="notes"),
)


def train_with_fault() -> int:
    """Be a rank of a case: train, and execute the fault while rank 1 computes `STEP`."""
    from electra_launcher.supervise.rank_main import main

    from electra_dist.objectives.base import StepInput, StepOutput
    from electra_dist.objectives.rtd import ReplacedTokenDetection

    forward = ReplacedTokenDetection.forward

    def faulty(self: Any, step_input: StepInput) -> StepOutput:
        is_due = self.training and step_input.step == STEP and os.environ["RANK"] == "1"
        once = os.environ.get(ONCE)
        if is_due and not (once and Path(once).exists()):
            if once:
                Path(once).touch()
            exec(os.environ[FAULT], {"os": os, "subprocess": subprocess})
        return forward(self, step_input)

    ReplacedTokenDetection.forward = faulty  # type: ignore[method-assign]
    return main()


def supervise() -> int:
    """Be the supervisor of a case, whose ranks are this program."""
    from electra_launcher.supervise import __main__ as supervise_command
    from electra_launcher.supervise import rank_processes

    rank_processes.RANK_PROGRAM = (__file__, "train")
    return supervise_command.main()


@contextlib.contextmanager
def memory_limit(folder_name: str) -> Iterator[str]:
    """Make a group of processes with `MEMORY_LIMIT` bytes; yield the shell command that puts the shell into it."""
    group = MEMORY_GROUPS / folder_name
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(MEMORY_LIMIT))
        yield f"echo $$ > {group}/tasks"
    finally:
        group.rmdir()


def end_run(drill: Drill, case: Case) -> tuple[bool, str]:
    """Make the run of a case and return whether it ended as expected, and what `why` said."""
    run = drill.new_run(case.name)
    run.folder.mkdir()
    with contextlib.ExitStack() as stack:
        environment = {FAULT: case.fault}
        if case.is_once:
            environment[ONCE] = str(run.folder.with_suffix(".once"))
        if case.disk is not None:
            disk = stack.enter_context(case.disk(run.folder / case.disk_name, 6))
            environment |= {"DISK": str(disk), "FILL": fill_command(disk)}
        supervisor = [sys.executable, __file__, "supervise"]
        if case.has_memory_limit:
            enter_group = stack.enter_context(memory_limit(f"electra-dist-{os.getpid()}"))
            supervisor = ["bash", "-c", f'{enter_group} && exec "$@"', "bash", *supervisor]
        overrides = [word for override in case.overrides for word in ("--set", override)]
        os.environ.update(environment)
        try:
            started = supervised(supervisor, run.config, run.folder, "--gpus-per-node", "2", *overrides)
            with started as supervised_run:
                code = supervised_run.end(600)
                starts = supervised_run.starts()
                story = supervised_run.story()
        finally:
            for name in environment:
                del os.environ[name]
        told = subprocess.run(command("electra-dist", "why", run.folder), capture_output=True, text=True, check=True)
        tree = json.loads(subprocess.check_output(command("electra-dist", "why", run.folder, "--json")))
        status = subprocess.run(command("electra-dist", "status", run.folder), capture_output=True, text=True)
    print(told.stdout + status.stdout, flush=True)
    is_good = (tree["class"], code, starts) == (case.error, case.code, case.starts)
    if not is_good:
        print(story, flush=True)
    return is_good, f"exit {code}, starts {starts}, class {tree['class']}: {tree['what'] or tree['state']}"


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="names or words of cases")
    arguments = parser.parse_args()
    if not can_mount() or not MEMORY_GROUPS.is_dir() or shutil.which("mkfs.btrfs") is None:
        parser.error(
            "this drill mounts disks and limits memory by cgroup version 1; install btrfs-progs, and run it as root "
            "on such a machine"
        )
    by_name = {case.name: case for case in CASES}
    names = chosen(parser, "--only", arguments.only, by_name)
    with tempfile.TemporaryDirectory(prefix="electra-reasons-") as folder:
        drill = Drill(Path(folder), [64] * 6)
        return judge(
            "reasons of ended runs", {name: lambda case=by_name[name]: end_run(drill, case) for name in names}
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        del sys.argv[1]
        sys.exit(train_with_fault())
    if sys.argv[1:2] == ["supervise"]:
        del sys.argv[1]
        sys.exit(supervise())
    sys.exit(main())
