"""Fills disks and makes them read-only under real runs: every loss must be that of an undisturbed run.

    python tests/drills/full_disks.py [--only WORD ...]

A small tmpfs lies under each folder that a run writes to, in turn. While a step is computed it is filled to the last
byte or made read-only, and later freed. The drill needs root, to mount, and the extra test (moto) for the case with
S3; s3_ways.py takes S3 itself away. It prints a table and exits with 1 if a verdict is bad. --only runs the cases with
these names or, if none has, with these words in their names.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from drill import (
    Drill,
    Run,
    chosen,
    command,
    first_difference,
    judge,
    options,
    start_programs_quickly,
)
from electra_launcher.cli.run_facts import gather, waits_for_storage
from support.real_runs import REPOSITORY, free_port
from support.small_disks import can_mount, fill_command, free, remount_command, small_disk

from electra_dist.run.ledger import read_ledger

FAULTY_PRETRAIN = str(REPOSITORY / "tests" / "train" / "faulty_pretrain.py")
AWAY_S = 3.0
PATIENCE = "cluster.storage_patience_s=4"  # in the cases in which it runs out
PAUSE_S = 60.0  # of the next start, counted from the end of the one that lost its storage
STEP = 7  # while it is computed, storage goes away; it lies between two saves
LIMIT_S = 300.0
TENSORBOARD = {"log.tensorboard": True}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A disk that fails, and how the run must end."""

    name: str
    place: str  # the folder that the disk is mounted on, relative to the run folder
    fault: str = "full"  # or "read-only"
    at_start: bool = False  # whether it fails before the run begins, not in the middle
    lasts: str = "a while"  # or "too long", for the run's patience, or "for good", which the run must not mind
    ranks: int = 1
    megabytes: int = 6
    on_s3: bool = False  # whether corpus and checkpoints are on S3
    has_event: bool = True  # whether the ledger gets an event of a storage that was away too long
    targets: Sequence[str] = ()  # folders of the checkpoints, relative to the run folder, apart from its own
    settings: Mapping[str, object] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)  # "{disk}" stands for the disk


CASES = (
    Case(name="run folder, full", place="", settings=TENSORBOARD),
    Case(name="run folder, read-only at start", place="", fault="read-only", at_start=True),
    Case(name="run folder, full too long", place="", lasts="too long", has_event=False),  # it takes no event
    Case(name="checkpoints, full", place="checkpoints"),
    Case(name="checkpoints, read-only", place="checkpoints", fault="read-only"),
    Case(name="checkpoints, full too long", place="checkpoints", lasts="too long"),
    Case(name="2 ranks, checkpoints, full too long", place="checkpoints", lasts="too long", ranks=2),
    Case(name="first of two targets, too long", place="small", lasts="too long", targets=("small", "large")),
    Case(
        name="tensorboard, full for good",
        place="tensorboard",
        lasts="for good",
        megabytes=1,
        settings=TENSORBOARD,
    ),
    Case(
        name="tmp, full for good",
        place="tmp",
        at_start=True,
        lasts="for good",
        megabytes=1,
        environment={"TMPDIR": "{disk}"},
    ),
    Case(name="cache, full", place="cache", on_s3=True),
)


@dataclass
class Watched:
    """End of a watched run: its exit code, its output, and what `electra-dist status` said while it waited."""

    code: int
    output: str
    status: list[str]  # lines about storage, each text once

    @property
    def errors(self) -> list[str]:
        """The lines of the output that say in one sentence why the run ended."""
        return [line for line in self.output.splitlines() if line.startswith("error: ")]


def watch(
    run: Run,
    faults: Mapping[str, object],
    cure: Callable[[], object] | None = None,
    environment: Mapping[str, str] | None = None,
    overrides: Sequence[str] = (),
) -> Watched:
    """Run with faults to the end; apply the cure once the run has waited for storage for `AWAY_S` seconds.

    `faults` are those of tests/train/faulty_pretrain.py.
    """
    arguments = ["--config", str(run.config), *(part for override in overrides for part in ("--set", override))]
    program = [sys.executable, FAULTY_PRETRAIN]
    if run.ranks > 1:
        program = command("deepspeed", "--num_gpus", run.ranks, "--master_port", free_port(), FAULTY_PRETRAIN)
    variables = {**os.environ, "FAULTS": json.dumps(faults), **(environment or {})}
    status: list[str] = []
    with run.output.open("wb") as out:
        process = subprocess.Popen([*program, *arguments], stdout=out, stderr=out, env=variables)
        deadline = time.monotonic() + LIMIT_S
        waits_since: float | None = None
        while process.poll() is None:
            if time.monotonic() > deadline:
                process.kill()
                raise AssertionError(f"the run did not end within {LIMIT_S} s:\n{run.output.read_text()[-3000:]}")
            lines = storage_lines(run.folder)
            status += [line for line in lines if line not in status]
            if waits_since is None and (lines or "waiting up to" in run.output.read_text(errors="replace")):
                waits_since = time.monotonic()
            if cure is not None and waits_since is not None and time.monotonic() >= waits_since + AWAY_S:
                cure()
                cure = None
            time.sleep(0.2)
    return Watched(process.returncode, run.output.read_text(errors="replace"), status)


