"""Draws the scores of a comparison against training FLOPs as a PNG, one panel per task and one for their average.

How: each objective has one color. Thin lines are single seeds, thick lines their median. A dashed line marks the
median score of the encoder's initial weights, which are the same for all objectives.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from electra_dist.compare.comparison_config import RANDOM
from electra_dist.compare.score_tables import AVERAGE, ScoreRow
from electra_dist.report.curves import print_style
from electra_dist.store.atomic_files import replacing

_COLORS = ("#2563eb", "#ea580c", "#15803d", "#7c3aed", "#b91c1c", "#0891b2", "#a16207", "#db2777")
_BASELINE_COLOR = "#6b7280"
_MAX_COLUMNS = 3  # panels beside each other
_MAX_LEGEND_COLUMNS = 4  # entries of the legend beside each other


def write_picture(rows: Sequence[ScoreRow], titles: dict[str, str], path: Path) -> None:
    """Draw scores against training FLOPs, one panel per task, and write the picture as a PNG with a white background.

    Args:
        rows: scores, one row for each objective and number of steps; there may be none yet.
        titles: task -> title of its panel, in the order of the panels; at least one.
        path: the PNG file; an existing file is replaced at once, so readers never see half a picture.
    """
    num_columns = min(_MAX_COLUMNS, len(titles))
    num_rows = math.ceil(len(titles) / num_columns)
    with matplotlib.rc_context(print_style()):
        layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
        width_inches = 1.0 + 3.4 * num_columns
        height_inches = 0.5 + 2.7 * num_rows
        figure = Figure(figsize=(width_inches, height_inches), layout=layout, facecolor="white", dpi=150)
        panels = list(figure.subplots(num_rows, num_columns, squeeze=False).flat)
        for axes, (task, title) in zip(panels, titles.items()):
            _draw_panel(axes, rows, task)
            axes.set_title(title, loc="left")
        # The grid may have more panels than there are tasks.
        for unused_axes in panels[len(titles) :]:
            unused_axes.set_axis_off()
        # All panels have the same lines, so the first panel provides the legend of the picture.
        handles, labels = panels[0].get_legend_handles_labels()
        num_legend_columns = max(1, min(_MAX_LEGEND_COLUMNS, len(labels)))
        figure.legend(handles, labels, loc="outside lower center", ncols=num_legend_columns)
        with replacing(path) as file:
            FigureCanvasAgg(figure).print_png(file)


def panel_titles(metrics: dict[str, str], rows: Sequence[ScoreRow]) -> dict[str, str]:
    """Return the titles of the picture's panels: one per task, and one for the average if any row has it.

    Args:
        metrics: task -> name of its metric, in the order of the panels.
        rows: scores, one row for each objective and number of steps.

    Returns:
        Task -> title, such as "rte (accuracy)"; the average is the last one.
    """
    titles = {task: f"{task} ({metric})" for task, metric in metrics.items()}
    if any(AVERAGE in row.columns for row in rows):
        titles[AVERAGE] = "average"
    return titles


def _draw_panel(axes: Axes, rows: Sequence[ScoreRow], task: str) -> None:
    """Draw the panel of one task: the score of the initial weights, the lines of all objectives, and the axes.

    Args:
        axes: the empty panel.
        rows: scores, one row for each objective and number of steps. The row of the initial weights has `RANDOM` in
            place of the objective's name.
        task: name of the task, or `AVERAGE`.
    """
    # The initial weights are a dashed line across the panel, to which the scores of training can be compared.
    for row in rows:
        if row.entry == RANDOM and task in row.columns:
            baseline = row.columns[task].median
            axes.axhline(baseline, color=_BASELINE_COLOR, linestyle="--", linewidth=1, label="random weights")

    # Each objective has the same color in all panels; colors repeat if there are more objectives than colors.
    objectives = list(dict.fromkeys(row.entry for row in rows if row.entry != RANDOM))
    for objective, color in zip(objectives, itertools.cycle(_COLORS)):
        objective_rows = [row for row in rows if row.entry == objective]
        _draw_objective(axes, objective_rows, task, color)

    max_flops = max((row.flops for row in rows), default=0)
    right_end = 1.03 * max_flops if max_flops > 0 else 1
    axes.set_xlim(0, right_end)
    axes.set_xlabel("training FLOPs")
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(FuncFormatter(_format_flops))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))


def _draw_objective(axes: Axes, rows: Sequence[ScoreRow], task: str, color: str) -> None:
    """Draw one objective's scores on a task: a thin line for each seed and a thick one for their median.

    Args:
        axes: the panel of the task.
        rows: scores of the objective, one row for each number of steps, ascending; at least one row.
        task: name of the task, or `AVERAGE`. If the objective has no scores on it, its line is empty, but the legend
            shows the objective.
        color: color of all lines.
    """
    scored_rows = [row for row in rows if task in row.columns]
    seeds: set[int] = set()
    for row in scored_rows:
        seeds.update(row.columns[task].scores)
    for seed in sorted(seeds):
        seed_rows = [row for row in scored_rows if seed in row.columns[task].scores]
        seed_flops = [row.flops for row in seed_rows]
        seed_scores = [row.columns[task].scores[seed] for row in seed_rows]
        axes.plot(seed_flops, seed_scores, color=color, alpha=0.35, linewidth=0.8, marker=".", markersize=3)

    flops = [row.flops for row in scored_rows]
    medians = [row.columns[task].median for row in scored_rows]
    axes.plot(flops, medians, color=color, linewidth=2, marker="o", markersize=4, label=rows[0].entry)


def _format_flops(flops: float, _: int | None) -> str:
    """Format a tick of the FLOPs axis with two significant digits, as in "1.5e13".

    matplotlib passes the number of the tick as the second argument, which is not used.
    """
    if flops == 0:
        return "0"
    return f"{flops:.2g}".replace("e+", "e")
