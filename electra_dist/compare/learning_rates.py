"""Choose the learning rate of each objective of a comparison by short runs, so that none is at a disadvantage.

An objective that lists several rates (`lr`) makes a run with each of them, with the first seed and for `search_at` of
the budget, before the first run of the comparison. The run that is best on held-out rows decides: the one with the
highest context AUC or, for an objective that predicts tokens, with the lowest loss. These are the quantities by which
`checkpoint.keep_best` chooses, and no task or minimal pair has a part in it.

Guarantee: a choice is made once. It is kept in learning_rates.jsonl of the output folder with the values of all rates,
and holds until a setting of the short runs or the corpus changes. A run that fails, for example because its loss
diverges, has no value and is not repeated.

Limits: a short run decays its learning rate within its own steps, so a rate that is best after a tenth of the budget
may be a little too high for all of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from electra_dist.compare.checkpoint_scores import with_prefix
from electra_dist.compare.comparison_config import CompareConfig, Entry
from electra_dist.compare.comparison_runs import Plan, PlannedRun, Pretrainings, make_plan
from electra_dist.config import Config
from electra_dist.errors import UserError
from electra_dist.finetune.stored_scores import digest_of
from electra_dist.finetune.training_loop import Progress
from electra_dist.run.folder import recorded_numerics
from electra_dist.run.metrics import iter_evaluations
from electra_dist.run.records import Record, append_record, read_records
from electra_dist.train.evaluator import evaluation_scores

RATES_FILE = "learning_rates.jsonl"  # in the output folder: a line for each choice, the newest last
SEARCH_FOLDER = "search"  # in the output folder: the short runs


class RateChoice(Record):
    """Learning rate that was chosen for an objective; a line of learning_rates.jsonl."""

    entry: str  # name of the objective's entry
    measure: str  # what decided: "context AUC" or "loss"
    rates: list[float]
    values: list[float | None]  # of the held-out rows, for each rate; None if its run failed
    chosen: float
    runs: str  # digest of the short runs' configs and of their corpus

    def line(self) -> str:
        """Return the choice as a sentence for compare.md and the terminal."""
        return f"{self.entry}: {self.chosen:g}, {self.reason()}"

    def reason(self) -> str:
        """Return how the rate was chosen, with the values that all rates reached."""
        values = [
            f"{rate:g} gives {'a failed run' if value is None else format(value, '.4f')}"
            for rate, value in zip(self.rates, self.values, strict=True)
        ]
        return f"by the {self.measure} on held-out rows ({', '.join(values)})"


class RateSearch:
    """The short runs of a comparison and the learning rates that they have chosen so far."""

    def __init__(self, compare: CompareConfig, file: Path) -> None:
        """Plan the short runs of a comparison's config `file` without starting one; raise UserError as `make_plan`."""
        self._ranks = compare.ranks
        self._parallel = compare.parallel
        self._file = Path(compare.output) / RATES_FILE
        self.plan: Plan | None = None  # of the short runs; None if no objective lists rates
        searched = [entry for entry in compare.objectives if entry.lr]
        if not searched:
            return
        budget = make_plan(with_rates(compare, []), file).budget_flops
        trials = [_trial(entry, rate) for entry in searched for rate in entry.lr]
        changes = {
            "objectives": tuple(trials),
            "output": str(Path(compare.output) / SEARCH_FOLDER),
            "seeds": compare.seeds[:1],
            "steps": None,
            "flops": compare.search_at * budget,
            "evaluate_at": (1.0,),
        }
        self.plan = make_plan(compare.model_copy(update=changes), file)
        for run in self.plan.runs:
            if run.config.data.heldout is None:
                raise UserError(
                    f"{file}: learning rates are chosen on held-out rows; set `data.heldout` in {compare.base}, or "
                    f"remove `lr` from the objectives"
                )
        self._runs_of: dict[str, list[PlannedRun]] = {}  # objective -> its short runs, one for each rate
        for entry in searched:
            trials_of_entry = [_trial(entry, rate).name for rate in entry.lr]
            self._runs_of[entry.name] = [run for name in trials_of_entry for run in self.plan.of(name)]

    def choices(self, fingerprint: str) -> list[RateChoice]:
        """Read the choices that hold for the present settings and for the corpus with this fingerprint."""
        if self.plan is None:
            return []
        newest = {choice.entry: choice for choice in read_records(self._file, RateChoice.model_validate)}
        return [
            newest[entry]
            for entry, runs in self._runs_of.items()
            if entry in newest and newest[entry].runs == _digest(runs, fingerprint)
        ]

    def make(self, fingerprint: str, progress: Progress) -> list[RateChoice]:
        """Make the short runs of all objectives that lack a choice, and choose; return the new choices.

        Raises UserError if no run of an objective has a finite value.
        """
        if self.plan is None:
            return []
        chosen = {choice.entry for choice in self.choices(fingerprint)}
        runs_of = {entry: runs for entry, runs in self._runs_of.items() if entry not in chosen}
        all_runs = [run for runs in runs_of.values() for run in runs]
        made = []
        with Pretrainings(all_runs, self._ranks, self._parallel) as trainings:
            for entry, runs in runs_of.items():
                failures = [
                    trainings.result(run, with_prefix(progress, f"learning rates: {run.name}: ")) for run in runs
                ]
                choice = _choose(entry, runs, failures, fingerprint)
                append_record(self._file, choice)
                made.append(choice)
        return made