def storage_lines(run_dir: Path) -> list[str]:
    """Return the lines about storage of `electra-dist status`, without the seconds; none before the run has begun."""
    with contextlib.suppress(Exception):  # a file is being written, or there is no run yet
        seen = gather(run_dir)
        waits = waits_for_storage(seen.run, seen.disk_problem, seen.beats, seen.now)
        return [f"{'the run folder' if wait['rank'] is None else wait['rank']}: {wait['reason']}" for wait in waits]
    return []


def run_case(drill: Drill, case: Case) -> tuple[bool, str]:
    """Make the run of a case and, if it lost its storage, the next start; return the verdict on both."""
    expected = drill.twin(case.ranks).steps()
    with contextlib.ExitStack() as stack:
        folder = drill.new_run(case.name).folder
        settings = dict(case.settings)
        if case.targets:
            settings["checkpoint.targets"] = [str(folder / target) for target in case.targets]
        if case.on_s3:
            endpoint_url, bucket = stack.enter_context(drill.on_s3("moto"))
            settings |= drill.s3_settings(bucket, endpoint_url, "checkpoints")
        run = drill.new_run(case.name, case.ranks, **settings)
        disk = stack.enter_context(small_disk(run.folder / case.place, case.megabytes))
        return judged_case(case, run, disk, expected)


def judged_case(case: Case, run: Run, disk: Path, expected: list[tuple]) -> tuple[bool, str]:
    """Make the run of a case on its disk, which is mounted, and judge it by the steps of the undisturbed run."""
    hurt, cure = fill_command(disk), functools.partial(free, disk)
    if case.fault == "read-only":
        hurt, cure = remount_command(disk, "ro"), functools.partial(os.system, remount_command(disk, "rw"))
    if case.at_start:
        os.system(hurt)
    end = watch(
        run,
        {} if case.at_start else {"shell_at": [[hurt, STEP]]},
        cure if case.lasts == "a while" else None,
        {name: value.format(disk=disk) for name, value in case.environment.items()},
        [PATIENCE] if case.lasts == "too long" else [],
    )
    good, detail = judged_end(run, end, expected, 75 if case.lasts == "too long" else 0)
    num_warnings = end.output.count("TensorBoard gets no more records")
    if case.place == "tensorboard":
        good = good and num_warnings == 1
        detail += f"; {num_warnings} line"
    if case.lasts != "too long":
        return good, detail
    has_event = read_ledger(run.folder)[-1].event == "storage"
    num_errors = sum("disk full" in line for line in end.errors)
    detail += f"; {num_errors} error line; event {'storage' if has_event else 'none'}"
    good = good and num_errors == 1 and has_event >= case.has_event
    if case.targets:
        newest = max(path.parent.name for path in (run.folder / case.targets[1]).glob("step-*/manifest.json"))
        good = good and newest.startswith("step-00000010")
        detail += f"; other has {newest}"
    cure()
    again = watch(run, {"pause_s": PAUSE_S})
    good_again, detail_again = judged_end(run, again, expected, 0)
    waited = "after a pause " if "this one begins in" in again.output else ""
    return good and good_again, f"{detail}; next start {waited}{detail_again}"


def judged_end(run: Run, end: Watched, expected: list[tuple], code: int) -> tuple[bool, str]:
    """Return the verdict on a run that must end with `code`, with equal losses and without a traceback."""
    found = run.steps()
    difference = first_difference(found, expected if code == 0 else expected[: len(found)])
    good = end.code == code and not difference and "Traceback" not in end.output
    if not good:
        print(f"--- {run.folder.name}: {difference}\n{end.output[-6000:]}", file=sys.stderr)
    said = f"; status: {end.status[0][:100]}" if end.status else ""
    return good, f"exit {end.code}, {'losses differ' if difference else 'losses equal'}{said}"


def main() -> int:
    """Run the drill and return its exit code: 0 if every verdict is good."""
    parser = options(__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="names of cases, or words in them")
    args = parser.parse_args()
    table = {case.name: case for case in CASES}
    names = chosen(parser, "--only", args.only, table)
    if not can_mount():
        print("this drill needs root and the right to mount a tmpfs", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        start_programs_quickly(stack)
        drill = Drill(Path(folder), [16] * 20, heldout=[16] * 2)
        cases = {name: functools.partial(run_case, drill, table[name]) for name in names}
        return judge("disks that fill", cases)


if __name__ == "__main__":
    sys.exit(main())
