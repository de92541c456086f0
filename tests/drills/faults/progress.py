"""What the long drill keeps in its folder, so that it can be interrupted at any moment and continued.

    drill.json       seed, number of faults, the losses of the first 20 steps on this CPU, and the legs so far
    hits.jsonl       one line for each fault, with its leg
    run/             the run that is hit;  run.log, run.yaml beside it
    reference/       the uninterrupted run;  reference.log, reference.yaml beside it

A leg is written to drill.json when it begins and when both runs have reached its end and were compared.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from electra_dist.store.atomic_files import replacing
from launcher.chaos.drill import Hit

_FILE = "drill.json"
_HITS = "hits.jsonl"


@dataclass(kw_only=True)
class Leg:
    """A stretch of the run with a fixed number of ranks, as far as it has come."""

    number: int  # of the planned leg, from 0; one that was interrupted is continued as a new leg of the same number
    ranks: int
    place: str
    first_step: int  # steps done before it
    last_step: int | None = None  # steps done after it; None: not at its end yet
    different_steps: int | None = None  # steps that differ from the uninterrupted run's; None: not compared yet
    first_difference: str = ""


@dataclass(kw_only=True)
class Progress:
    """The drill as far as it has come."""

    folder: Path
    seed: int
    count: int
    first_losses: list[Any]
    seconds: float = 0.0  # wall-clock time so far, the comparison included
    legs: list[Leg] = field(default_factory=list)
    hits: list[Hit] = field(default_factory=list)

    def write(self) -> None:
        """Write everything but the hits, by an atomic replacement."""
        tree = dataclasses.asdict(self)
        del tree["folder"], tree["hits"]
        with replacing(self.folder / _FILE) as out:
            out.write(json.dumps(tree, indent=1).encode())

    def add(self, hit: Hit) -> None:
        """Append the result of a fault."""
        self.hits.append(hit)
        with (self.folder / _HITS).open("a") as out:
            out.write(json.dumps(dataclasses.asdict(hit)) + "\n")

    @property
    def open_leg(self) -> Leg | None:
        """The leg that was begun and not compared yet."""
        is_open = bool(self.legs) and self.legs[-1].different_steps is None
        return self.legs[-1] if is_open else None

    @property
    def step(self) -> int:
        """Steps done when the last leg ended."""
        return self.legs[-1].last_step or 0 if self.legs else 0


def read_progress(folder: Path) -> Progress | None:
    """Return what an earlier start of the drill has left in a folder; None if it left nothing."""
    file = folder / _FILE
    if not file.exists():
        return None
    tree = json.loads(file.read_text())
    legs = [Leg(**leg) for leg in tree.pop("legs")]
    hits_file = folder / _HITS
    lines = hits_file.read_text().split("\n")[:-1] if hits_file.exists() else []
    return Progress(folder=folder, legs=legs, hits=[Hit(**json.loads(line)) for line in lines], **tree)
