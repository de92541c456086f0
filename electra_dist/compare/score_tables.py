"""Make tables of a comparison's scores: medians over seeds with their spread, and failures.

Guarantee: if a score is computed from fewer seeds than the comparison has, it is shown with their number, and each
failure is listed with its reason. A degenerate result (all predictions equal) counts with its score, and is listed,
too.

The average of a checkpoint is the mean of its scores on minimal pairs and on the tasks that are scored at all
checkpoints. A checkpoint that lacks one of these scores has no average.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from rich.table import Table

from electra_dist.compare.checkpoint_scores import Score
from electra_dist.compare.comparison_config import RANDOM
from electra_dist.escapes import markdown_text

AVERAGE = "average"  # name of the last column


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
    """Record of a run that did not finish, a checkpoint that could not be scored, or a failed seed of fine-tuning."""

    entry: str  # name of the objective's entry, or "random" for the initial weights
    seed: int
    what: str  # what has failed and why, in one line


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreSummary:
    """Scores of one objective on one task after some steps, for all its seeds, as fractions: one cell of the table."""

    median: float
    low: float
    high: float
    scores: dict[int, float]  # seed -> score


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreRow:
    """Row of the table of scores: one objective after some number of steps, or the initial weights, with step 0."""

    entry: str  # name of the objective's entry, or "random" for the initial weights
    step: int
    flops: float  # training FLOPs up to that step
    columns: dict[str, ScoreSummary]  # task, or `AVERAGE` -> scores; a task without any score is left out


def summarize_rows(scores: Sequence[Score], tasks: Mapping[str, bool]) -> list[ScoreRow]:
    """Group scores into table rows, by objective, in the order in which the objectives first occur, and then by step.
    `tasks` maps each task, in the order of the columns, to whether it counts in the average. The average is a column
    only if two or more tasks count.
    """
    scores_of_row: dict[tuple[str, int], list[Score]] = {}  # keyed by (objective, step)
    for score in scores:
        scores_of_row.setdefault((score.entry, score.step), []).append(score)
    objectives = list(dict.fromkeys(score.entry for score in scores))
    row_keys = sorted(scores_of_row, key=lambda row_key: (objectives.index(row_key[0]), row_key[1]))

    rows = []
    for objective, step in row_keys:
        row_scores = scores_of_row[objective, step]
        columns = _summarize_columns(row_scores, tasks)
        rows.append(ScoreRow(entry=objective, step=step, flops=row_scores[0].flops, columns=columns))
    return rows


def _summarize_columns(row_scores: Sequence[Score], tasks: Mapping[str, bool]) -> dict[str, ScoreSummary]:
    by_task = {task: _scores_by_seed(row_scores, task) for task in tasks}
    averaged_tasks = [task for task, is_averaged in tasks.items() if is_averaged]
    if len(averaged_tasks) > 1:
        by_task[AVERAGE] = _average_by_seed([by_task[task] for task in averaged_tasks])
    return {task: _summarize(by_seed) for task, by_seed in by_task.items() if by_seed}


def score_failures(scores: Sequence[Score]) -> list[Failure]:
    """Return the failures recorded in scores, with descriptions such as "rte after 1,000 steps: degenerate: ..."."""
    failures = []
    for score in scores:
        for reason in score.failures:
            description = f"{score.task} after {score.step:,} steps: {reason}"
            failures.append(Failure(entry=score.entry, seed=score.seed, what=description))
    return failures


def console_table(title: str, rows: Sequence[ScoreRow], num_seeds: int) -> Table:
    """Return the rows as a table for the terminal: median, lowest and highest seed in per cent."""
    columns = _columns(rows)
    table = Table("objective", "steps", "FLOPs", *columns, title=title)
    for row in rows:
        table.add_row(*_row_texts(row, columns, num_seeds))
    return table


def markdown(
    title: str,
    rows: Sequence[ScoreRow],
    failures: Sequence[Failure],
    num_seeds: int,
    notes: Sequence[str],
    sections: Sequence[str] = (),
) -> str:
    """Return a Markdown page with the table of scores and, below it, the failures.
    `notes` are lines before the table, `sections` lines between the table and the failures.
    """
    columns = _columns(rows)
    table_lines = [
        markdown_row(["objective", "steps", "FLOPs", *columns]),
        "|---|--:|--:|" + "--:|" * len(columns),  # aligns the objectives left, and all other columns right
    ]
    for row in rows:
        table_lines.append(markdown_row(_row_texts(row, columns, num_seeds)))

    failure_lines = [f"* {failure.entry} seed {failure.seed}: {markdown_text(failure.what)}" for failure in failures]
    if not failure_lines:
        failure_lines = ["None."]

    lines = [
        f"# {markdown_text(title)}",
        "",
        *notes,
        "",
        *table_lines,
        "",
        *sections,
        "## Failed or degenerate",
        "",
        *failure_lines,
    ]
    return "\n".join(lines) + "\n"


def _scores_by_seed(scores: Sequence[Score], task: str) -> dict[int, float]:
    """Return each pretraining seed's score on one task; seeds without a score are left out."""
    return {score.seed: score.score for score in scores if score.task == task and score.score is not None}


def _average_by_seed(by_task: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Return each seed's mean score over the tasks, by ascending seed; seeds that lack a score are left out."""
    seeds_per_task = [set(by_seed) for by_seed in by_task]
    complete_seeds = set.intersection(*seeds_per_task)
    return {seed: statistics.fmean(by_seed[seed] for by_seed in by_task) for seed in sorted(complete_seeds)}


def _summarize(by_seed: dict[int, float]) -> ScoreSummary:
    values = list(by_seed.values())
    return ScoreSummary(median=statistics.median(values), low=min(values), high=max(values), scores=by_seed)


def _columns(rows: Sequence[ScoreRow]) -> list[str]:
    """Return the tasks with a score in any row, in the order in which they first occur, then the average."""
    names = list(dict.fromkeys(name for row in rows for name in row.columns))  # without repetitions, in order
    if AVERAGE in names:
        names.remove(AVERAGE)
        names.append(AVERAGE)
    return names


def _row_texts(row: ScoreRow, columns: Sequence[str], num_seeds: int) -> list[str]:
    name = "random initialisation" if row.entry == RANDOM else row.entry
    scores = [_score_text(row.columns.get(column), num_seeds) for column in columns]
    return [name, f"{row.step:,}", f"{row.flops:.3g}", *scores]


def _score_text(summary: ScoreSummary | None, num_seeds: int) -> str:
    """Format one table cell in per cent, as in "70.0 (60.0 to 90.0, 2 of 3 seeds)"; "-" if there is no score."""
    if summary is None:
        return "-"
    num_scores = len(summary.scores)
    spread = f"{100 * summary.low:.1f} to {100 * summary.high:.1f}"
    if num_scores < num_seeds:
        spread += f", {num_scores} of {num_seeds} seeds"
    return f"{100 * summary.median:.1f} ({spread})"


def markdown_row(cells: Sequence[str]) -> str:
    """Return a row of a Markdown table, as in "| rtd | 1,000 |"; a cell must not contain "|"."""
    return f"| {' | '.join(cells)} |"
