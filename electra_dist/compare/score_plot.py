"""Draw the scores of a comparison, and the curves of its runs, against training FLOPs: as PNGs, and for its page.

How: each task, and the average, has one panel, and each objective one color. A line joins the medians over the seeds,
and a vertical bar at each of its points goes from the lowest to the highest seed. The objectives are drawn beside each
other at each number of FLOPs, so that their bars do not cover one another. A task that is scored once only has one
column for each objective, with a dot for every seed. A dashed line marks the median score of the encoder's initial
weights, which are the same for all objectives. The curves are what the runs have recorded at their own evaluations.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from electra_dist.compare.comparison_config import AVERAGE, RANDOM, TRIGRAM
from electra_dist.compare.comparison_results import ScoreRow
from electra_dist.compare.comparison_runs import PlannedRun
from electra_dist.report.curves import DrawnPanel, draw_diagram
from electra_dist.report.plot_style import PRINT, SERIES, SOFT, VARIABLES, print_style
from electra_dist.run.metrics import iter_evaluations
from electra_dist.store.atomic_files import replacing

# Anchor of the table -> its name in the legend, and its line style.
_ANCHORS = {RANDOM: ("random weights", "--"), TRIGRAM: ("trigram model", ":")}
_MAX_COLUMNS = 3  # panels beside each other
_MAX_LEGEND_COLUMNS = 6  # entries of the legend beside each other
_DODGE = 0.012  # distance of neighbouring objectives' points, as a share of the width of a panel


def write_scores(rows: Sequence[ScoreRow], titles: dict[str, str], path: Path) -> None:
    """Draw scores against training FLOPs, one panel per task, and write the picture as a PNG with a white background.

    `titles` maps each task to its panel's title; there may be no rows yet. An existing file is replaced atomically.
    """
    color_of = _print_colors(row.entry for row in rows)
    with _new_picture(titles.values(), _legend_handles(rows, color_of), path) as panels:
        for axes, task in zip(panels, titles):
            _draw_panel(axes, rows, task, color_of, PRINT[SOFT])


def score_diagrams(rows: Sequence[ScoreRow], titles: dict[str, str], color_of: Mapping[str, str]) -> list[DrawnPanel]:
    """Draw the panels of `write_scores` for a page; a task without scores of a trained checkpoint has none.

    The page shows the medians under the pointer. `color_of` maps each objective to its placeholder color.
    """
    diagrams = []
    for task, title in titles.items():
        scored_rows = [row for row in rows if row.entry in color_of and task in row.columns]
        if not scored_rows:
            continue
        lines = []
        for objective in dict.fromkeys(row.entry for row in scored_rows):
            points = [(row.flops, row.columns[task].median) for row in scored_rows if row.entry == objective]
            lines.append(_hover_line(objective, color_of[objective], points))
        draw = partial(_draw_panel, rows=rows, task=task, color_of=color_of, anchor_color=SOFT)
        shown = lines if _is_scored_over_time(scored_rows) else []
        diagrams.append(draw_diagram(f"scores {task}", title, draw, scale="percent", flops=True, lines=shown))
    return diagrams


def write_curves(curves: Sequence[RunEvaluations], path: Path) -> None:
    """Draw what runs have recorded at their evaluations: a panel for each value, a line for each run (at least one).

    An existing file is replaced atomically.
    """
    color_of = _print_colors(run.entry for run in curves)
    titles = _curve_titles(curves)
    handles = [Line2D([], [], color=color, linewidth=2, label=entry) for entry, color in color_of.items()]
    with _new_picture(titles.values(), handles, path) as panels:
        for axes, field in zip(panels, titles):
            _draw_curves(axes, curves, field, color_of)


def curve_diagrams(curves: Sequence[RunEvaluations], color_of: Mapping[str, str]) -> list[DrawnPanel]:
    """Draw the panels of `write_curves` for a page; `color_of` maps each objective to its placeholder color."""
    diagrams = []
    for field, title in _curve_titles(curves).items():
        lines = [
            _hover_line(f"{run.entry}, seed {run.seed}", color_of[run.entry], run.points[field])
            for run in curves
            if run.points[field]
        ]
        draw = partial(_draw_curves, curves=curves, field=field, color_of=color_of)
        diagrams.append(draw_diagram(f"curves {field}", title, draw, scale="linear", flops=True, lines=lines))
    return diagrams


def placeholder_colors(entries: Iterable[str]) -> dict[str, str]:
    """Assign a placeholder color to each objective in `entries`; from the ninth objective on, colors repeat.

    The rows of the initial weights and of the trigram model get none.
    """
    names = [entry for entry in dict.fromkeys(entries) if entry not in _ANCHORS]
    return dict(zip(names, itertools.cycle(SERIES)))


def _print_colors(entries: Iterable[str]) -> dict[str, str]:
    return {entry: PRINT[color] for entry, color in placeholder_colors(entries).items()}


def _curve_titles(curves: Sequence[RunEvaluations]) -> dict[str, str]:
    return {field: title for field, title in CURVE_TITLES.items() if any(run.points[field] for run in curves)}


def _hover_line(label: str, color: str, points: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Return what a page shows of a line while the pointer is over it; `points` are (FLOPs, value)."""
    steps, values = zip(*points, strict=True)
    return {"label": label, "color": VARIABLES[color], "steps": steps, "values": values}


