"""The result of one seed of one task, and what many of them come to.

A seed has failed if its loss diverged or all its predictions are equal: it is named, and a degenerate one's score
stays in the median, which is what a user who trains once would meet. A diverged one has no score.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from rich.table import Table

GLUE_AVERAGE = ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte")  # the eight of the paper's tables


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """One seed of one task."""

    task: str
    seed: int
    mode: str  # finetune or probe
    identity: str  # digest of model, data and settings: results of another identity are of something else
    metric: str  # name of the score
    score: float | None  # None where the loss diverged
    metrics: dict[str, float]
    failure: str  # empty for a good seed
    train_loss: float | None  # mean of the last tenth of the steps; None for probes
    steps: int
    examples: int  # training examples or windows
    seconds: float

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Result:
        """From a line of results.jsonl."""
        return cls(**record)

    def numbers(self) -> dict[str, Any]:
        """Everything but the time it took: what must repeat."""
        return {key: value for key, value in dataclasses.asdict(self).items() if key != "seconds"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeedSummary:
    """All seeds of one task."""

    task: str
    mode: str
    metric: str
    median: float | None
    low: float | None
    high: float | None
    scores: list[float | None]  # by seed
    medians: dict[str, float]  # of every metric
    failed: dict[int, str]  # seed -> why
    seconds: float


def summarize(results: Sequence[Result]) -> SeedSummary:
    """The summary of the results of one task, in the order of their seeds."""
    results = sorted(results, key=lambda result: result.seed)
    scores = [result.score for result in results if result.score is not None]
    names = next((list(result.metrics) for result in results if result.metrics), [])
    return SeedSummary(
        task=results[0].task,
        mode=results[0].mode,
        metric=results[0].metric,
        median=statistics.median(scores) if scores else None,
        low=min(scores, default=None),
        high=max(scores, default=None),
        scores=[result.score for result in results],
        medians={n: statistics.median(r.metrics[n] for r in results if n in r.metrics) for n in names},
        failed={result.seed: result.failure for result in results if result.failure},
        seconds=sum(result.seconds for result in results),
    )


def glue_average(summaries: Sequence[SeedSummary]) -> float | None:
    """The mean of the eight medians of the paper's tables; None unless all are there."""
    medians = {summary.task: summary.median for summary in summaries}
    eight = [medians.get(task) for task in GLUE_AVERAGE]
    known = [median for median in eight if median is not None]
    return statistics.fmean(known) if len(known) == len(eight) else None


def results_table(title: str, summaries: Sequence[SeedSummary]) -> Table:
    """Scores in per cent; failed seeds by number."""
    table = Table("task", "metric", "median", "min", "max", "seeds", "failed", "other medians", title=title)
    for s in summaries:
        others = ", ".join(f"{name} {percent(s, value)}" for name, value in s.medians.items() if name != s.metric)
        table.add_row(
            s.task,
            s.metric,
            percent(s, s.median),
            percent(s, s.low),
            percent(s, s.high),
            str(len(s.scores)),
            ", ".join(map(str, s.failed)) or "none",
            others,
        )
    average = glue_average(summaries)
    if average is not None:
        table.add_row("GLUE", "mean of 8", f"{100 * average:.1f}")
    return table


def percent(summary: SeedSummary, value: float | None) -> str:
    """A score as it is printed: fractions times 100, SQuAD's are per cent already."""
    if value is None:
        return "-"
    return f"{value:.1f}" if summary.task.startswith("squad") else f"{100 * value:.1f}"
