"""Score against training FLOPs, one panel a task and one for their average: a PNG on white.

Thin lines are seeds, thick ones their median, one colour an objective; the dashed line is the median of the random
initialisations, where all of them begin.
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

from electra_dist.compare.config import RANDOM
from electra_dist.compare.table import AVERAGE, ScoreRow
from electra_dist.report.curves import print_style
from electra_dist.store.files import replacing

_COLORS = ("#2563eb", "#ea580c", "#15803d", "#7c3aed", "#b91c1c", "#0891b2", "#a16207", "#db2777")
_PANELS_ACROSS = 3


def write_picture(rows: Sequence[ScoreRow], titles: dict[str, str], path: Path) -> None:
    """Draw `rows`.

    Args:
        rows: of the table.
        titles: a panel for each task (its name -> what stands above it), in order.
        path: replaced as a whole.
    """
    num_across = min(_PANELS_ACROSS, len(titles))
    num_down = math.ceil(len(titles) / num_across)
    with matplotlib.rc_context(print_style()):
        layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
        size = (1.0 + 3.4 * num_across, 0.5 + 2.7 * num_down)
        figure = Figure(figsize=size, layout=layout, facecolor="white", dpi=150)
        panels = list(figure.subplots(num_down, num_across, squeeze=False).flat)
        for axes, (task, title) in zip(panels, titles.items()):
            _draw(axes, rows, task)
            axes.set_title(title, loc="left")
        for axes in panels[len(titles) :]:
            axes.set_axis_off()
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels) or 1))
        with replacing(path) as file:
            FigureCanvasAgg(figure).print_png(file)


def panel_titles(metrics: dict[str, str], rows: Sequence[ScoreRow]) -> dict[str, str]:
    """A title for every task (name -> metric) that has a score, and for the average."""
    has_average = any(AVERAGE in row.columns for row in rows)
    return {task: f"{task} ({metric})" for task, metric in metrics.items()} | (
        {AVERAGE: "average"} if has_average else {}
    )


def _draw(axes: Axes, rows: Sequence[ScoreRow], task: str) -> None:
    entries = dict.fromkeys(row.entry for row in rows if row.entry != RANDOM)
    for row in rows:
        if row.entry == RANDOM and task in row.columns:
            axes.axhline(
                row.columns[task].median, color="#6b7280", linestyle="--", linewidth=1, label="random weights"
            )
    for number, entry in enumerate(entries):
        color = _COLORS[number % len(_COLORS)]
        points = [(row.flops, row.columns[task]) for row in rows if row.entry == entry and task in row.columns]
        for seed in sorted({seed for _, summary in points for seed in summary.scores}):
            line = [(flops, summary.scores[seed]) for flops, summary in points if seed in summary.scores]
            axes.plot(*zip(*line), color=color, alpha=0.35, linewidth=0.8, marker=".", markersize=3)
        medians = [(flops, summary.median) for flops, summary in points]
        axes.plot(
            *(zip(*medians) if medians else ([], [])), color=color, linewidth=2, marker="o", markersize=4, label=entry
        )
    axes.set_xlim(0, 1.03 * max((row.flops for row in rows), default=0) or 1)
    axes.set_xlabel("training FLOPs")
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.2g}".replace("e+", "e") if x else "0"))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
