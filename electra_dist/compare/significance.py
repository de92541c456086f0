"""Compare the scores of two objectives seed by seed, with standard errors and a paired t-test.

How: two runs with the same seed read the same rows in the same order, so their scores are paired: the difference of
each seed is formed first. Two errors are stated. The seed error is the standard error of the mean difference over the
seeds, sd / sqrt(n). The test error is that of the choice of the test examples, which are the same for all seeds, so
more seeds do not make it smaller: it is sqrt(e_1^2 + e_2^2) for the mean errors of the two objectives. It is an upper
bound, because both objectives are tested on the same examples.

Limits: with two seeds the seed error has one degree of freedom, so a difference of two standard errors has p = 0.3.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

from rich.table import Table
from scipy import stats

from electra_dist.compare.checkpoint_scores import Score
from electra_dist.compare.score_tables import markdown_row

REMARK = (
    "Mean over the seeds of the difference to the baseline, paired by seed, in points of a per cent. After +- comes "
    "the standard error: the larger one of that over the seeds and that over the test examples. p is that of a "
    "two-sided paired t-test over the seeds."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """An objective's score minus the baseline's score on one task, averaged over the seeds, as a fraction."""

    entry: str  # name of the objective
    baseline: str  # name of the objective with which it is compared
    task: str
    mean: float
    num_seeds: int  # seeds with a score of both
    seed_error: float | None  # standard error over the seeds; None with a single seed
    test_error: float | None  # standard error over the choice of the test examples; None if it is not known
    p_value: float | None  # two-sided, of a paired t-test over the seeds; None with a single seed

    @property
    def standard_error(self) -> float | None:
        """Return the larger of the standard errors over seeds and over test examples; None if neither is known."""
        return max((error for error in (self.seed_error, self.test_error) if error is not None), default=None)


def paired_difference(scores: Sequence[Score], entry: str, baseline: str, task: str) -> Difference | None:
    """Return the mean of `entry` minus `baseline` on a task, paired by seed; None if no seed has scores of both.
    `scores` are those of the runs' last checkpoints.
    """
    entry_scores = _by_seed(scores, entry, task)
    baseline_scores = _by_seed(scores, baseline, task)
    seeds = sorted(set(entry_scores) & set(baseline_scores))
    if not seeds:
        return None
    gains = [_value(entry_scores[seed]) - _value(baseline_scores[seed]) for seed in seeds]
    mean = statistics.fmean(gains)
    seed_error = None
    p_value = None
    if len(seeds) > 1:
        seed_error = statistics.stdev(gains) / math.sqrt(len(seeds))
        p_value = _p_value(mean, seed_error, len(seeds))
    return Difference(
        entry=entry,
        baseline=baseline,
        task=task,
        mean=mean,
        num_seeds=len(seeds),
        seed_error=seed_error,
        test_error=_test_error([entry_scores[seed] for seed in seeds], [baseline_scores[seed] for seed in seeds]),
        p_value=p_value,
    )


def difference_text(difference: Difference | None) -> str:
    """Format a difference in percentage points with its standard error, as in "+1.2 +- 0.4 (p 0.03)"; "-" for None."""
    if difference is None:
        return "-"
    text = f"{100 * difference.mean:+.1f}"
    if difference.standard_error is not None:
        text += f" +- {100 * difference.standard_error:.1f}"
    if difference.p_value is not None:
        text += f" (p {difference.p_value:.2g})"
    return text


def difference_rows(
    scores: Sequence[Score], entries: Sequence[str], baseline: str, tasks: Sequence[str]
) -> list[list[str]]:
    """Return a row of texts for each objective but the baseline: its name, then its difference on each task."""
    rows = []
    for entry in entries:
        if entry == baseline:
            continue
        texts = [difference_text(paired_difference(scores, entry, baseline, task)) for task in tasks]
        rows.append([entry, *texts])
    return rows


def console_differences(rows: Sequence[Sequence[str]], baseline: str, tasks: Sequence[str]) -> Table:
    """Return the differences to the baseline as a table for the terminal, with a note on the errors below it."""
    table = Table(f"minus {baseline}", *tasks, title="differences at the end of the runs", caption=REMARK)
    for row in rows:
        table.add_row(*row)
    return table


def markdown_differences(rows: Sequence[Sequence[str]], baseline: str, tasks: Sequence[str]) -> list[str]:
    """Return the differences to the baseline as the lines of a section of compare.md."""
    lines = ["## Differences at the end of the runs", "", REMARK, ""]
    lines.append(markdown_row([f"minus {baseline}", *tasks]))
    lines.append("|---|" + "--:|" * len(tasks))
    for row in rows:
        lines.append(markdown_row(row))
    return [*lines, ""]


def _by_seed(scores: Sequence[Score], entry: str, task: str) -> dict[int, Score]:
    by_seed = {}
    for score in scores:
        if score.entry == entry and score.task == task and score.score is not None:
            by_seed[score.seed] = score
    return by_seed


def _value(score: Score) -> float:
    assert score.score is not None
    return score.score


def _p_value(mean: float, standard_error: float, num_seeds: int) -> float:
    """Return the two-sided p-value of a paired t-test; for a standard error of 0, it is 1 if the mean is 0, else 0."""
    if standard_error == 0.0:
        return 1.0 if mean == 0.0 else 0.0
    statistic = abs(mean) / standard_error
    return float(2.0 * stats.t.sf(statistic, num_seeds - 1))


def _test_error(entry_scores: Sequence[Score], baseline_scores: Sequence[Score]) -> float | None:
    """Return a difference's standard error over the choice of test examples; None if one of the scores has none."""
    squares = 0.0
    for scores in (entry_scores, baseline_scores):
        errors = [score.standard_error for score in scores if score.standard_error is not None]
        if len(errors) < len(scores):
            return None
        squares += statistics.fmean(errors) ** 2
    return math.sqrt(squares)
