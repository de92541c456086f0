"""Makes tables of the differences between the objectives of a comparison and a baseline at the end of their runs."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from electra_dist.compare.checkpoint_scores import Score
from electra_dist.compare.score_tables import markdown_row
from electra_dist.compare.significance import difference_text, paired_difference

REMARK = (
    "Mean over the seeds of the difference to the baseline, paired by seed, in points of a per cent. After +- comes "
    "the standard error: the larger one of that over the seeds and that over the test examples. p is that of a "
    "two-sided paired t-test over the seeds."
)


def difference_rows(
    scores: Sequence[Score], entries: Sequence[str], baseline: str, tasks: Sequence[str]
) -> list[list[str]]:
    """Return the cells of the table: the name of each objective except the baseline, then its differences.

    Args:
        scores: scores of the last checkpoints of the comparison's runs.
        entries: names of the objectives, in the order of the rows.
        baseline: name of the objective whose scores are subtracted.
        tasks: names of the tasks, in the order of the columns; a cell without scores is "-".
    """
    rows = []
    for entry in entries:
        if entry == baseline:
            continue
        texts = [difference_text(paired_difference(scores, entry, baseline, task)) for task in tasks]
        rows.append([entry, *texts])
    return rows


def console_differences(rows: Sequence[Sequence[str]], baseline: str, tasks: Sequence[str]) -> Table:
    """Return the differences as a table for the terminal, with the remark about errors below it."""
    table = Table(f"minus {baseline}", *tasks, title="differences at the end of the runs", caption=REMARK)
    for row in rows:
        table.add_row(*row)
    return table


def markdown_differences(rows: Sequence[Sequence[str]], baseline: str, tasks: Sequence[str]) -> list[str]:
    """Return the differences as the lines of a section of a Markdown page."""
    lines = ["## Differences at the end of the runs", "", REMARK, ""]
    lines.append(markdown_row([f"minus {baseline}", *tasks]))
    lines.append("|---|" + "--:|" * len(tasks))
    for row in rows:
        lines.append(markdown_row(row))
    return [*lines, ""]
