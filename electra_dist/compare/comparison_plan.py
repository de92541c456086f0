"""Plan a comparison: determine its runs, which have equal training FLOPs and one complete config each.

Guarantee: the budget is a number of training FLOPs: `flops` of the comparison's config, or the FLOPs of `steps` steps
of the first objective. model/counts.py counts them, as for MFU. Every run has the number of steps whose FLOPs are
nearest to the budget, so it differs from the budget by at most the FLOPs of half a step. Warm-up, and the decay of a
trapezoid, are the same share of the steps in every run as in the base config, and the decay ends with the last step.
For one seed, all objectives read the same rows and start with the same weights in the parts that they have in common.
Nothing is written; the base config is the only file that is read.

Limits: the count contains matrix products of full rows; look-ups, evaluation and tokenizing are not counted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from electra_dist.compare.comparison_config import CompareConfig, Entry
from electra_dist.config import Config
from electra_dist.config.load import load_config
from electra_dist.errors import UserError
from electra_dist.model.counts import run_flops, steps_of_flops


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """One run of a comparison: an objective and a seed, with its complete config."""

    entry: str  # name of the objective's entry
    seed: int
    config: Config  # the complete config with which the run is started
    marks: tuple[int, ...]  # steps whose checkpoints are scored, ascending; the last one is the last step of the run

    @property
    def name(self) -> str:
        """Return the name of the run and of its folder: objective and seed, as in `rtd-seed1`."""
        return _run_name(self.entry, self.seed)

    @property
    def file(self) -> Path:
        """Return the path of the run's config as YAML: the run's folder with the suffix ".yaml"."""
        return Path(f"{self.config.run_dir}.yaml")

    def flops(self, step: int) -> float:
        """Return the FLOPs of the run's first `step` optimizer steps, on all ranks together; 0 for step 0."""
        return run_flops(self.config, step)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All runs of a comparison, in the order in which they are made.

    All objectives run with the first seed, then all with the second, and so on, so that the objectives can be compared
    as soon as one seed is complete.
    """

    budget_flops: float  # training FLOPs of every run, up to half a step
    runs: tuple[PlannedRun, ...]

    def of(self, entry: str) -> list[PlannedRun]:
        """Return the runs of the objective that the config names `entry`, in the order of the seeds."""
        return [run for run in self.runs if run.entry == entry]


def make_plan(compare: CompareConfig, file: Path) -> Plan:
    """Make the config of each run of the comparison in `file`; a relative path there starts at the folder of `file`.

    Raises UserError if the base config or an objective's `set` is not valid, or a run has too few steps for as many
    checkpoints as `evaluate_at` asks for.
    """
    base = file.parent / compare.base
    # The config of each objective without the keys of a single run: the FLOPs of a step and the warm-up depend on it.
    config_of = {entry.name: _load(file, base, entry, run_keys={}) for entry in compare.objectives}
    budget = compare.flops
    if budget is None:
        budget = run_flops(config_of[compare.objectives[0].name], compare.steps)
    runs = [
        _plan_run(compare, file, entry, seed, config_of[entry.name], budget)
        for seed in compare.seeds
        for entry in compare.objectives
    ]
    return Plan(budget_flops=budget, runs=tuple(runs))


def _plan_run(
    compare: CompareConfig, file: Path, entry: Entry, seed: int, objective_config: Config, budget_flops: float
) -> PlannedRun:
    """Plan the run of one objective with one seed, of as many steps as the budget pays for."""
    num_steps = steps_of_flops(objective_config, budget_flops)
    scored_steps = _scored_steps(compare, file, entry, num_steps)
    run_keys: dict[str, object] = {
        "run_dir": str(Path(compare.output) / "runs" / _run_name(entry.name, seed)),
        "seed": seed,
        "train.num_steps": num_steps,
        **_scaled_schedule(objective_config, num_steps),
        "checkpoint.keep_steps": scored_steps,
        "checkpoint.targets": [],  # checkpoints are in the run's folder only
    }
    config = _load(file, file.parent / compare.base, entry, run_keys)
    return PlannedRun(entry=entry.name, seed=seed, config=config, marks=scored_steps)


def _scaled_schedule(config: Config, num_steps: int) -> dict[str, int | None]:
    """Return the config's keys of warm-up and decay, scaled from its own number of steps to `num_steps`.

    Where rounding would make warm-up and decay longer than the run, the decay is shorter.
    """

    def scaled(steps: int) -> int:
        return round(steps / config.train.num_steps * num_steps)

    optimizer = config.optimizer
    warmup_steps = scaled(optimizer.warmup_steps)
    longest_warmup = warmup_steps
    keys: dict[str, int | None] = {"optimizer.warmup_steps": warmup_steps, "optimizer.decay_steps": None}
    if optimizer.generator is not None and optimizer.generator.warmup_steps is not None:
        keys["optimizer.generator.warmup_steps"] = scaled(optimizer.generator.warmup_steps)
        longest_warmup = max(warmup_steps, scaled(optimizer.generator.warmup_steps))
    if optimizer.decay_steps is not None:
        keys["optimizer.decay_steps"] = max(1, min(scaled(optimizer.decay_steps), num_steps - longest_warmup))
    return keys


def _scored_steps(compare: CompareConfig, file: Path, entry: Entry, num_steps: int) -> tuple[int, ...]:
    """Return the steps whose checkpoints are scored: 250 and 1,000 of 1,000 if `evaluate_at` is (0.25, 1.0).

    Raises UserError, which names the objective `entry`, if two of them are the same step.
    """
    steps = tuple(max(1, round(share * num_steps)) for share in compare.evaluate_at)
    if len(set(steps)) < len(steps):
        raise UserError(
            f"{file}: {num_steps} steps of {entry.name} are too few for {len(compare.evaluate_at)} different "
            f"checkpoints at {', '.join(map(str, compare.evaluate_at))}; raise steps or flops"
        )
    return steps


def _run_name(entry: str, seed: int) -> str:
    return f"{entry}-seed{seed}"


def _load(file: Path, base: Path, entry: Entry, run_keys: Mapping[str, object]) -> Config:
    """Load the base config with the changes of one objective and, applied last, `run_keys` (dotted key -> value)."""
    overrides = [_override("objective.name", entry.objective)]
    overrides += [_override(key, value) for key, value in entry.set.items()]
    overrides += [_override(key, value) for key, value in run_keys.items()]
    try:
        return load_config(base, overrides)
    except UserError as error:
        raise UserError(f"{file}: objectives.{entry.name}: {error}") from None


def _override(key: str, value: object) -> str:
    return f"{key}={json.dumps(value)}"
