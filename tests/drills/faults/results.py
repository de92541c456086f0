"""Print and write the result of the long drill: a table by kind of fault, and faults.json."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from drills.faults.campaign import Campaign
from drills.faults.kinds import ALL_FAULTS
from electra_launcher.chaos.drill import Hit

from benchmarks.measure import hardware
from electra_dist.run.environment_record import commit, versions


def make_record(drill: Campaign) -> dict[str, Any]:
    """Return the content of faults.json: machine, versions, counts and times of the drill so far, and its verdicts.

    `different_losses` is the number of steps that differ from the uninterrupted run, and `unexpected_reactions` has
    one line for each fault to which the run reacted wrongly.
    """
    bad = [hit for hit in drill.hits if hit.problem]
    return {
        "benchmark": "faults",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"make faults (seed {drill.seed}, {len(drill.hits)} faults)",
        "smoke": False,
        "hardware": hardware(),
        "versions": versions(),
        "commit": commit(),
        "seed": drill.seed,
        "faults": len(drill.hits),
        "process_ends": sum(_ends_processes(hit) for hit in drill.hits),
        "different_losses": sum(leg.different_steps for leg in drill.legs),
        "compared_steps": drill.legs[-1].last_step,
        "unexpected_reactions": [f"{hit.kind} at step {hit.step}: {hit.problem}" for hit in bad],
        "seconds": round(drill.seconds, 1),
        "seconds_per_fault": round(drill.seconds / max(1, len(drill.hits)), 2),
        "kinds": {kind: _summary(hits) for kind, hits in _by_kind(drill.hits).items()},
        "legs": [dataclasses.asdict(leg) for leg in drill.legs],
    }


def write_record(record: dict[str, Any], file: Path) -> None:
    """Write a record from `make_record` to a file, as indented JSON."""
    file.write_text(json.dumps(record, indent=1) + "\n")


def print_table(record: dict[str, Any]) -> None:
    """Print a record from `make_record`: a table with one line for each kind of fault, the legs, and the totals."""
    print(f"\n{'kind':14} {'faults':>6} {'next step s, median':>20} {'most':>7} {'repeated steps':>15}")
    for kind, row in record["kinds"].items():
        median, most = (_text(row[name]) for name in ("next_step_s_median", "next_step_s_most"))
        print(f"{kind:14} {row['faults']:6} {median:>20} {most:>7} {row['repeated_steps']:15}")
    ranks = Counter(f"{leg['ranks']} ranks, {leg['place']}" for leg in record["legs"])
    print("\nlegs: " + "; ".join(f"{number} of {name}" for name, number in sorted(ranks.items())))
    for line in record["unexpected_reactions"]:
        print(f"BAD: {line}")
    print(
        f"seed {record['seed']}, {record['faults']} faults, {record['process_ends']} of them ended processes; "
        f"{record['compared_steps']:,} steps, {record['different_losses']} different; "
        f"{len(record['unexpected_reactions'])} unexpected reactions; "
        f"{record['seconds']:.0f} s, {record['seconds_per_fault']:.2f} s a fault"
    )


def _by_kind(hits: Sequence[Hit]) -> dict[str, list[Hit]]:
    """Return the results of the faults grouped by kind, sorted by the names of the kinds."""
    return {kind: [hit for hit in hits if hit.kind == kind] for kind in sorted({hit.kind for hit in hits})}


def _summary(hits: Sequence[Hit]) -> dict[str, Any]:
    """Return the statistics of the faults of one kind: number, seconds to the next new step, and repeated steps.

    The seconds are the median and the largest value; None if the run made no new step after any of the faults.
    """
    seconds = [hit.recovery_s for hit in hits if hit.recovery_s is not None]
    return {
        "faults": len(hits),
        "next_step_s_median": round(statistics.median(seconds), 2) if seconds else None,
        "next_step_s_most": round(max(seconds), 2) if seconds else None,
        "repeated_steps": sum(hit.steps_lost for hit in hits),
    }


def _ends_processes(hit: Hit) -> bool:
    """Return whether a fault ended at least one process of the run."""
    fault = ALL_FAULTS[hit.kind]
    return fault.then != "goes on"


def _text(seconds: float | None) -> str:
    """Return seconds with two decimals as a string; "-" for None."""
    return "-" if seconds is None else f"{seconds:.2f}"
