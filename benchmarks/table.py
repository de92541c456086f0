"""Write the benchmark table in docs/results.md from the newest JSON record of each benchmark.

    python benchmarks/table.py

Every benchmark stores its rows of the table in its record (`measure.ResultLine`). This script selects the newest
record of each benchmark and writes its rows between the two markers of the page; the rest of the page is not changed.
Smoke runs are left out, because their times mean nothing.
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
    """Return the newest record of each benchmark in `folder`, sorted by the benchmark's name.

    Records without rows for the table, such as those of `gpu.py`, and records of smoke runs are left out.
    """
    records = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    by_name: dict[str, Json] = {}
    for record in sorted(records, key=lambda record: record["date"]):
        if record.get("lines") and not record["smoke"]:
            by_name[record["benchmark"]] = record  # A later record replaces an earlier one.
    return [by_name[name] for name in sorted(by_name)]


def table(records: Sequence[Json]) -> str:
    """Return the Markdown table of the records' rows, and below it a line with the machines and torch versions."""
    rows = [
        f"| {line['what']} | {line['value']} | {line['ratio'] or '-'} "
        f"| `{record['command']}` | {record['date'][:10]} |"
        for record in records
        for line in record["lines"]
    ]
    machines = dict.fromkeys(f"{record['hardware']}, torch {record['versions']['torch']}" for record in records)
    return HEADER + "\n".join(rows) + "\n\nTaken on: " + "; ".join(machines) + ".\n"


def rewrite(text: str, records: Sequence[Json]) -> str:
    """Return the page `text` with the table of the records between its two markers, `BEGIN` and `END`.

    Raises:
        ValueError: A marker is missing from the page.
    """
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    return text[:begin] + "\n" + table(records) + text[end:]


def main(argv: Sequence[str] | None = None) -> None:
    """Rewrite the table of the results page from the records; exit with an error if there are no records."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON records")
    parser.add_argument(
        "--page", type=Path, default=REPOSITORY / "docs" / "results.md", help="Markdown page with the two markers"
    )
    arguments = parser.parse_args(argv)
    records = newest(arguments.results)
    if not records:
        sys.exit(f"{arguments.results} has no benchmark records to tabulate; run `make bench` to write them")
    arguments.page.write_text(rewrite(arguments.page.read_text(), records))
    print(f"{arguments.page}: wrote {sum(len(record['lines']) for record in records)} table rows")


if __name__ == "__main__":
    main()
