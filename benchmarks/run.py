"""Run benchmarks by name, save their records, and write the table of docs/results.md.

    python benchmarks/run.py --list               # the names, each with its question
    python benchmarks/run.py head step            # one after another; prints tables and writes nothing
    python benchmarks/run.py step head --save     # also writes benchmarks/results/NAME-YYYYMMDD.json and the table
    python benchmarks/run.py step --smoke         # the same code at toy sizes in seconds; the times mean nothing

Guarantee: a record names date, hardware, versions, commit and the command that repeats the run. Of several benchmarks,
each runs in a process of its own, and one that fails does not stop the next one.

The exit code is 0, or 1 if a benchmark failed or found a limit exceeded that its module guarantees. `gpu.py`, the
benchmark of a GPU, has a command of its own.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measure import REPOSITORY, RESULTS, Json, installed, make_record, record_file

BENCHMARKS = ("step", "head", "loader", "shard_cache", "corpus_builder", "checkpoint", "restart")
PAGE = REPOSITORY / "docs" / "results.md"
BEGIN, END = "<!-- benchmarks: written by benchmarks/run.py -->", "<!-- end of benchmarks -->"
HEADER = "| what | figure | against | command | date |\n| --- | --- | --- | --- | --- |\n"


def question(name: str) -> str:
    """Return the first sentence of a benchmark's docstring, without importing the benchmark."""
    module = ast.parse((Path(__file__).parent / f"{name}.py").read_text())
    return str(ast.get_docstring(module)).partition("\n")[0]


def parse(name: str, module: Any, words: Sequence[str]) -> argparse.Namespace:
    """Parse the options of one benchmark."""
    parser = argparse.ArgumentParser(
        prog=f"run.py {name}", description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if hasattr(module, "ROUNDS"):
        rounds = 1 if "--smoke" in words else module.ROUNDS
        parser.add_argument("--rounds", type=int, default=rounds, help=f"timed rounds, with every way once ({rounds})")
    if hasattr(module, "add_options"):
        module.add_options(parser)
    add_common_options(parser)
    return parser.parse_args(words)


def add_common_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that every benchmark has."""
    parser.add_argument("--smoke", action="store_true", help="run the same code at toy sizes in seconds")
    parser.add_argument(
        "--save", action="store_true", help="write the record as a dated JSON file; run.py also writes docs/results.md"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the records (benchmarks/results)")


def run(name: str, words: Sequence[str]) -> int:
    """Run one benchmark with its options, print and save what it found; return the exit code."""
    module = importlib.import_module(name)
    arguments = parse(name, module, words)
    given = [word for word in words if word not in ("--save", "--results", str(arguments.results))]
    record = make_record(name, shlex.join(["python", "benchmarks/run.py", name, *given]), arguments.smoke)
    found = module.measure(arguments)
    if found.packages:
        record["packages"] = installed(found.packages)
    record |= found.measured | {"lines": [line._asdict() for line in found.lines]}
    print(f"\n{record['hardware']}, " + ", ".join(f"{package} {v}" for package, v in record["versions"].items()))
    if arguments.save:
        arguments.results.mkdir(parents=True, exist_ok=True)
        record_file(record, arguments.results).write_text(json.dumps(record, indent=1) + "\n")
        if not arguments.smoke and arguments.results == RESULTS:
            write_table()
    if found.fault:
        print(found.fault, file=sys.stderr)
    return 1 if found.fault else 0


def write_table(folder: Path = RESULTS, page: Path = PAGE) -> None:
    """Write the rows of the newest records between the two markers of the page."""
    text = page.read_text()
    first = text.index(BEGIN) + len(BEGIN)
    page.write_text(f"{text[:first]}\n{table(newest(folder))}\n{text[text.index(END) :]}")


def newest(folder: Path) -> list[Json]:
    """Return the newest record of each benchmark of this folder that has rows for the table and is no smoke run's."""
    records = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    by_name: dict[str, Json] = {}
    for record in sorted(records, key=lambda record: record["date"]):
        if record.get("lines") and not record["smoke"] and record["benchmark"] in BENCHMARKS:
            by_name[record["benchmark"]] = record  # A later record replaces an earlier one.
    return [by_name[name] for name in sorted(by_name)]


def table(records: Sequence[Json]) -> str:
    """Return the Markdown table of the records' rows, and below it a line with the machines and torch versions.

    Only the first row of a record has its command and date.
    """
    rows = [
        f"| {line['what']} | {line['value']} | {line['ratio'] or '-'} "
        + (f"| `{record['command']}` | {record['date'][:10]} |" if number == 0 else "| | |")
        for record in records
        for number, line in enumerate(record["lines"])
    ]
    machines = dict.fromkeys(f"{record['hardware']}, torch {record['versions']['torch']}" for record in records)
    return HEADER + "\n".join(rows) + "\n\nTaken on: " + "; ".join(machines) + "."


def main(words: Sequence[str]) -> int:
    """Run the benchmarks that the words name; return the exit code."""
    if words and words[0] in BENCHMARKS and not set(words[1:]) & set(BENCHMARKS):
        return run(words[0], words[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument("--list", action="store_true", help="print the names with their questions")
    add_common_options(parser)
    arguments = parser.parse_args(words)
    if arguments.list:
        for name in BENCHMARKS:
            print(f"{name:<16}{question(name)}")
        return 0
    unknown = sorted(set(arguments.names) - set(BENCHMARKS))
    if unknown or not arguments.names:
        parser.error(f"there is no benchmark {', '.join(unknown)}" if unknown else "name a benchmark, or use --list")
    options = [word for word in words if word not in arguments.names]
    failed = []
    for name in arguments.names:
        print(f"== {name}", flush=True)
        if subprocess.run([sys.executable, __file__, name, *options]).returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}; read the messages above", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
