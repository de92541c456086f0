"""Shared tools of the benchmark scripts: timing in turns, ratios, the JSON record of a run, printed tables.

Guarantee: the variants that a benchmark compares run in one process, one after another in every round, so that other
load on the machine affects all of them alike. A ratio is taken within each round; its median and its extremes over the
rounds are reported. A record names the hardware, the versions, the date and the command that repeats the run.

How: a script builds its options with `parser`, times its variants with `alternate`, and ends with `finish`, which
returns the record and writes it where `--save` asks. `table.py` builds the table in docs/results.md from the records.

Limits: the tools measure wall-clock time; a benchmark that needs CPU time or GPU events measures them itself.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from electra_dist.run.environment_record import cpu, versions

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).parent / "results"
# Config settings, in the form of `--set`, of a model that trains a step in milliseconds. The smoke runs use them.
TOY = [
    "model.embedding_size=64",
    "model.discriminator={hidden_size: 64, num_layers: 2, num_heads: 2, intermediate_size: 256}",
    "model.generator={hidden_size: 32, num_layers: 2, num_heads: 2, intermediate_size: 128}",
]
Json = dict[str, Any]


class ResultLine(NamedTuple):
    """One row of the benchmark table in docs/results.md.

    The row's date and command are not stored in it: `table.py` takes them from the record that holds the row.
    """

    what: str  # Subject and conditions of the measurement.
    value: str  # Our figure with its unit.
    ratio: str  # Comparison with the rivals; empty if there is none.


def parser(doc: str, *, rounds: int | None = None) -> argparse.ArgumentParser:
    """Return a command-line parser with the options that every benchmark has.

    The caller adds its own options before it parses.

    Args:
        doc: Help text of the script, printed as it is; usually the module's docstring.
        rounds: Default of `--rounds`; None leaves this option out.
    """
    options = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if rounds is not None:
        options.add_argument(
            "--rounds",
            type=int,
            default=rounds,
            help="timed rounds, each with every variant once (default: %(default)s)",
        )
    options.add_argument(
        "--smoke", action="store_true", help="run the same code at toy sizes in seconds; the times mean nothing"
    )
    options.add_argument(
        "--save",
        nargs="?",
        type=Path,
        const=RESULTS,
        metavar="FOLDER",
        help="write the record as a dated JSON file into FOLDER (without FOLDER: into benchmarks/results/)",
    )
    return options


def alternate(ways: Mapping[str, Callable[[], Any]], rounds: int, warm_up: int = 1) -> dict[str, list[float]]:
    """Run the variants in turn, round after round, and return the seconds of each by name.

    Args:
        ways: Variants by name. If one returns a float, that is recorded as its seconds; otherwise its wall time is.
        rounds: Timed rounds, which is the length of each list that is returned.
        warm_up: Additional rounds that run first and are not recorded.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for round_number in range(-warm_up, rounds):
        for name, way in ways.items():
            begin = time.perf_counter()
            result = way()
            elapsed = result if isinstance(result, float) else time.perf_counter() - begin
            is_warm_up = round_number < 0
            if not is_warm_up:
                seconds[name].append(elapsed)
    return seconds


def summary(samples: Sequence[float]) -> dict[str, float]:
    """Return the median, least and largest of the samples, under the keys median, least and most."""
    return {"median": statistics.median(samples), "least": min(samples), "most": max(samples)}


def ratio(over: Sequence[float], under: Sequence[float]) -> dict[str, float]:
    """Return median, least and largest of `over` / `under`, divided round by round.

    Dividing within a round cancels a change of the machine's speed between rounds.

    Args:
        over: Samples of one variant, one per round.
        under: Samples of the other variant, one per round.

    Raises:
        ValueError: The two have different numbers of rounds.
    """
    return summary([numerator / denominator for numerator, denominator in zip(over, under, strict=True)])


def format_summary(found: Mapping[str, float], form: str = ".2f") -> str:
    """Format a `summary` as the text "median (least to most)", each number by the format `form`."""
    return f"{found['median']:{form}} ({found['least']:{form}} to {found['most']:{form}})"


def hardware() -> str:
    """Return one line that describes the machine: processor, cores that this process may use, memory in GB."""
    facts = cpu()
    return f"{facts['model']}, {facts['usable_cores']} cores, {facts['memory_gb']} GB"


def installed(*packages: str) -> dict[str, str]:
    """Return the version of each distribution by name; "not installed" where it is missing."""
    version_by_name = {}
    for package in packages:
        try:
            version_by_name[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            version_by_name[package] = "not installed"
    return version_by_name


def finish(
    name: str, arguments: argparse.Namespace, argv: Sequence[str] | None, lines: Sequence[ResultLine], **found: Any
) -> Json:
    """Return the record of a run, print the machine and the versions, and write the record if `--save` is set.

    The file is FOLDER/<name>-<YYYYMMDD>.json (UTC); a later run of the same day replaces it.

    Args:
        name: Name of the script without `.py`, optionally with a hyphen and the subject ("step-packed").
        arguments: Parsed options; `smoke` and `save` are read.
        argv: Words of the command line; None means those of this process. `--save` is left out of the record.
        lines: Rows of this run for the table in docs/results.md.
        found: Measurements, stored in the record under their own names; they must be JSON values.
    """
    command_line = sys.argv[1:] if argv is None else argv
    given = [word for word in command_line if word not in ("--save", str(arguments.save))]
    date = datetime.now(UTC)
    record: Json = {
        "benchmark": name,
        "date": date.isoformat(timespec="seconds"),
        "command": shlex.join(["python", f"benchmarks/{name.partition('-')[0]}.py", *given]),
        "smoke": arguments.smoke,
        "hardware": hardware(),
        "versions": versions(),
        **found,
        "lines": [line._asdict() for line in lines],
    }
    if arguments.save:
        arguments.save.mkdir(parents=True, exist_ok=True)
        (arguments.save / f"{name}-{date:%Y%m%d}.json").write_text(json.dumps(record, indent=1) + "\n")
    print(f"\n{record['hardware']}, " + ", ".join(f"{package} {v}" for package, v in record["versions"].items()))
    return record


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table as aligned text, the first column to the left and all others to the right.

    Args:
        header: Titles of the columns.
        rows: Cells, as many in each row as there are titles.
    """
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    for line in lines:
        label = line[0].ljust(widths[0])
        figures = [cell.rjust(width) for cell, width in zip(line[1:], widths[1:])]
        print("  ".join([label, *figures]).rstrip(), flush=True)