def with_rates(compare: CompareConfig, choices: Sequence[RateChoice]) -> CompareConfig:
    """Return the config of a comparison with a learning rate for each objective that lists several.

    It is the chosen one or, before there is a choice, the first one.
    """
    chosen = {choice.entry: choice.chosen for choice in choices}

    def with_rate(entry: Entry) -> Entry:
        if not entry.lr:
            return entry
        rate = chosen.get(entry.name, entry.lr[0])
        return entry.model_copy(update={"set": entry.set | {"optimizer.lr": rate}})

    return compare.model_copy(update={"objectives": tuple(map(with_rate, compare.objectives))})


def _trial(entry: Entry, rate: float) -> Entry:
    changes = {"name": f"{entry.name}-lr{rate!r}", "set": entry.set | {"optimizer.lr": rate}, "lr": ()}
    return entry.model_copy(update=changes)


def _digest(runs: Sequence[PlannedRun], fingerprint: str) -> str:
    identities = [run.config.identity_sha256(recorded_numerics(Path(run.config.run_dir))) for run in runs]
    return digest_of({"runs": identities, "corpus": fingerprint})


def _choose(entry: str, runs: Sequence[PlannedRun], failures: Sequence[str], fingerprint: str) -> RateChoice:
    """Choose the learning rate of an objective's best short run; raise UserError if no run has a finite value.

    `failures` has for each run why it failed, or "" if it has finished. `fingerprint` is that of the corpus.
    """
    finds_replacements = not runs[0].config.objective.facts.predicts_tokens
    values = [None if failure else _value(run.config) for run, failure in zip(runs, failures, strict=True)]
    known = {run.config.optimizer.lr: value for run, value in zip(runs, values, strict=True) if value is not None}
    if not known:
        reasons = "; ".join(failure or "no finite value on held-out rows" for failure in failures)
        raise UserError(f"no learning rate of {entry} can be chosen: {reasons}; list other rates in its `lr`")
    best = max(known, key=known.__getitem__) if finds_replacements else min(known, key=known.__getitem__)
    return RateChoice(
        entry=entry,
        measure="context AUC" if finds_replacements else "loss",
        rates=[run.config.optimizer.lr for run in runs],
        values=values,
        chosen=best,
        runs=_digest(runs, fingerprint),
    )


def _value(config: Config) -> float | None:
    """Return what the newest evaluation of a run found, context AUC or loss; None if it is missing or not finite."""
    scores: dict[str, float] = {}
    for record in iter_evaluations(Path(config.run_dir)):
        scores = evaluation_scores(record, config.objective.facts)
    value = scores.get("eval_context_auc", scores.get("eval_loss", math.nan))
    return value if math.isfinite(value) else None
