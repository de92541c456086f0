"""What the scores come to: medians over seeds, the spread, the failures; for a terminal, as Markdown, as JSON.

Guarantee: a number says how many seeds it is of where some are missing, and each missing or failed seed is named with
its reason. A degenerate result (all predictions equal) counts with its score, and is named.

The average of an encoder is the mean over minimal pairs and all tasks that are scored at all checkpoints, in per cent;
it is there where all of them are.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence

from rich.table import Table

from electra_dist.compare.config import RANDOM
from electra_dist.compare.scoring import Score

AVERAGE = "average"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
    """Something that is missing, or that learnt nothing."""

    entry: str
    seed: int
    what: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreSummary:
    """One place of the table: an objective after so many FLOPs, on one task."""

    median: float
    low: float
    high: float
    scores: dict[int, float]  # by seed


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreRow:
    """An objective after so many steps, or the baseline."""

    entry: str
    step: int
    flops: float
    columns: dict[str, ScoreSummary]  # by task; a task without any score is not there


def summarize_rows(scores: Sequence[Score], tasks: Mapping[str, bool]) -> list[ScoreRow]:
    """The rows of the table, by entry in the order of the scores, then by step.

    Args:
        scores: of everything.
        tasks: the columns, and whether the average is taken over them, too.
    """
    averaged = [task for task, is_averaged in tasks.items() if is_averaged]
    rows = []
    for entry in dict.fromkeys(score.entry for score in scores):
        for step in sorted({score.step for score in scores if score.entry == entry}):
            here = [score for score in scores if (score.entry, score.step) == (entry, step)]
            by_task = {
                task: {s.seed: s.score for s in here if s.task == task and s.score is not None} for task in tasks
            }
            if len(averaged) > 1:
                complete = set.intersection(*(set(by_task[task]) for task in averaged))
                means = {seed: statistics.fmean(by_task[task][seed] for task in averaged) for seed in complete}
                by_task[AVERAGE] = dict(sorted(means.items()))
            columns = {task: _summary(found) for task, found in by_task.items() if found}
            rows.append(ScoreRow(entry=entry, step=step, flops=here[0].flops, columns=columns))
    return rows


def score_failures(scores: Sequence[Score]) -> list[Failure]:
    """A failure for each word of one in the scores."""
    return [
        Failure(entry=s.entry, seed=s.seed, what=f"{s.task} after {s.step:,} steps: {text}")
        for s in scores
        for text in s.failures
    ]


def console_table(title: str, rows: Sequence[ScoreRow], num_seeds: int) -> Table:
    """Medians in per cent, the lowest and the highest beside them."""
    columns = _columns(rows)
    table = Table("objective", "steps", "FLOPs", *columns, title=title)
    for cells in _cells(rows, columns, num_seeds):
        table.add_row(*cells)
    return table


def markdown(
    title: str, rows: Sequence[ScoreRow], failures: Sequence[Failure], num_seeds: int, notes: Sequence[str]
) -> str:
    """The same as a page."""
    columns = _columns(rows)
    lines = [f"# {title}", "", *notes, ""]
    lines += [_line(["objective", "steps", "FLOPs", *columns]), "|---|--:|--:|" + "--:|" * len(columns)]
    lines += [_line(cells) for cells in _cells(rows, columns, num_seeds)]
    lines += ["", "## Failed or degenerate", ""]
    lines += [f"* {f.entry} seed {f.seed}: {f.what}" for f in failures] or ["None."]
    return "\n".join(lines) + "\n"


def _columns(rows: Sequence[ScoreRow]) -> list[str]:
    names = dict.fromkeys(name for row in rows for name in row.columns if name != AVERAGE)
    return [*names, *([AVERAGE] if any(AVERAGE in row.columns for row in rows) else [])]


def _cells(rows: Sequence[ScoreRow], columns: Sequence[str], num_seeds: int) -> Iterator[list[str]]:
    for row in rows:
        name = "random initialisation" if row.entry == RANDOM else row.entry
        texts = [_text(row.columns.get(column), num_seeds) for column in columns]
        yield [name, f"{row.step:,}", f"{row.flops:.3g}", *texts]


def _text(summary: ScoreSummary | None, num_seeds: int) -> str:
    if summary is None:
        return "-"
    missing = f", {len(summary.scores)} of {num_seeds} seeds" if len(summary.scores) < num_seeds else ""
    return f"{100 * summary.median:.1f} ({100 * summary.low:.1f} to {100 * summary.high:.1f}{missing})"


def _summary(scores: dict[int, float]) -> ScoreSummary:
    values = list(scores.values())
    return ScoreSummary(median=statistics.median(values), low=min(values), high=max(values), scores=scores)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
