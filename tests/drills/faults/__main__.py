"""Hit one run with 2,000 random faults, and compare each of its steps with an uninterrupted run, bit for bit.

    python tests/drills/faults                          # 2,000 faults (make faults)
    python tests/drills/faults --count 12 --leg 6       # a sample

How: the run is divided into legs, which are stretches of steps with a fixed number of ranks and a fixed place of the
data: two ranks in most legs, one or four in the others. kinds.py lists the faults and the legs. When a leg has ended,
a second run is trained to the same step with the same number of ranks and without faults. The losses, gradient norms
and receipts (checksums of the rows trained on) of every step must be equal. The seed determines the legs, and the
kinds, victims and moments of the faults. All processes are forks of one process that has imported torch and DeepSpeed.
The drill prints a table, and exits with 1 if a step differs or the run did not react to a fault as it must.

Limits: legs with a small disk need root, because the disk is mounted. Without root, local legs take their place.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # the repository
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # tests/
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from support.process_names import start_again_with_room

if __name__ == "__main__":
    start_again_with_room()

from drills.faults import results
from drills.faults.campaign import EVERY_STEPS, Campaign
from drills.faults.forked_run import start_programs_as_forks
from drills.faults.kinds import plan_legs
from electra_launcher.chaos.__main__ import write_fault_plot
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from support.fork_server import import_everything
from support.small_disks import can_mount


def parse() -> argparse.Namespace:
    """Parse the command line of this process; print the usage and exit with code 2 if it is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="seed of legs, kinds, victims and moments (default: 1)")
    parser.add_argument("--count", type=int, default=2000, help="number of faults (default: 2000)")
    parser.add_argument("--leg", type=int, default=40, help="faults of a leg (default: 40)")
    parser.add_argument("--server", choices=["radosgw", "moto"], default="moto", help="S3 server (default: moto)")
    parser.add_argument("--keep", type=Path, help="an empty folder to work in, which is kept (default: temporary)")
    parser.add_argument("--results", type=Path, help="file for the record, such as benchmarks/results/faults.json")
    args = parser.parse_args()
    if args.count < 1:
        parser.error("--count must be at least 1")
    return args


def run_drill(folder: Path, args: argparse.Namespace) -> int:
    """Make the drill in a folder, and print and write the results."""
    folder.mkdir(parents=True, exist_ok=True)
    has_disk = can_mount()
    if not has_disk:
        print("without `disk`: mounting a small file system needs root", flush=True)
    legs = plan_legs(args.seed, args.count, args.leg, EVERY_STEPS, has_disk)
    drill = Campaign(folder, args.seed)
    drill.write_data()
    with contextlib.ExitStack() as stack:
        if any(leg.place == "s3" for leg in legs):
            stack.enter_context(drill.s3_service(args.server))
        columns = (TextColumn("faults"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        bar = stack.enter_context(
            Progress(*columns, auto_refresh=False)
        )  # without a thread, because this process forks
        task = bar.add_task("faults", total=args.count)
        for planned in legs:
            leg = drill.make_leg(planned, lambda: bar.update(task, completed=len(drill.hits), refresh=True))
            if leg.different_steps:
                text = f"DIFFERENT in leg {len(drill.legs)}: {leg.first_difference}"
                bar.console.print(text, markup=False, highlight=False)
    record = results.make_record(drill)
    results.print_table(record)
    write_fault_plot(drill.reference_dir, drill.run_dir, drill.hits, folder / "faults.png")
    for file in (folder / "faults.json", args.results):
        if file:
            results.write_record(record, file)
    return 1 if record["different_losses"] or record["unexpected_reactions"] else 0


def main() -> int:
    """Run the drill and return its exit code."""
    args = parse()
    import_everything()
    start_programs_as_forks()
    if args.keep is not None:
        return run_drill(args.keep.resolve(), args)
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        return run_drill(Path(folder), args)


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    os._exit(exit_code)  # An ordinary exit would clean up the objects frozen before the forks, with hundreds of lines.
