"""Draws the scores of a comparison against training FLOPs as a PNG, one panel per task and one for their average.

How: each objective has one color. Thin lines are single seeds, thick lines their median. A dashed line marks the
median of the initial weights, where all objectives start.
"""

from __future__ import annotations

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
_PANELS_ACROSS = 3


def write_picture(rows: Sequence[ScoreRow], titles: dict[str, str], path: Path) -> None:
    """Draw scores against training FLOPs and write the picture as a PNG with a white background.

    Args:
        rows: scores of each objective after some number of steps; there may be none yet.
        titles: task -> title of its panel, in the order of the panels; at least one.
        path: the PNG file; an existing file is replaced at once, so readers never see half a picture.
    """
    num_across = min(_PANELS_ACROSS, len(titles))
    num_down = math.ceil(len(titles) / num_across)
    with matplotlib.rc_context(print_style()):
        layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
        size_inches = (1.0 + 3.4 * num_across, 0.5 + 2.7 * num_down)
        figure = Figure(figsize=size_inches, layout=layout, facecolor="white", dpi=150)
        panels = list(figure.subplots(num_down, num_across, squeeze=False).flat)
        for axes, (task, title) in zip(panels, titles.items()):
            _draw_panel(axes, rows, task)
            axes.set_title(title, loc="left")
        for unused_axes in panels[len(titles) :]:
            unused_axes.set_axis_off()
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels) or 1))
        with replacing(path) as file:
            FigureCanvasAgg(figure).print_png(file)


def panel_titles(metrics: dict[str, str], rows: Sequence[ScoreRow]) -> dict[str, str]:
    """Return the titles of the picture's panels: one per task, and one for the average if any row has it.

    Args:
        metrics: task -> name of its metric, in the order of the panels.
        rows: rows of the table.
    """
    titles = {task: f"{task} ({metric})" for task, metric in metrics.items()}
    if any(AVERAGE in row.columns for row in rows):
        titles[AVERAGE] = "average"
    return titles


def _draw_panel(axes: Axes, rows: Sequence[ScoreRow], task: str) -> None:
    """Draw the panel of one task: the score of the initial weights, the lines of all objectives, and the axes."""
    for row in rows:
        if row.entry == RANDOM and task in row.columns:
            baseline = row.columns[task].median
            axes.axhline(baseline, color=_BASELINE_COLOR, linestyle="--", linewidth=1, label="random weights")
    entries = dict.fromkeys(row.entry for row in rows if row.entry != RANDOM)
    for number, entry in enumerate(entries):
        _draw_entry(axes, [row for row in rows if row.entry == entry], task, _COLORS[number % len(_COLORS)])
    max_flops = max((row.flops for row in rows), default=0)
    axes.set_xlim(0, 1.03 * max_flops or 1)
    axes.set_xlabel("training FLOPs")
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(FuncFormatter(_format_flops))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))


def _draw_entry(axes: Axes, rows: Sequence[ScoreRow], task: str, color: str) -> None:
    """Draw one objective's scores on a task: a thin line for each seed and a thick one for their median.

    An objective without scores gets an empty line, so that it is in the legend.
    """
    points = [(row.flops, row.columns[task]) for row in rows if task in row.columns]
    seeds = sorted({seed for _, summary in points for seed in summary.scores})
    for seed in seeds:
        seed_points = [(flops, summary.scores[seed]) for flops, summary in points if seed in summary.scores]
        axes.plot(*zip(*seed_points), color=color, alpha=0.35, linewidth=0.8, marker=".", markersize=3)
    flops = [flops for flops, _ in points]
    medians = [summary.median for _, summary in points]
    label = rows[0].entry
    axes.plot(flops, medians, color=color, linewidth=2, marker="o", markersize=4, label=label)


def _format_flops(flops: float, _: int | None) -> str:
    """Format a tick of the FLOPs axis with two digits, as in "1.5e13".

    matplotlib passes the number of the tick as the second argument, which is not used.
    """
    if flops == 0:
        return "0"
    return f"{flops:.2g}".replace("e+", "e")
