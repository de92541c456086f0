"""Runs tiny runs with random configs, interrupts each at random, and compares it with its uninterrupted twin.

    python tests/drills/campaign --seconds 600 --seed 1     # make campaign SECONDS=600 SEED=1
    python tests/drills/campaign --seed 1 --case 17         # case 17 again; its folder is kept

`draws.py` has the keys and their values, `cases.py` the interruptions, `trial.py` what must be equal. A config that
the config check refuses is counted and drawn again. One that it accepts must train to its end: a later refusal, a
crash, a traceback and a difference are faults. Case k of a seed is always the same; when exactly a kill at a time
comes depends on the machine, too. The campaign goes on after a fault, and ends with a table, and exit code 1 if there
was one.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # the repository
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # tests/
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from drills.campaign.cases import draw_case
from drills.campaign.draws import DRAWS
from drills.campaign.trial import Outcome, run_case, write_data
from drills.forks import run_in_fork
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from support.fork_server import import_everything
from support.small_disks import folder_in_memory


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="no case begins later (default: 600)")
    parser.add_argument("--seed", type=int, default=1, help="seed of all cases (default: 1)")
    parser.add_argument("--first", type=int, default=0, help="number of the first case (default: 0)")
    parser.add_argument("--case", type=int, help="make only the case of this number, and keep its folder")
    parser.add_argument("--keep", type=Path, help="an empty folder to work in, which is kept (default: temporary)")
    return parser.parse_args()


def describe(outcome: Outcome) -> str:
    """Return everything that repeats a case."""
    case = outcome.case
    lines = [
        f"FAULT in case {case.number}: {outcome.fault}",
        f"config: {case.config()}",
        *(f"start: {line}" for line in case.interruptions()),
        f"again: python tests/drills/campaign --seed {case.seed} --case {case.number}",
    ]
    return "\n    ".join(lines)


def run_cases(args: argparse.Namespace, folder: Path) -> list[Outcome]:
    """Make cases until the time is up, with a progress bar; print each fault, and delete the folders of good cases."""
    outcomes = []
    begin = time.monotonic()
    numbers = [args.case] if args.case is not None else range(args.first, sys.maxsize)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, auto_refresh=False) as progress:  # without a thread, because this process forks
        task = progress.add_task("cases", total=args.seconds)
        for number in numbers:
            passed_s = time.monotonic() - begin
            if passed_s > args.seconds and args.case is None:
                break
            num_faults = sum(bool(outcome.fault) for outcome in outcomes)
            text = f"case {number}, {num_faults} faults"
            progress.update(task, completed=passed_s, description=text, refresh=True)
            case_folder = folder / f"case-{number}"
            outcome = run_case(draw_case(args.seed, number), case_folder, folder / "data")
            outcomes.append(outcome)
            if outcome.fault:
                progress.console.print(describe(outcome), markup=False, highlight=False, soft_wrap=True)
            elif args.case is None:
                shutil.rmtree(case_folder)
    return outcomes


def sort_of_fault(fault: str) -> str:
    """Return a fault without what differs from case to case: paths, numbers and what follows a semicolon."""
    return re.sub(r"-?\d+(\.\d+)?([eE][+-]\d+)?", "N", re.sub(r"(/[\w.-]+)+", "PATH", fault.split(";")[0]))[:150]


def print_summary(outcomes: list[Outcome], seconds: float) -> None:
    """Print the tables and the line with the totals."""
    cases = [outcome.case for outcome in outcomes]
    never = DRAWS.keys() - {key for case in cases for key in case.changes}
    print(f"\nkeys drawn: {len(DRAWS) - len(never)} of {len(DRAWS)}; never: {', '.join(sorted(never)) or 'none'}")
    met = Counter(kind for outcome in outcomes for kind in outcome.met)
    legs = [leg for case in cases for leg in case.legs]
    planned = Counter(leg.interruption.kind for leg in legs if leg.interruption) + Counter(
        leg.damage for leg in legs if leg.damage
    )
    print("interruptions: " + ", ".join(f"{kind} {met[kind]} of {planned[kind]}" for kind in sorted(planned)))
    ranks = Counter(leg.ranks for leg in legs)
    exchanges = sum(len({leg.ranks for leg in case.legs}) > 1 for case in cases)
    print(
        f"rollbacks: {met['rollback']}; diverged: {sum(o.ended == 'diverged' for o in outcomes)}; starts planned by "
        f"number of ranks: {dict(sorted(ranks.items()))}; cases that change it: {exchanges}; "
        f"starts from scratch: {sum(leg.from_scratch for leg in legs)}"
    )
    faults = Counter(sort_of_fault(outcome.fault) for outcome in outcomes if outcome.fault)
    for sort, count in faults.most_common():
        numbers = [
            outcome.case.number for outcome in outcomes if outcome.fault and sort_of_fault(outcome.fault) == sort
        ]
        print(f"FAULT {count} x {sort} (cases {', '.join(map(str, numbers[:10]))})")
    refused = sum(case.num_refused for case in cases)
    drawn = refused + len(cases)
    times = os.times()
    cpu_s = times.user + times.system + times.children_user + times.children_system
    print(
        f"\n{len(cases)} cases, {sum(faults.values())} faults of {len(faults)} sorts; {refused} of {drawn} "
        f"drawn configs refused by the config check ({refused / max(1, drawn):.0%}); {seconds:.0f} s, "
        f"{seconds / max(1, len(cases)):.1f} s a case, {cpu_s:.0f} s of processor time"
    )


def main() -> int:
    """Run the campaign and return its exit code: 0 if there was a case and no fault."""
    args = parse()
    begin = time.monotonic()
    folder = (args.keep or Path(tempfile.mkdtemp(prefix="campaign-", dir=folder_in_memory()))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    import_everything()

    run_in_fork(lambda: write_data(folder / "data"), folder / "data.txt")
    outcomes = run_cases(args, folder)
    print_summary(outcomes, time.monotonic() - begin)
    has_fault = any(outcome.fault for outcome in outcomes)
    if has_fault or args.keep or args.case is not None:
        print(f"kept: {folder}")
    else:
        shutil.rmtree(folder)
    return 1 if has_fault or not outcomes else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # without the clean-up of libraries, which print what they have not freed
