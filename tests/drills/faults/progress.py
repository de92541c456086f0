"""Keep the progress of the long drill in its folder, so that it can be interrupted at any moment and continued.

    drill.json       seed, number of faults, the losses of the first 20 steps on this CPU, and the legs so far
    hits.jsonl       one line for each fault, with its leg
    run/             the run that is hit;  run.log, run.yaml beside it
    reference/       the uninterrupted run;  reference.log, reference.yaml beside it

A leg is a stretch of the run with a fixed number of ranks. drill.json is written when a leg begins, when the run with
faults has reached its end, and when both runs were compared.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from electra_launcher.chaos.drill import Hit

from electra_dist.store.atomic_files import replacing

_FILE = "drill.json"
_HITS = "hits.jsonl"


@dataclass(kw_only=True)
class Leg:
    """Record of one leg: a stretch of the run with a fixed number of ranks and a fixed place of its data."""

    number: int  # of the planned leg, from 0; one that ended early is continued as a new leg of the same number
    ranks: int  # number of ranks
    place: str  # "local", "s3" or "disk", see kinds.py
    first_step: int  # steps done before the leg
    last_step: int | None = None  # steps done at the end of the leg; None: the leg has not ended
    different_steps: int | None = None  # how many steps differ from the uninterrupted run; None: not compared yet
    first_difference: str = ""  # both values of the first step that differs; "" if there is none


@dataclass(kw_only=True)
class Progress:
    """Progress of the long drill: its settings, and the records of legs and faults so far."""

    folder: Path  # folder of the drill
    seed: int
    count: int  # number of faults of the whole drill
    first_losses: list[Any]  # [loss, gradient norm] of the first 20 steps of a run on the CPU of this drill
    seconds: float = 0.0  # wall-clock time so far, including the comparisons
    legs: list[Leg] = field(default_factory=list)  # in the order in which they began
    hits: list[Hit] = field(default_factory=list)  # results of the faults, in order

    def write(self) -> None:
        """Write everything except the faults to drill.json, by an atomic replacement."""
        tree = dataclasses.asdict(self)
        del tree["folder"], tree["hits"]
        with replacing(self.folder / _FILE) as out:
            out.write(json.dumps(tree, indent=1).encode())

    def add(self, hit: Hit) -> None:
        """Append the result of a fault to `hits` and to the file hits.jsonl."""
        self.hits.append(hit)
        with (self.folder / _HITS).open("a") as out:
            out.write(json.dumps(dataclasses.asdict(hit)) + "\n")

    @property
    def open_leg(self) -> Leg | None:
        """The leg that has begun and was not compared yet; None if there is none."""
        if not self.legs:
            return None
        newest = self.legs[-1]
        return newest if newest.different_steps is None else None

    @property
    def step(self) -> int:
        """Number of steps that the run had done at the end of the newest leg; 0 if there is none, or it has no end."""
        if not self.legs:
            return 0
        return self.legs[-1].last_step or 0


def read_progress(folder: Path) -> Progress | None:
    """Return the progress that earlier starts of the drill have written into a folder; None if there is none."""
    file = folder / _FILE
    if not file.exists():
        return None
    tree = json.loads(file.read_text())
    legs = [Leg(**leg) for leg in tree.pop("legs")]
    hits_file = folder / _HITS
    lines = hits_file.read_text().split("\n")[:-1] if hits_file.exists() else []
    return Progress(folder=folder, legs=legs, hits=[Hit(**json.loads(line)) for line in lines], **tree)
