"""Hit one run with 2,000 random faults, and compare each of its steps with an uninterrupted run, bit for bit.

    python tests/drills/faults --state DIR              # 2,000 faults (make faults STATE=DIR)
    python tests/drills/faults --count 12               # a sample, in a temporary folder

How: the run is divided into legs, which are stretches of steps with a fixed number of ranks and a fixed place of the
data: two ranks in most legs, one or four in the others. kinds.py lists the faults and the legs. When a leg has ended,
a second run is trained to the same step with the same number of ranks and without faults. The losses, gradient norms
and receipts (checksums of the rows trained on) of every step must be equal. The seed determines the legs, and the
kinds, victims and moments of the faults. All processes are forks of one process that has imported torch and DeepSpeed.

The drill ends after --minutes. Started again with the same --state, it continues, also after it was interrupted. If
this CPU computes the first 20 steps with other bits than the CPU of the earlier start, the drill begins a new run and
prints that. It prints a table, writes DIR/faults.json, and exits with 1 if a step differs or the run did not react to
a fault as it must.

Limits: legs with a small disk need root, because the disk is mounted. Without root, local legs take their place.
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

from support.process_names import start_again_with_room

if __name__ == "__main__":
    start_again_with_room()

from drills.faults import campaign, results
from drills.faults.campaign import Campaign
from drills.faults.forked_run import start_programs_as_forks
from drills.faults.kinds import PlannedLeg, plan_legs
from drills.faults.progress import Leg, Progress, read_progress
from electra_launcher.chaos.fault_plot import write_fault_plot
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from support.fork_server import import_everything
from support.small_disks import can_mount

_SPARE_S = 90.0  # part of the time limit that is left for the comparison of the last leg


def parse() -> argparse.Namespace:
    """Parse the command line of this process; print the usage and exit with code 2 if it is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, help="folder that keeps the runs and the progress (default: temporary)")
    parser.add_argument("--seed", type=int, default=1, help="seed of legs, kinds, victims and moments (default: 1)")
    parser.add_argument("--count", type=int, default=2000, help="number of faults (default: 2000)")
    parser.add_argument("--leg", type=int, default=40, help="faults of a leg (default: 40)")
    parser.add_argument("--minutes", type=float, default=100.0, help="time limit of this start (default: 100)")
    parser.add_argument("--server", choices=["radosgw", "moto"], default="moto", help="S3 server (default: moto)")
    parser.add_argument("--results", type=Path, help="file for the record once all faults have been made")
    args = parser.parse_args()
    if args.count < 1:
        parser.error("--count must be at least 1")
    return args


def begin_or_continue(folder: Path, seed: int, count: int) -> Progress:
    """Return the progress of the drill in a folder, after starting a new drill if the one there cannot be continued.

    A drill can be continued if its seed and number of faults are the same, and if this CPU computes its first 20 steps
    bit for bit as before. If not, its files are moved into a new folder `earlier-N` inside `folder`.
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
    """Move all files of a drill except the corpus into a new folder `earlier-N` inside its folder; return the path."""
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
    """Make and compare the legs of the drill that have not been made yet, until the time is over.

    The leg that is being made when the time is over ends early, and is compared.
    """
    progress = drill.progress
    task = bar.add_task("faults", total=progress.count, completed=len(progress.hits))

    def show_progress() -> None:
        """Show the present number of faults in the bar."""
        bar.update(task, completed=len(progress.hits))
        bar.refresh()

    def is_over() -> bool:
        """Return whether no further fault may be made; also show the progress, because it is called after each."""
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
    """Make the drill in a folder until all faults are made or its time is over, and print and write the results."""
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
    """Run the drill and return its exit code."""
    args = parse()
    import_everything()
    start_programs_as_forks()
    if args.state is not None:
        return run_drill(args.state.resolve(), args)
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        print(f"no --state: the runs are in {folder}, which is deleted at the end", flush=True)
        return run_drill(Path(folder), args)


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    os._exit(exit_code)  # An ordinary exit would clean up the objects frozen before the forks, with hundreds of lines.
