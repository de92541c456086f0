"""From a comparison to its runs: equal FLOPs, one resolved config each. Pure but for reading the base.

Guarantee: the budget is the FLOPs of the first objective's `steps` (or `flops`) by the count that MFU uses
(model/flops.py); every run has the number of steps whose FLOPs are nearest to it, so none is further from it than
half a step. Warm-up is the same share of the steps in all of them, as in the base; so is the decay. Seed s gives all
objectives the same rows and the same initial weights of what they have in common.

Where it stops: the count is of matrix products of full rows: no look-ups, no evaluation, no tokenizing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from electra_dist.compare.config import CompareConfig, Entry
from electra_dist.config import Config
from electra_dist.config_file import load_config
from electra_dist.errors import UserError
from electra_dist.model.flops import run_flops, steps_of_flops


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run: an objective and a seed."""

    entry: str
    seed: int
    config: Config  # complete: what the run is started with
    marks: tuple[int, ...]  # steps that are scored, ascending; the last is the run's last

    @property
    def name(self) -> str:
        """Of the run's folder."""
        return f"{self.entry}-seed{self.seed}"

    @property
    def file(self) -> Path:
        """The config as YAML, beside the run's folder."""
        return Path(f"{self.config.run_dir}.yaml")

    def flops(self, step: int) -> float:
        """Training FLOPs of the run's first `step` steps."""
        return run_flops(self.config, step)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All runs, in the order in which they are made: seed by seed, so that what is there compares all objectives."""

    budget_flops: float
    cells: tuple[Cell, ...]

    def of(self, entry: str) -> list[Cell]:
        """The runs of one objective."""
        return [cell for cell in self.cells if cell.entry == entry]


def make_plan(compare: CompareConfig, file: Path) -> Plan:
    """The runs of the comparison in `file`.

    Raises:
        UserError: the base or an objective's `set` is at fault; names file and key.
    """
    base = file.parent / compare.base
    shared = {entry.name: _load(file, base, entry, ()) for entry in compare.objectives}
    first = shared[compare.objectives[0].name]
    budget = compare.flops or run_flops(first, compare.steps)
    cells = []
    for seed in compare.seeds:
        for entry in compare.objectives:
            num_steps = steps_of_flops(shared[entry.name], budget)
            marks = tuple(dict.fromkeys(max(1, round(share * num_steps)) for share in compare.evaluate_at))
            if len(marks) < len(compare.evaluate_at):
                raise UserError(
                    f"{file}: {num_steps} steps of {entry.name} have no {len(compare.evaluate_at)} different "
                    f"checkpoints at {', '.join(map(str, compare.evaluate_at))}; raise steps or flops"
                )
            warmup = shared[entry.name].optimizer.warmup_steps / shared[entry.name].train.num_steps
            ours = {
                "run_dir": str(Path(compare.output) / "runs" / f"{entry.name}-seed{seed}"),
                "seed": seed,
                "train.num_steps": num_steps,
                "optimizer.warmup_steps": round(warmup * num_steps),
                "checkpoint.keep_steps": marks,
                "checkpoint.targets": [],
            }
            config = _load(file, base, entry, [_override(key, value) for key, value in ours.items()])
            cells.append(Cell(entry=entry.name, seed=seed, config=config, marks=marks))
    return Plan(budget_flops=budget, cells=tuple(cells))


def _load(file: Path, base: Path, entry: Entry, more: Sequence[str]) -> Config:
    given = [_override(key, value) for key, value in {"objective.name": entry.objective, **entry.set}.items()]
    try:
        return load_config(base, [*given, *more])
    except UserError as error:
        raise UserError(f"{file}: objectives.{entry.name}: {error}") from None


def _override(key: str, value: object) -> str:
    return f"{key}={json.dumps(value)}"  # JSON is YAML
