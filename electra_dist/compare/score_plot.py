"""Draw the scores of a comparison, and the curves of its runs, against training FLOPs as PNGs.

How: each task, and the average, has one panel, and each objective one color. A line joins the medians over the seeds,
and a vertical bar at each of its points goes from the lowest to the highest seed. The objectives are drawn beside each
other at each number of FLOPs, so that their bars do not cover one another. A task that is scored once only has one
column for each objective, with a dot for every seed. A dashed line marks the median score of the encoder's initial
weights, which are the same for all objectives. The curves are what the runs have recorded at their own evaluations.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from electra_dist.compare.comparison_config import RANDOM, TRIGRAM
from electra_dist.compare.comparison_plan import Cell
from electra_dist.compare.comparison_results import AVERAGE, ScoreRow
from electra_dist.report.plot_style import print_style
from electra_dist.run.metrics import iter_evaluations
from electra_dist.store.atomic_files import replacing

_COLORS = ("#2563eb", "#ea580c", "#15803d", "#7c3aed", "#b91c1c", "#0891b2", "#a16207", "#db2777")
_BASELINE_COLOR = "#6b7280"
# Anchor of the table -> its name in the legend, and its line style.
_ANCHORS = {RANDOM: ("random weights", "--"), TRIGRAM: ("trigram model", ":")}
_MAX_COLUMNS = 3  # panels beside each other
_MAX_LEGEND_COLUMNS = 6  # entries of the legend beside each other
_DODGE = 0.012  # distance of neighbouring objectives' points, as a share of the width of a panel


def write_scores(rows: Sequence[ScoreRow], titles: dict[str, str], path: Path) -> None:
    """Draw scores against training FLOPs, one panel per task, and write the picture as a PNG with a white background.

    `titles` maps each task to its panel's title; there may be no rows yet. An existing file is replaced atomically.
    """
    with _new_picture(titles.values(), _legend_handles(rows), path) as panels:
        for axes, task in zip(panels, titles):
            _draw_panel(axes, rows, task)


def write_curves(curves: Sequence[RunCurves], path: Path) -> None:
    """Draw what runs have recorded at their evaluations: a panel for each value, a line for each run (at least one).

    An existing file is replaced atomically.
    """
    color_of = _colors(run.entry for run in curves)
    titles = {field: title for field, title in CURVE_TITLES.items() if any(run.points[field] for run in curves)}
    handles = [Line2D([], [], color=color, linewidth=2, label=entry) for entry, color in color_of.items()]
    with _new_picture(titles.values(), handles, path) as panels:
        for axes, field in zip(panels, titles):
            for run in curves:
                flops = [point[0] for point in run.points[field]]
                values = [point[1] for point in run.points[field]]
                axes.plot(flops, values, color=color_of[run.entry], linewidth=1.3, alpha=0.8)
            _label_flops(axes)


@contextmanager
def _new_picture(titles: Iterable[str], legend_handles: Sequence[Line2D], path: Path) -> Iterator[list[Axes]]:
    """Yield empty panels with titles below a common legend, and write them as a PNG when the `with` block ends."""
    titles = list(titles)
    num_columns = min(_MAX_COLUMNS, len(titles))
    num_rows = math.ceil(len(titles) / num_columns)
    with matplotlib.rc_context(print_style()):
        layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
        width_inches = 1.0 + 3.4 * num_columns
        height_inches = 0.5 + 2.7 * num_rows
        figure = Figure(figsize=(width_inches, height_inches), layout=layout, facecolor="white", dpi=150)
        panels = list(figure.subplots(num_rows, num_columns, squeeze=False).flat)
        for axes, title in zip(panels, titles):
            axes.set_title(title, loc="left")
        # The grid may have more panels than there are titles.
        for unused_axes in panels[len(titles) :]:
            unused_axes.set_axis_off()
        yield panels[: len(titles)]
        # All panels have the same colors, so one legend above them serves for the picture.
        if legend_handles:
            num_legend_columns = min(_MAX_LEGEND_COLUMNS, len(legend_handles))
            figure.legend(handles=legend_handles, loc="outside upper left", ncols=num_legend_columns, fontsize=9)
        with replacing(path) as file:
            FigureCanvasAgg(figure).print_png(file)


def panel_titles(metrics: dict[str, str], rows: Sequence[ScoreRow]) -> dict[str, str]:
    """Return task -> title of its panel, such as "rte (accuracy)", and last the average if any row has it."""
    titles = {task: f"{task} ({metric})" for task, metric in metrics.items()}
    if any(AVERAGE in row.columns for row in rows):
        titles[AVERAGE] = "average"
    return titles


def _colors(entries: Iterable[str]) -> dict[str, str]:
    """Assign a color to each objective in `entries`, not to anchors; from the ninth objective on, colors repeat."""
    names = [entry for entry in dict.fromkeys(entries) if entry not in _ANCHORS]
    return dict(zip(names, itertools.cycle(_COLORS)))


def _legend_handles(rows: Sequence[ScoreRow]) -> list[Line2D]:
    handles = []
    for objective, color in _colors(row.entry for row in rows).items():
        handles.append(Line2D([], [], color=color, linewidth=2, marker="o", markersize=5, label=objective))
    for anchor, (label, linestyle) in _ANCHORS.items():
        if any(row.entry == anchor for row in rows):
            handles.append(Line2D([], [], color=_BASELINE_COLOR, linestyle=linestyle, linewidth=1, label=label))
    return handles


def _draw_panel(axes: Axes, rows: Sequence[ScoreRow], task: str) -> None:
    """Draw the scores of one task: columns if all were taken at the same FLOPs, otherwise lines."""
    # An anchor is a line across the panel, to which the scores of training can be compared.
    for row in rows:
        if row.entry in _ANCHORS and task in row.columns:
            _, linestyle = _ANCHORS[row.entry]
            axes.axhline(row.columns[task].median, color=_BASELINE_COLOR, linestyle=linestyle, linewidth=1)
    scored_rows = [row for row in rows if row.entry not in _ANCHORS and task in row.columns]
    is_scored_once = len({row.flops for row in scored_rows}) == 1
    if is_scored_once:
        _draw_columns(axes, scored_rows, task, _colors(row.entry for row in rows))
    else:
        _draw_lines(axes, rows, task)
    axes.margins(y=0.12)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))


def _draw_columns(axes: Axes, rows: Sequence[ScoreRow], task: str, color_of: dict[str, str]) -> None:
    """Draw a task that is scored at one number of FLOPs only: a column of dots for each objective, and the median."""
    objectives = list(color_of)
    for row in rows:
        column = objectives.index(row.entry)
        summary = row.columns[task]
        scores = list(summary.scores.values())
        axes.plot([column] * len(scores), scores, "o", color=color_of[row.entry], alpha=0.55, markersize=5)
        axes.hlines(summary.median, column - 0.28, column + 0.28, color=color_of[row.entry], linewidth=2.5)
    axes.set_xlim(-0.6, len(objectives) - 0.4)
    axes.set_xticks(range(len(objectives)), objectives, rotation=15 if len(objectives) > 3 else 0)
    axes.grid(visible=False, axis="x")


def _draw_lines(axes: Axes, rows: Sequence[ScoreRow], task: str) -> None:
    """Draw a task that is scored at several numbers of FLOPs: medians joined by lines, ranges as bars."""
    max_flops = max((row.flops for row in rows), default=0)
    right_end = 1.06 * max_flops if max_flops > 0 else 1
    color_of = _colors(row.entry for row in rows)
    for number, (objective, color) in enumerate(color_of.items()):
        shift = (number - (len(color_of) - 1) / 2) * _DODGE * right_end
        scored_rows = [row for row in rows if row.entry == objective and task in row.columns]
        flops = [row.flops + shift for row in scored_rows]
        summaries = [row.columns[task] for row in scored_rows]
        medians = [summary.median for summary in summaries]
        lows = [summary.low for summary in summaries]
        highs = [summary.high for summary in summaries]
        axes.vlines(flops, lows, highs, color=color, alpha=0.45, linewidth=2)
        axes.plot(flops, medians, color=color, linewidth=1.5, marker="o", markersize=4.5)
    axes.set_xlim(0, right_end)
    _label_flops(axes)


def _label_flops(axes: Axes) -> None:
    axes.set_xlabel("training FLOPs")
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(FuncFormatter(_format_flops))


def _format_flops(flops: float, _: int | None) -> str:
    """Format the label of an axis tick, as in "1.5e13"; matplotlib also passes the number of the tick."""
    if flops == 0:
        return "0"
    return f"{flops:.2g}".replace("e+", "e")


# Field of an evaluation's record -> title of its curve; values are of held-out rows.
CURVE_TITLES = {
    "context_auc": "context AUC",
    "auc": "ROC-AUC of replaced tokens",
    "mlm_loss": "loss of masked tokens",
}


@dataclass(frozen=True, kw_only=True)
class RunCurves:
    """What one run of a comparison has recorded at its evaluations, each value with the FLOPs of training so far."""

    entry: str  # name of the objective's entry
    seed: int
    points: dict[str, list[tuple[float, float]]]  # field of the record -> (FLOPs, value), ascending


def read_curves(cells: Sequence[Cell]) -> list[RunCurves]:
    """Return the curves of all runs that have recorded an evaluation, in the order of the runs.

    A quantity that a run does not record has no points; values that are not finite are left out.
    """
    curves = []
    for cell in cells:
        value_at: dict[str, dict[int, float]] = {field: {} for field in CURVE_TITLES}  # by step
        for record in iter_evaluations(Path(cell.config.run_dir)):
            for field, values in value_at.items():
                value = getattr(record, field)
                if math.isfinite(value):
                    values[record.step] = value  # A step that was repeated after a restart counts once.
        points = {}
        for field, values in value_at.items():
            points[field] = [(cell.flops(step), value) for step, value in sorted(values.items())]
        if any(points.values()):
            curves.append(RunCurves(entry=cell.entry, seed=cell.seed, points=points))
    return curves
