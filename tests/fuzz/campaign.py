"""Damage every file that this project reads, run what reads it, and print how each case ended.

`python tests/fuzz/campaign.py --cases 50000 --processes 500` prints the cases by file and by command, the outcomes by
kind, and every fault with the lines that repeat it; it ends with 1 if there is a fault. Equal arguments give equal
cases, on every machine that has the same version of hypothesis. `--file` and `--reader` select some.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("COLUMNS", "100")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests/

from fuzz.damages import Damage, damaged, damages
from fuzz.judge import Ending, compared, run_as_process, run_here
from fuzz.readers import TARGETS, Reader, Target
from fuzz.specimens import make_specimen
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from rich.console import Console
from rich.progress import Progress
from rich.table import Table


@dataclass(frozen=True)
class Fault:
    """A case that ended as none may end."""

    file: str
    reader: str
    damage: Damage
    ending: Ending

    def __str__(self) -> str:
        """Return the lines that show the case and repeat it."""
        shown = repr(self.damage)
        if len(shown) > 600:
            shown = f"{shown[:300]} ... {shown[-100:]} ({len(shown):,} characters)"
        last_lines = "\n    ".join(self.ending.text.rstrip().split("\n")[-8:])
        return f"{self.ending.outcome}: {self.file}, {self.reader}\n    {shown}\n    {last_lines[:3000]}"


@dataclass
class Results:
    """Counts and faults of the cases so far."""

    outcomes: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # file, reader, outcome
    faults: list[Fault] = field(default_factory=list)

    @property
    def num_cases(self) -> int:
        """Return the number of cases."""
        return sum(self.outcomes.values())


class Campaign:
    """Cases on the files of one specimen folder, which each case leaves as it was."""

    def __init__(self, root: Path, run: Callable[[Reader, Path], Ending]) -> None:
        """Use a folder that `make_specimen` has written; `run` is `run_here` or `run_as_process`."""
        self._root = root
        self._run = run
        self._good: dict[Reader, Ending] = {}
        self.results = Results()

    def fuzz(
        self, target: Target, num_cases: int, first_seed: int, advance: Callable[[], None] = lambda: None
    ) -> None:
        """Run cases of one file: each draws a damage and one of its readers.

        Args:
            target: the file.
            num_cases: number of cases.
            first_seed: makes the cases a function of it.
            advance: called after each case.
        """
        readers = [reader for reader in target.readers for _ in range(reader.weight)]

        @seed(f"{first_seed} {target.file}")
        @settings(
            max_examples=num_cases,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(damages(target.kind), st.sampled_from(readers))
        def case(damage: Damage, reader: Reader) -> None:
            self.case(target, reader, damage)
            advance()

        case()

    def case(self, target: Target, reader: Reader, damage: Damage) -> Ending:
        """Run one reader on a file with one damage; count the ending, and keep it if it is a fault."""
        path = target.path(self._root)
        content = path.read_bytes()
        if reader not in self._good:
            self._run(reader, self._root)  # once before, because the first call imports modules
            self._good[reader] = self._run(reader, self._root)
            assert not self._good[reader].is_fault, (reader.name, self._good[reader])
        path.write_bytes(damaged(content, target.kind, damage))
        try:
            ending = compared(self._run(reader, self._root), self._good[reader])
        finally:
            path.write_bytes(content)
        self.results.outcomes[target.file, reader.name, ending.outcome] += 1
        if ending.is_fault:
            self.results.faults.append(Fault(target.file, reader.name, damage, ending))
        return ending

    def check_good(self) -> None:
        """Run every reader once more: each must end as before the first case, because nothing was lost."""
        for reader, good in self._good.items():
            ending = self._run(reader, self._root)
            assert ending.outcome == good.outcome, (reader.name, good, ending)


def of_commands(targets: Sequence[Target], is_wanted: Callable[[Reader], bool] = lambda reader: True) -> list[Target]:
    """Return the targets with those of their readers that are wanted commands; without targets that have none."""
    selected = []
    for target in targets:
        commands = tuple(reader for reader in target.readers if reader.command and is_wanted(reader))
        if commands:
            selected.append(Target(target.file, target.kind, commands, target.newest))
    return selected


def tables(results: Results) -> list[Table]:
    """Return the cases by file, and the outcomes by command or function, as tables."""
    kinds = sorted({outcome for _, _, outcome in results.outcomes})
    made = []
    for title, index in (("file", 0), ("read by", 1)):
        table = Table(title, "cases", *kinds, title=f"{results.num_cases:,} cases by {title}")
        for name in sorted({key[index] for key in results.outcomes}):
            counts = Counter[str]()
            for key, count in results.outcomes.items():
                if key[index] == name:
                    counts[key[2]] += count
            table.add_row(name, f"{sum(counts.values()):,}", *(f"{counts[kind]:,}" for kind in kinds))
        made.append(table)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases that the command line asks for, print the tables and the faults, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cases", type=int, default=2000, help="cases in this process")
    parser.add_argument("--processes", type=int, default=100, help="further cases, each in a process of its own")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--file", default="", help="only files whose path contains this")
    parser.add_argument("--reader", default="", help="only commands and functions whose name contains this")
    parser.add_argument(
        "--minutes", type=float, default=0.0, help="begin no further file after this time; 0: no limit"
    )
    parser.add_argument("--folder", type=Path, help="folder of the good files; it is made if it does not exist")
    args = parser.parse_args(arguments)
    targets = [target for target in TARGETS if args.file in target.file]
    targets = [
        Target(target.file, target.kind, readers, target.newest)
        for target in targets
        if (readers := tuple(reader for reader in target.readers if args.reader in reader.name))
    ]
    if not targets:
        parser.error(f"no file with {args.file!r} in its path is read by anything with {args.reader!r} in its name")
    if args.cases <= 0 and (args.processes <= 0 or not of_commands(targets)):
        parser.error("no case is asked for: --cases is 0, and --processes is 0 or no command reads the selected files")
    with tempfile.TemporaryDirectory() as temporary:
        root = (args.folder or Path(temporary) / "specimen").absolute()
        if not root.exists():
            print("making a corpus, a run and its export ...", file=sys.stderr, flush=True)
            make_specimen(root)
        campaigns = [Campaign(root, run_here), Campaign(root, run_as_process)]
        numbers = [args.cases, args.processes]
        try:
            _run_all(campaigns, numbers, targets, args)
        except KeyboardInterrupt:
            print("interrupted; the tables have the cases until then", file=sys.stderr)
    return _report([campaign.results for campaign in campaigns])


def _run_all(
    campaigns: Sequence[Campaign], numbers: Sequence[int], targets: list[Target], args: argparse.Namespace
) -> None:
    """Run the cases of both campaigns with a progress bar."""
    end = time.monotonic() + 60 * args.minutes if args.minutes else float("inf")
    # The bar is drawn by a thread: without a file of its own it would write into the stderr of a case.
    with Progress(console=Console(file=sys.stderr), transient=True) as progress:
        for campaign, number, selected in zip(campaigns, numbers, (targets, of_commands(targets))):
            if not selected or not number:
                continue
            bar = progress.add_task("cases", total=number)
            for index, target in enumerate(selected):
                if time.monotonic() > end:
                    break
                share = number * (index + 1) // len(selected) - number * index // len(selected)
                if share:
                    num_faults = len(campaign.results.faults)
                    campaign.fuzz(target, share, args.seed, lambda bar=bar: progress.advance(bar))
                    _print_new(campaign.results.faults[num_faults:], progress.console)
            campaign.check_good()


def _print_new(faults: Sequence[Fault], console: Console) -> None:
    """Print the faults of one file, of each kind the first one only."""
    kinds = set()
    for fault in faults:
        last_line = fault.ending.text.rstrip().split("\n")[-1]
        kind = (fault.reader, fault.ending.outcome, last_line.split(":")[0])
        if kind not in kinds:
            kinds.add(kind)
            console.print(str(fault), markup=False, highlight=False, soft_wrap=True)


def _report(all_results: Sequence[Results]) -> int:
    """Print the tables and the faults; return 1 if there is a fault or there was no case, otherwise 0."""
    console = Console(width=160)
    num_faults = 0
    for label, results in zip(("in one process", "as processes of their own"), all_results):
        console.print(f"{results.num_cases:,} cases {label}")
        for table in tables(results):
            console.print(table)
        num_faults += len(results.faults)
    tracebacks = sum(
        count for results in all_results for (*_, outcome), count in results.outcomes.items() if outcome == "traceback"
    )
    console.print(f"faults: {num_faults}; tracebacks: {tracebacks}")
    if not any(results.num_cases for results in all_results):
        print("error: nothing was tested, because no case was run in the time", file=sys.stderr)
        return 1
    return int(num_faults > 0)


if __name__ == "__main__":
    sys.exit(main())