def _draw_curves(axes: Axes, curves: Sequence[RunEvaluations], field: str, color_of: Mapping[str, str]) -> None:
    for run in curves:
        flops = [point[0] for point in run.points[field]]
        values = [point[1] for point in run.points[field]]
        axes.plot(flops, values, color=color_of[run.entry], linewidth=1.3, alpha=0.8)
    _label_flops(axes)


@contextmanager
def _new_picture(titles: Iterable[str], legend_handles: Sequence[Line2D], path: Path) -> Iterator[list[Axes]]:
    """Yield empty panels for the titles, and write them with a common legend as a PNG when the `with` block ends."""
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


def _legend_handles(rows: Sequence[ScoreRow], color_of: Mapping[str, str]) -> list[Line2D]:
    handles = []
    for objective, color in color_of.items():
        handles.append(Line2D([], [], color=color, linewidth=2, marker="o", markersize=5, label=objective))
    for anchor, (label, linestyle) in _ANCHORS.items():
        if any(row.entry == anchor for row in rows):
            handles.append(Line2D([], [], color=PRINT[SOFT], linestyle=linestyle, linewidth=1, label=label))
    return handles


def _draw_panel(
    axes: Axes, rows: Sequence[ScoreRow], task: str, color_of: Mapping[str, str], anchor_color: str
) -> None:
    """Draw the scores of one task: columns if all were taken at the same FLOPs, otherwise lines."""
    # An anchor is a line across the panel, to which the scores of training can be compared.
    for row in rows:
        if row.entry in _ANCHORS and task in row.columns:
            _, linestyle = _ANCHORS[row.entry]
            axes.axhline(row.columns[task].median, color=anchor_color, linestyle=linestyle, linewidth=1)
    scored_rows = [row for row in rows if row.entry not in _ANCHORS and task in row.columns]
    if _is_scored_over_time(scored_rows):
        _draw_lines(axes, rows, task, color_of)
    else:
        _draw_columns(axes, scored_rows, task, color_of)
    axes.margins(y=0.12)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))


def _is_scored_over_time(rows: Sequence[ScoreRow]) -> bool:
    """Return whether an objective was scored after several numbers of steps; also True if there is no row yet."""
    entries = [row.entry for row in rows]
    return not entries or len(set(entries)) < len(entries)


def _draw_columns(axes: Axes, rows: Sequence[ScoreRow], task: str, color_of: Mapping[str, str]) -> None:
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


def _draw_lines(axes: Axes, rows: Sequence[ScoreRow], task: str, color_of: Mapping[str, str]) -> None:
    """Draw a task that is scored at several numbers of FLOPs: medians joined by lines, ranges as bars."""
    max_flops = max((row.flops for row in rows), default=0)
    right_end = 1.06 * max_flops if max_flops > 0 else 1
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
class RunEvaluations:
    """What one run of a comparison has recorded at its evaluations, each value with the FLOPs of training so far."""

    entry: str  # name of the objective's entry
    seed: int
    points: dict[str, list[tuple[float, float]]]  # field of the record -> (FLOPs, value), ascending


def read_curves(runs: Sequence[PlannedRun]) -> list[RunEvaluations]:
    """Return the curves of all runs that have recorded an evaluation, in the order of the runs.

    A quantity that a run does not record has no points; values that are not finite are left out.
    """
    curves = []
    for run in runs:
        value_at: dict[str, dict[int, float]] = {field: {} for field in CURVE_TITLES}  # by step
        for record in iter_evaluations(Path(run.config.run_dir)):
            for field, values in value_at.items():
                value = getattr(record, field)
                if math.isfinite(value):
                    values[record.step] = value  # A step that was repeated after a restart counts once.
        points = {}
        for field, values in value_at.items():
            points[field] = [(run.flops(step), value) for step, value in sorted(values.items())]
        if any(points.values()):
            curves.append(RunEvaluations(entry=run.entry, seed=run.seed, points=points))
    return curves
