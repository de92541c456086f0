"""What the benchmarks share: ways timed in turn, the ratio of two ways, the record of a run, tables.

Guarantee: what is compared runs in one process, in turns, round after round, so that other load on the machine affects
all alike. A ratio is taken within each round; its median and extremes over the rounds are reported. A record names
hardware, versions, date and the command that repeats it; `table.py` makes the table in docs/results.md from it.
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

from electra_dist.run.environment import cpu, versions

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).parent / "results"
# `--set` of a model that trains a step in milliseconds, for the smoke runs.
TOY = [
    "model.embedding_size=64",
    "model.discriminator={hidden_size: 64, num_layers: 2, num_heads: 2, intermediate_size: 256}",
    "model.generator={hidden_size: 32, num_layers: 2, num_heads: 2, intermediate_size: 128}",
]
Json = dict[str, Any]


class ResultLine(NamedTuple):
    """A row of the table in docs/results.md; date and command come from the record."""

    what: str
    value: str
    ratio: str


def parser(doc: str, *, rounds: int | None = None) -> argparse.ArgumentParser:
    """Options that every benchmark has."""
    found = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if rounds is not None:
        found.add_argument("--rounds", type=int, default=rounds, help="of all ways in turn")
    found.add_argument("--smoke", action="store_true", help="toy sizes in seconds: the same code, no meaning in times")
    found.add_argument(
        "--save",
        nargs="?",
        type=Path,
        const=RESULTS,
        metavar="FOLDER",
        help="write a dated JSON file (default: into benchmarks/results/)",
    )
    return found


def alternate(ways: Mapping[str, Callable[[], Any]], rounds: int, warm_up: int = 1) -> dict[str, list[float]]:
    """Seconds of each way, the ways in turn; the first `warm_up` rounds are not kept.

    A way that returns a float has timed itself.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(-warm_up, rounds):
        for name, way in ways.items():
            begin = time.perf_counter()
            found = way()
            elapsed = found if isinstance(found, float) else time.perf_counter() - begin
            if number >= 0:
                seconds[name].append(elapsed)
    return seconds


def summary(samples: Sequence[float]) -> dict[str, float]:
    """Median and spread."""
    return {"median": statistics.median(samples), "least": min(samples), "most": max(samples)}


def ratio(over: Sequence[float], under: Sequence[float]) -> dict[str, float]:
    """Of two ways round by round: median and spread of over / under."""
    return summary([a / b for a, b in zip(over, under, strict=True)])


def told(found: Mapping[str, float], form: str = ".2f") -> str:
    """`median (least to most)`."""
    return f"{found['median']:{form}} ({found['least']:{form}} to {found['most']:{form}})"


def hardware() -> str:
    """Processor, cores of this process, memory."""
    found = cpu()
    return f"{found['model']}, {found['usable_cores']} cores, {found['memory_gb']} GB"


def installed(*packages: str) -> dict[str, str]:
    """Version of each package, or that it is not installed."""
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def finish(
    name: str, arguments: argparse.Namespace, argv: Sequence[str] | None, lines: Sequence[ResultLine], **found: Any
) -> Json:
    """The record of a run, with `found` and its lines of the table in docs/results.md; written where `--save` says.

    `name`: the script's, and behind a hyphen which of its subjects this is.
    """
    given = [word for word in (sys.argv[1:] if argv is None else argv) if word not in ("--save", str(arguments.save))]
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
    """Aligned text: the first column to the left, all others to the right."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    for line in lines:
        cells = [cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(line, widths))]
        print("  ".join(cells).rstrip(), flush=True)
