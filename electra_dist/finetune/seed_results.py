"""Define the result of one seed of one task, summarize results over seeds, and choose the layer of a probe.

Guarantee: fine-tuning with one seed counts as failed if its loss became NaN or infinite (diverged) or if all
predictions of the trained model are equal (degenerate); results list such a seed with the reason. The score of a
degenerate seed stays in the median, because a user who trains once may get it. A diverged seed has no score.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter
from rich.table import Table

from electra_dist.store.json_file import DamagedJson, validate_json

GLUE_AVERAGE = ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte")  # the eight tasks of the paper's tables


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """Result of fine-tuning on one task with one seed, or of probing one task; stored as one line of results.jsonl."""

    task: str
    seed: int  # 0 for a probe, which has no seeds
    mode: str  # "finetune" or "probe"
    identity: str  # digest of model, data and settings; a result with another identity is not comparable
    metric: str  # name of the score among `metrics`
    score: float | None  # None if the loss diverged
    metrics: dict[str, float]
    failure: str  # why the seed counts as failed; empty for a good seed
    train_loss: float | None  # mean of the last tenth of the steps; None for a probe or a diverged seed
    steps: int
    examples: int  # training examples or windows
    seconds: float
    layer: int | None = None  # of a probe: the layer that was chosen on the training data; 0 is the embeddings
    layer_scores: list[float] = dataclasses.field(default_factory=list)  # of a probe: score at layers 0, 1, ...
    # Of a probe: scores at layers 0, 1, ... on held-out training data, which choose `layer`; None: nothing held out.
    held_out_scores: list[float | None] = dataclasses.field(default_factory=list)
    standard_error: float | None = None  # of a probe's score, over the choice of the development examples

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Result:
        """Build the result from a parsed line of results.jsonl.

        Raises DamagedJson if keys or types differ from the fields, for example because another version of the package
        wrote the line.
        """
        unknown = set(record) - {field.name for field in dataclasses.fields(cls)}
        if unknown:
            raise DamagedJson(f"it has the unknown key {min(unknown)}")
        return validate_json(_RESULT, record)

    def numbers(self) -> dict[str, Any]:
        """Return all fields except `seconds`, the only one that differs when a seed is computed again."""
        return {key: value for key, value in dataclasses.asdict(self).items() if key != "seconds"}


_RESULT = TypeAdapter(Result)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeedSummary:
    """Summary of the results of one task over its seeds: median, lowest and highest score, and failed seeds.

    A diverged seed (NaN or infinite loss) has no score and is left out of these three numbers. They are None if all
    seeds diverged.
    """

    task: str
    mode: str  # "finetune" or "probe"
    metric: str  # name of the score
    median: float | None
    low: float | None
    high: float | None
    scores: list[float | None]  # in the order of the seeds; None for a diverged seed
    medians: dict[str, float]  # metric -> median over the seeds that have it
    failed: dict[int, str]  # seed -> why it counts as failed
    seconds: float  # total over the seeds


def summarize(results: Sequence[Result]) -> SeedSummary:
    """Summarize results of one task that differ in their seeds; there must be at least one, in any order."""
    by_seed = sorted(results, key=lambda result: result.seed)
    scores = [result.score for result in by_seed if result.score is not None]
    return SeedSummary(
        task=by_seed[0].task,
        mode=by_seed[0].mode,
        metric=by_seed[0].metric,
        median=statistics.median(scores) if scores else None,
        low=min(scores, default=None),
        high=max(scores, default=None),
        scores=[result.score for result in by_seed],
        medians=_metric_medians(by_seed),
        failed={result.seed: result.failure for result in by_seed if result.failure},
        seconds=sum(result.seconds for result in by_seed),
    )


def _metric_medians(results: Sequence[Result]) -> dict[str, float]:
    """Return each metric's median over the seeds; diverged seeds, which have no metrics, are left out."""
    values_of: dict[str, list[float]] = {}
    for result in results:
        for name, value in result.metrics.items():
            values_of.setdefault(name, []).append(value)
    return {name: statistics.median(values) for name, values in values_of.items()}


def glue_average(summaries: Sequence[SeedSummary]) -> float | None:
    """Return the mean of the median scores of the eight tasks in `GLUE_AVERAGE`; None if a task has no score."""
    median_of = {summary.task: summary.median for summary in summaries}
    medians = []
    for task in GLUE_AVERAGE:
        median = median_of.get(task)
        if median is None:
            return None
        medians.append(median)
    return statistics.fmean(medians)


def results_table(title: str, summaries: Sequence[SeedSummary]) -> Table:
    """Return a table for the terminal: one row per task, scores in per cent, and the GLUE average if there is one."""
    table = Table("task", "metric", "median", "min", "max", "seeds", "failed", "other medians", title=title)
    for summary in summaries:
        other_medians = [
            f"{name} {percent(summary, value)}" for name, value in summary.medians.items() if name != summary.metric
        ]
        table.add_row(
            summary.task,
            summary.metric,
            percent(summary, summary.median),
            percent(summary, summary.low),
            percent(summary, summary.high),
            str(len(summary.scores)),
            _failed_seeds(summary),
            ", ".join(other_medians),
        )
    average = glue_average(summaries)
    if average is not None:
        table.add_row("GLUE", "mean of 8", f"{100 * average:.1f}")
    return table


def _failed_seeds(summary: SeedSummary) -> str:
    """Return how many seeds failed, and which, as in "2 of 5 (seeds 0, 3)"; "none" if no seed failed."""
    if not summary.failed:
        return "none"
    noun = "seed" if len(summary.failed) == 1 else "seeds"
    return f"{len(summary.failed)} of {len(summary.scores)} ({noun} {', '.join(map(str, summary.failed))})"


def percent(summary: SeedSummary, value: float | None) -> str:
    """Format a metric in per cent, as in "66.4"; "-" for None. SQuAD's metrics are per cent, all others fractions."""
    if value is None:
        return "-"
    is_per_cent = summary.task.startswith("squad")
    return f"{value:.1f}" if is_per_cent else f"{100 * value:.1f}"


def best_layer(held_out_scores: Sequence[float | None]) -> int:
    """Return the number of the layer with the highest score on held-out data; of equally good layers, the lowest.

    If a score is None, because there were too few examples to hold some out, return the last layer.
    """
    scores = [score for score in held_out_scores if score is not None]
    if len(scores) < len(held_out_scores):
        return len(held_out_scores) - 1
    return scores.index(max(scores))
