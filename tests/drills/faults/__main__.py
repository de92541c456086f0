"""Hits one run with 2,000 random faults, and compares every step with an uninterrupted run, bit for bit.

    python tests/drills/faults --state DIR              # 2,000 faults (make faults STATE=DIR)
    python tests/drills/faults --count 12               # a sample, in a temporary folder

The run has two ranks, and one or four in some of its legs. `kinds.py` lists the faults and the legs. Once a leg has
ended, a second run is trained to the same step with the same number of ranks and without a fault; losses, gradient
norms and receipts of every step must be equal. The seed determines legs, kinds, victims and moments.

The drill ends after --minutes and goes on when it is started again with the same --state; so it does after it was
interrupted. On a CPU that computes the first 20 steps otherwise, it begins a new run and says so. All processes are
forks of one that has imported torch and DeepSpeed. It prints a table, writes DIR/faults.json, and exits with 1 if a
step differs or the run did not react to a fault as it must. A small disk needs root, to mount.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # the repository
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # tests/
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from drills.faults.process_names import ProcessNames, start_again_with_room

if __name__ == "__main__":
    start_again_with_room()

from drills.faults import campaign, results
from drills.faults.campaign import Campaign
from drills.faults.forked_run import ForkedDrill
from drills.faults.kinds import PlannedLeg, plan_legs
from drills.faults.progress import Leg, Progress, read_progress
from drills.kill_matrix.preloaded import prepare_forks
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from support.small_disks import can_mount

from launcher.chaos.fault_plot import write_fault_plot

_SPARE_S = 90.0  # of the time limit, for the comparison of the last leg


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, help="folder that keeps the runs and the progress (default: temporary)")
    parser.add_argument("--seed", type=int, default=1, help="seed of legs, kinds, victims and moments (default: 1)")
    parser.add_argument("--count", type=int, default=2000, help="number of faults (default: 2000)")
    parser.add_argument("--leg", type=int, default=40, help="faults of a leg (default: 40)")
    parser.add_argument("--minutes", type=float, default=100.0, help="time limit of this start (default: 100)")
    parser.add_argument("--server", choices=["radosgw", "moto"], default="moto", help="S3 server (default: moto)")
    parser.add_argument("--results", type=Path, help="file for the record once all faults have been made")
    return parser.parse_args()


def begin_or_continue(folder: Path, seed: int, count: int) -> Progress:
    """Return the progress in a folder, or begin a new drill there if this CPU computes otherwise or nothing is there.

    What an earlier drill has left is moved into a new folder `earlier-N` when a new one begins.
    """
    folder.mkdir(parents=True, exist_ok=True)
    campaign.write_data(folder)
    with tempfile.TemporaryDirectory(dir=folder, prefix="first-") as name:
        os.symlink(folder / "corpus", Path(name) / "corpus")
        first_losses = campaign.measure_first_losses(Path(name))
    progress = read_progress(folder)
    reason = ""
    if progress is not None and progress.first_losses != first_losses:
        reason = "this CPU computes the first 20 steps otherwise than the one before"
    elif progress is not None and (progress.seed, progress.count) != (seed, count):
        reason = f"the drill there has seed {progress.seed} and {progress.count} faults"
    if progress is not None and not reason:
        print(f"{folder}: going on after {len(progress.hits)} of {count} faults", flush=True)
        return progress
    if reason:
        earlier = set_aside(folder)
        print(f"{folder}: {reason}, so a new run begins; what was there is in {earlier}", flush=True)
    progress = Progress(folder=folder, seed=seed, count=count, first_losses=first_losses)
    progress.write()
    return progress


def set_aside(folder: Path) -> Path:
    """Move the drill in a folder into a new folder in it, and return that."""
    number = 1
    while (folder / f"earlier-{number}").exists():
        number += 1
    earlier = folder / f"earlier-{number}"
    earlier.mkdir()
    for path in folder.iterdir():
        if path.name != "corpus" and not path.name.startswith("earlier-"):
            path.rename(earlier / path.name)
    return earlier


def run_legs(drill: Campaign, legs: list[PlannedLeg], faults_per_leg: int, deadline: float, bar: Bar) -> None:
    """Make the legs that are still to come, until the deadline (by `time.monotonic`)."""
    progress = drill.progress
    task = bar.add_task("faults", total=progress.count, completed=len(progress.hits))

    def show_progress() -> None:
        bar.update(task, completed=len(progress.hits))
        bar.refresh()

    def is_over() -> bool:
        show_progress()
        return time.monotonic() > deadline - _SPARE_S

    while progress.open_leg or (len(progress.hits) < progress.count and not is_over()):
        begin = time.monotonic()
        leg = progress.open_leg
        if leg is None:
            number = len(progress.hits) // faults_per_leg
            planned = legs[number]
            leg = Leg(number=number, ranks=planned.ranks, place=planned.place, first_step=progress.step)
            progress.legs.append(leg)
            progress.write()
        planned = legs[leg.number]
        if leg.last_step is None:
            num_hit = len(progress.hits) - leg.number * faults_per_leg
            drill.hit_leg(planned, list(planned.faults[num_hit:]), leg, is_over)
        drill.compare_leg(leg)
        progress.seconds += time.monotonic() - begin
        progress.write()
        show_progress()
        if leg.different_steps:
            bar.console.print(f"DIFFERENT in leg {leg.number}: {leg.first_difference}", markup=False, highlight=False)


def run_drill(folder: Path, args: argparse.Namespace) -> int:
    """Make the drill in a folder until it is done or its time is over, and return the exit code."""
    deadline = time.monotonic() + 60.0 * args.minutes
    if os.path.ismount(folder / "disk"):  # left by a drill that was killed
        subprocess.run(["umount", "-l", str(folder / "disk")], check=True)
    progress = begin_or_continue(folder, args.seed, args.count)
    has_disk = can_mount()
    if not has_disk:
        print("without `disk`: mounting a small file system needs root", flush=True)
    legs = plan_legs(args.seed, args.count, args.leg, campaign.EVERY_STEPS, has_disk)
    drill = Campaign(progress)
    with contextlib.ExitStack() as stack:
        if any(leg.place == "s3" for leg in legs[len(progress.hits) // args.leg :]):
            stack.enter_context(drill.s3_service(args.server))
        columns = (TextColumn("faults"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        bar = stack.enter_context(Bar(*columns, auto_refresh=False))  # without a thread, because this process forks
        run_legs(drill, legs, args.leg, deadline, bar)
    record = results.make_record(progress)
    results.print_table(record)
    results.write_record(record, folder / "faults.json")
    write_fault_plot(drill.reference_dir, drill.run_dir, progress.hits, folder / "faults.png")
    is_done = len(progress.hits) == progress.count
    if is_done and args.results:
        results.write_record(record, args.results)
    if not is_done:
        print(f"{progress.count - len(progress.hits)} faults are still to come; start again with --state {folder}")
    return 1 if record["different_losses"] or record["unexpected_reactions"] else 0


def main() -> int:
    """Run the drill and return its exit code: 0 if no step differs and the run reacted to each fault as it must."""
    args = parse()
    ForkedDrill.names = ProcessNames()
    prepare_forks()
    if args.state is not None:
        return run_drill(args.state.resolve(), args)
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        print(f"no --state: the runs are in {folder}, which is deleted at the end", flush=True)
        return run_drill(Path(folder), args)


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    os._exit(exit_code)  # the clean-up of objects that were frozen before the forks prints hundreds of lines
