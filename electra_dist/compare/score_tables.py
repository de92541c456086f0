"""Makes tables of a comparison's scores: medians over seeds with their spread, and failures.

Guarantee: if seeds are missing, a score is shown with the number of seeds that it is computed from, and each missing
or failed seed is listed with its reason. A degenerate result (all predictions equal) counts with its score, and is
listed.

The average of an encoder is the mean over the minimal pairs and all tasks that are scored at all checkpoints. It
exists for encoders that have all of these scores.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from rich.table import Table

from electra_dist.compare.checkpoint_scores import Score
from electra_dist.compare.comparison_config import RANDOM

AVERAGE = "average"  # name of the last column


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
    """Record of a run or a checkpoint without a result, or of a task on which a model learnt nothing."""

    entry: str  # name of the objective's entry, or "random" for the initial weights
    seed: int
    what: str  # what has failed and why, in one line


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreSummary:
    """Cell of the table: the scores of one objective after some number of steps on one task, as fractions."""

    median: float
    low: float
    high: float
    scores: dict[int, float]  # seed -> score


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreRow:
    """Row of the table: one objective after some number of steps, or the initial weights."""

    entry: str  # name of the objective's entry, or "random" for the initial weights
    step: int
    flops: float  # training FLOPs up to that step
    columns: dict[str, ScoreSummary]  # task, or `AVERAGE` -> scores; a task without any score is left out


def summarize_rows(scores: Sequence[Score], tasks: Mapping[str, bool]) -> list[ScoreRow]:
    """Group scores into the rows of the table: one for each step of an objective.

    Objectives are in the order in which they first occur in the scores; the rows of one are ordered by step.

    Args:
        scores: all scores of the comparison.
        tasks: task -> whether it counts in the average, in the order of the columns. With less than two tasks that
            count, there is no average.
    """
    averaged = [task for task, is_averaged in tasks.items() if is_averaged]
    rows = []
    for entry in dict.fromkeys(score.entry for score in scores):
        for step in sorted({score.step for score in scores if score.entry == entry}):
            row_scores = [score for score in scores if score.entry == entry and score.step == step]
            by_task = {task: _scores_by_seed(row_scores, task) for task in tasks}
            if len(averaged) > 1:
                by_task[AVERAGE] = _average_by_seed([by_task[task] for task in averaged])
            columns = {task: _summarize(by_seed) for task, by_seed in by_task.items() if by_seed}
            rows.append(ScoreRow(entry=entry, step=step, flops=row_scores[0].flops, columns=columns))
    return rows


def score_failures(scores: Sequence[Score]) -> list[Failure]:
    """Return the failures that are stored in scores, one per line, each line with the task and the step before it."""
    return [
        Failure(entry=score.entry, seed=score.seed, what=f"{score.task} after {score.step:,} steps: {text}")
        for score in scores
        for text in score.failures
    ]


def console_table(title: str, rows: Sequence[ScoreRow], num_seeds: int) -> Table:
    """Return the rows as a table for the terminal: medians in per cent with the lowest and the highest seed.

    Args:
        title: shown above the table.
        rows: rows of the table.
        num_seeds: seeds of the comparison; a cell with fewer shows their number.
    """
    columns = _columns(rows)
    table = Table("objective", "steps", "FLOPs", *columns, title=title)
    for row in rows:
        table.add_row(*_row_texts(row, columns, num_seeds))
    return table


def markdown(
    title: str, rows: Sequence[ScoreRow], failures: Sequence[Failure], num_seeds: int, notes: Sequence[str]
) -> str:
    """Return the table and the failures as a Markdown page.

    Args:
        title: heading of the page.
        rows: rows of the table.
        failures: listed below the table.
        num_seeds: seeds of the comparison; a cell with fewer shows their number.
        notes: lines between the heading and the table.
    """
    columns = _columns(rows)
    table = [
        _markdown_row(["objective", "steps", "FLOPs", *columns]),
        "|---|--:|--:|" + "--:|" * len(columns),
        *(_markdown_row(_row_texts(row, columns, num_seeds)) for row in rows),
    ]
    failure_lines = [f"* {failure.entry} seed {failure.seed}: {failure.what}" for failure in failures] or ["None."]
    lines = [f"# {title}", "", *notes, "", *table, "", "## Failed or degenerate", "", *failure_lines]
    return "\n".join(lines) + "\n"


def _scores_by_seed(scores: Sequence[Score], task: str) -> dict[int, float]:
    """Return seed -> score on one task; seeds without a score are left out."""
    return {score.seed: score.score for score in scores if score.task == task and score.score is not None}


def _average_by_seed(by_task: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Return seed -> mean over the tasks (each seed -> score), for the seeds that every task has, ascending."""
    complete_seeds = set.intersection(*(set(by_seed) for by_seed in by_task))
    return {seed: statistics.fmean(by_seed[seed] for by_seed in by_task) for seed in sorted(complete_seeds)}


def _summarize(by_seed: dict[int, float]) -> ScoreSummary:
    """Summarize at least one score by the median, the lowest and the highest; `by_seed` is seed -> score."""
    values = list(by_seed.values())
    return ScoreSummary(median=statistics.median(values), low=min(values), high=max(values), scores=by_seed)


def _columns(rows: Sequence[ScoreRow]) -> list[str]:
    """Return the names of the table's columns, those that at least one row has, with the average last."""
    names = list(dict.fromkeys(name for row in rows for name in row.columns if name != AVERAGE))
    if any(AVERAGE in row.columns for row in rows):
        names.append(AVERAGE)
    return names


def _row_texts(row: ScoreRow, columns: Sequence[str], num_seeds: int) -> list[str]:
    """Return the texts of a row: objective, steps, FLOPs, then one per column."""
    name = "random initialisation" if row.entry == RANDOM else row.entry
    scores = [_score_text(row.columns.get(column), num_seeds) for column in columns]
    return [name, f"{row.step:,}", f"{row.flops:.3g}", *scores]


def _score_text(summary: ScoreSummary | None, num_seeds: int) -> str:
    """Format a cell in per cent, as in "70.0 (60.0 to 90.0, 2 of 3 seeds)"; "-" if there is no score."""
    if summary is None:
        return "-"
    num_scores = len(summary.scores)
    missing = f", {num_scores} of {num_seeds} seeds" if num_scores < num_seeds else ""
    return f"{100 * summary.median:.1f} ({100 * summary.low:.1f} to {100 * summary.high:.1f}{missing})"


def _markdown_row(cells: Sequence[str]) -> str:
    """Return a row of a Markdown table."""
    return f"| {' | '.join(cells)} |"
