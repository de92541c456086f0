"""Tools of the benchmarks: timing in turns, ratios, printed tables, and the record of a run.

Guarantee: the ways that a benchmark compares take turns, round after round, so that other load on the machine affects
all of them alike. A ratio is taken within each round; its median and its extremes over the rounds are reported.

A benchmark is a module of this folder with a function `measure(arguments) -> Found`, which `run.py` calls. It may have
`add_options(parser)`, and `ROUNDS`, the default of `--rounds`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from electra_dist.run.environment_record import commit, cpu, versions

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
    """One row of the benchmark table in docs/results.md; its date and command are those of its record."""

    what: str  # Subject and conditions of the measurement.
    value: str  # Our figure with its unit.
    ratio: str  # Comparison with the rivals; empty if there is none.


@dataclass
class Found:
    """Result of a benchmark."""

    lines: list[ResultLine]
    measured: Json  # The record has these keys, too; JSON values.
    fault: str = ""  # What exceeds a limit that the benchmark guarantees; the program then ends with exit code 1.
    packages: Sequence[str] = field(default=())  # Rivals whose versions the record names.


def alternate(ways: Mapping[str, Callable[[], Any]], rounds: int, warm_up: int = 1) -> dict[str, list[float]]:
    """Run the ways in turn; return the seconds of each round by name: the float that a way returns, or its wall time.

    `warm_up` more rounds run first and are not recorded.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for round_number in range(-warm_up, rounds):
        for name, way in ways.items():
            begin = time.perf_counter()
            result = way()
            elapsed = result if isinstance(result, float) else time.perf_counter() - begin
            if round_number >= 0:
                seconds[name].append(elapsed)
    return seconds


def summary(samples: Sequence[float]) -> dict[str, float]:
    """Return the median, least and largest of the samples, under the keys median, least and most."""
    return {"median": statistics.median(samples), "least": min(samples), "most": max(samples)}


def ratio(over: Sequence[float], under: Sequence[float]) -> dict[str, float]:
    """Return the `summary` of `over` / `under` within each round, which cancels changes of the machine's speed."""
    return summary([numerator / denominator for numerator, denominator in zip(over, under, strict=True)])


def format_summary(found: Mapping[str, float], form: str = ".2f") -> str:
    """Format a `summary` as "median (least to most)", each number by the format `form`."""
    return f"{found['median']:{form}} ({found['least']:{form}} to {found['most']:{form}})"


def in_new_process(module: str, function: str, *arguments: Any) -> Any:
    """Call a function of a benchmark's module in a new Python process; return its result.

    Arguments are written by `repr`, and the result must be a JSON value.
    """
    code = f"import json, {module}; print(json.dumps({module}.{function}(*{arguments!r})))"
    search_path = [str(Path(__file__).parent), str(REPOSITORY), *sys.path]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, search_path))}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{module}.{function}{arguments} ended with exit code {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def peak_memory() -> int:
    """Return the peak of this process's resident memory, in bytes; `ru_maxrss` would include its parent's."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def hardware() -> str:
    """Return one line that describes the machine: processor, cores that this process may use, memory in GB."""
    facts = cpu()
    return f"{facts['model']}, {facts['usable_cores']} cores, {facts['memory_gb']} GB"


def installed(packages: Sequence[str]) -> dict[str, str]:
    """Return the version of each distribution by name; "not installed" where it is missing."""
    version_by_name = {}
    for package in packages:
        try:
            version_by_name[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            version_by_name[package] = "not installed"
    return version_by_name


def make_record(name: str, command: str, *, smoke: bool = False) -> Json:
    """Return what the record of every benchmark begins with, such as its date, command and versions."""
    return {
        "benchmark": name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "commit": commit(),
        "smoke": smoke,
        "hardware": hardware(),
        "versions": versions(),
    }


def record_file(record: Json, folder: Path) -> Path:
    """Return the file of a record: FOLDER/NAME-YYYYMMDD.json (UTC)."""
    return folder / f"{record['benchmark']}-{record['date'][:10].replace('-', '')}.json"


def between_markers(text: str, begin: str, end: str, content: str) -> str:
    """Return the page `text` with `content` between two markers; ValueError if one is missing."""
    first = text.index(begin) + len(begin)
    return f"{text[:first]}\n{content}\n{text[text.index(end) :]}"


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table as aligned text, the first column to the left and all others to the right."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    for line in lines:
        label = line[0].ljust(widths[0])
        figures = [cell.rjust(width) for cell, width in zip(line[1:], widths[1:])]
        print("  ".join([label, *figures]).rstrip(), flush=True)
