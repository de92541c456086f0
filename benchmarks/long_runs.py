"""Measure what commands need for a run of many records: processor time and memory, against a parse of all records.

    python benchmarks/long_runs.py --save                         # runs of 100,000 and of 1,000,000 records
    python benchmarks/long_runs.py --records 300000

Guarantee: every command runs in a process of its own. Its time is that of the processor and its memory is the peak of
the process, both above those of a Python process that does nothing. The rival is what every command once did: parse
all lines of metrics.jsonl into a list. It runs in the same turn, on the same file.

Limits: the records are made up, with the size of real ones. `verify` and `export` are represented by their reading of
the metrics, because the rest of their time depends on the corpus and on the model.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from measure import REPOSITORY, Json, ResultLine, finish, parser, print_table

sys.path.insert(0, str(REPOSITORY / "tests"))

from support.command_memory import ELECTRA_DIST, Need, run_python
from support.long_runs import write_long_run


def programs(run: Path, num_records: int) -> dict[str, list[str]]:
    """Return the arguments of Python for each measurement, by its name, in the order in which they run."""
    parse = f"import json; records = [json.loads(line) for line in open({str(run / 'metrics.jsonl')!r}, 'rb')]"
    marks = f"from launcher.cli.verify import read_marks; from pathlib import Path; read_marks(Path({str(run)!r}), [])"
    picture = (
        f"from electra_dist.report.curves import write_curves_png; from pathlib import Path; "
        f"write_curves_png(Path({str(run)!r}), Path({str(run / 'curves.png')!r}))"
    )
    resume = (
        f"from electra_dist.run.metrics import MetricsWriter; from pathlib import Path; "
        f"writer = MetricsWriter(Path({str(run)!r}), tensorboard=False); "
        f"writer.truncate_after({num_records} - 50); writer.close()"
    )
    report = str(run / "report.html")
    return {
        "parse of all records": [parse],
        "status": [ELECTRA_DIST, "status", str(run)],
        "resume": [resume],
        "report": [ELECTRA_DIST, "report", str(run), "--output", report],
        "report of two runs": [ELECTRA_DIST, "report", str(run), str(run), "--output", report],
        "verify: reading of the receipts": [marks],
        "export: curves of the model card": [picture],
    }


def measure_run(folder: Path, num_records: int, rounds: int) -> dict[str, Need]:
    """Return the median need of each measurement on a run of so many records, above that of bare Python."""
    needs: dict[str, list[Need]] = {}
    for number in range(rounds):
        run = write_long_run(folder / f"run-{num_records}-{number}", num_records)
        _, bare = run_python(["pass"])
        for name, arguments in programs(run, num_records).items():
            _, need = run_python(arguments)
            needs.setdefault(name, []).append(Need(need.cpu_s - bare.cpu_s, need.memory_mb - bare.memory_mb))
        (run / "metrics.jsonl").unlink()
    return {name: Need(*map(statistics.median, zip(*samples, strict=True))) for name, samples in needs.items()}


def main(argv: Sequence[str] | None = None) -> Json:
    """Measure all commands on runs of each length, print the table, and return the record."""
    options = parser(__doc__, rounds=3)
    options.add_argument("--records", type=int, nargs="+", default=[100_000, 1_000_000], help="records of each run")
    arguments = options.parse_args(argv)
    lengths = [1000] if arguments.smoke else arguments.records
    rounds = 1 if arguments.smoke else arguments.rounds
    found: Json = {}
    lines = []
    for num_records in lengths:
        with tempfile.TemporaryDirectory() as folder:
            needs = measure_run(Path(folder), num_records, rounds)
        rival = needs["parse of all records"]
        rows = []
        for name, need in needs.items():
            value = f"{need.cpu_s:.2f} s, {need.memory_mb:,.0f} MB"
            share = f"{need.cpu_s / rival.cpu_s:.2f} x its time, {need.memory_mb / rival.memory_mb:.3f} x its memory"
            rows.append([name, value, share])
            what = f"{name}, {num_records:,} records of metrics: processor time and memory"
            lines.append(ResultLine(what, value, "" if need is rival else f"{share}, against a parse of all records"))
        print_table([f"{num_records:,} records", "above bare Python", "of a parse of all records"], rows)
        found[str(num_records)] = {name: need._asdict() for name, need in needs.items()}
    return finish("long_runs", arguments, argv, lines, needs=found)


if __name__ == "__main__":
    main()
