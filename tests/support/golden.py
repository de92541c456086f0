"""Compare what the product computes, writes and prints with the golden set in tests/golden/records.

    python tests/support/golden.py --check                 # all entries; exit code 1 if one differs
    python tests/support/golden.py --check --kind corpora  # one kind; --entry TEXT: entries whose name contains TEXT
    python tests/support/golden.py --write --kind scripts  # make the record of a kind again

An entry changes on purpose only, and the commit and the changelog name it. Entries that hold on one kind of CPU only
have a record for each kind; where there is none, a line says that they were not compared. Naming entries of which none
is compared is an error (exit code 2).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

# More threads, or a GPU, would give other bits. Both variables are read when torch and DeepSpeed are imported.
os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests/

from golden import doors
from golden.comparison import Entries, Kind, differences, machine, read_record, write_record
from golden.kinds import KINDS
from rich.progress import track
from support.fork_server import import_everything


def made(kind: Kind, names: Sequence[str]) -> Entries:
    """Make entries of a kind, each in an empty folder, and show the progress on a terminal."""
    entries: Entries = {}
    for name in track(names, kind.name, disable=not sys.stderr.isatty()):
        with tempfile.TemporaryDirectory(prefix="golden-") as folder:
            entries[name] = kind.make(name, Path(folder).resolve())
    return entries


def chosen(names: Sequence[str], part: str) -> list[str]:
    """Return the entry of this name or, if there is none, those whose names contain it."""
    return [part] if part in names else [name for name in dict.fromkeys(names) if part in name]


def read_names(kind: Kind) -> list[str]:
    """Return the names of the entries in the record of a kind; none if there is no record yet."""
    try:
        return list(read_record(kind)[1])
    except FileNotFoundError:
        return []


def check(kind: Kind, part: str = "") -> list[str] | None:
    """Return a line for each difference from the record; None if the record is of another kind of CPU."""
    made_on, expected = read_record(kind)
    if kind.is_of_a_cpu and made_on != machine():
        return None
    names = chosen([*expected, *kind.names()], part)
    found = made(kind, [name for name in names if name in kind.names()])
    wanted = {name: expected[name] for name in names if name in expected}
    return list(differences(wanted, found))


def main() -> int:
    """Check or write what the command line asks for, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", action="store_true", help="compare, and end with 1 if an entry differs")
    action.add_argument("--write", action="store_true", help="make the records again")
    parser.add_argument("--kind", action="append", choices=KINDS, help="only this kind; may be repeated")
    parser.add_argument("--entry", default="", metavar="TEXT", help="only entries whose name contains TEXT")
    parser.add_argument(
        "--plant", metavar="OLD=>NEW", help="replace a text in configs, commands and results, which must be found"
    )
    options = parser.parse_args()
    if options.plant:
        doors.plant(*options.plant.split("=>"))
    kinds = [KINDS[name] for name in options.kind or KINDS]
    kinds = [kind for kind in kinds if chosen([*read_names(kind), *kind.names()], options.entry)]
    if not kinds:
        parser.error(f"no entry is named {options.entry}; the names are in tests/golden/records/")
    import_everything()  # the forks that make the entries share it
    all_equal, num_compared = True, 0
    for kind in kinds:
        name, begin = kind.name, time.monotonic()
        if options.write:
            recorded: Entries = {}
            if options.entry and read_names(kind):
                made_on, recorded = read_record(kind)
                if made_on not in ("", machine()):
                    parser.error(f"{name}: this kind of CPU has no record yet; leave out --entry to write a whole one")
            entries = {**recorded, **made(kind, chosen(kind.names(), options.entry))}
            write_record(kind, entries)
            print(f"{name}: {len(entries)} entries written, {time.monotonic() - begin:.0f} s", flush=True)
            continue
        found = check(kind, options.entry)
        if found is None:
            print(f"{name}: not compared: the record is of {read_record(kind)[0]}, this is {machine()}", flush=True)
            continue
        num_compared += 1
        for line in found:
            print(f"{name}: {line}")
        state = f"{len(found)} differences" if found else "all equal"
        print(f"{name}: {state}, {time.monotonic() - begin:.0f} s", flush=True)
        all_equal = all_equal and not found
    if options.check and not num_compared:
        return 2
    return 0 if all_equal else 1


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    os._exit(exit_code)  # Triton would report what it has not freed
