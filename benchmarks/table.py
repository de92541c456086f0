"""Write the table of benchmarks in docs/results.md from the newest JSON file of each: `python benchmarks/table.py`.

Every benchmark writes its own lines into its file (`measure.ResultLine`). This script selects the newest file of each
benchmark and puts the lines between the two markers of the page. Smoke runs are left out: their times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from measure import REPOSITORY, RESULTS, Json

BEGIN, END = "<!-- benchmarks: written by benchmarks/table.py -->", "<!-- end of benchmarks -->"
HEADER = "| what | figure | against | command | date |\n| --- | --- | --- | --- | --- |\n"


def newest(folder: Path) -> list[Json]:
    """The latest record of each benchmark that has lines, by name."""
    records = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    by_name: dict[str, Json] = {}
    for record in sorted(records, key=lambda record: record["date"]):
        if record.get("lines") and not record["smoke"]:
            by_name[record["benchmark"]] = record
    return [by_name[name] for name in sorted(by_name)]


def table(records: Sequence[Json]) -> str:
    """Markdown, and below it what the figures were taken on."""
    rows = [
        f"| {line['what']} | {line['value']} | {line['ratio'] or '-'} "
        f"| `{record['command']}` | {record['date'][:10]} |"
        for record in records
        for line in record["lines"]
    ]
    machines = dict.fromkeys(f"{record['hardware']}, torch {record['versions']['torch']}" for record in records)
    return HEADER + "\n".join(rows) + "\n\nTaken on: " + "; ".join(machines) + ".\n"


def rewrite(text: str, records: Sequence[Json]) -> str:
    """`text` with the table between the markers.

    Raises:
        ValueError: a marker is missing.
    """
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    return text[:begin] + "\n" + table(records) + text[end:]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=REPOSITORY / "docs" / "results.md")
    arguments = parser.parse_args(argv)
    records = newest(arguments.results)
    if not records:
        sys.exit(f"{arguments.results}: no results; run `make bench`")
    arguments.page.write_text(rewrite(arguments.page.read_text(), records))
    print(f"{arguments.page}: {sum(len(record['lines']) for record in records)} lines")


if __name__ == "__main__":
    main()
