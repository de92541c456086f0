"""Draws the curves of a run: each as SVG text for report.html, four of them as one PNG for a README.

Guarantee: a curve is thinned to at most some 1,200 points by keeping the lowest and the highest value of each bucket,
so a spike of one step stays visible in a run of 400,000 steps. SVG colors are names of CSS variables (`--ink`,
`--grid`, `--series-1`, ...), so the page that embeds the SVG decides the colors, in light and in dark mode. Text is
kept as text. No global state of matplotlib is changed: neither pyplot nor a backend is used.

Cost: 0.1 s per panel, after 1 s for importing matplotlib.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator, NullLocator, PercentFormatter

from electra_dist.run.jsonl import Record
from electra_dist.run.metrics_writer import read_metrics

MAX_BUCKETS = 600  # of a thinned curve; each gives two points
SMOOTHING_SPAN = 40  # records

# Placeholder colors for matplotlib. In an SVG they are replaced by CSS variables, in a PNG by those of _PRINT.
_VARIABLES = {"#010101": "--ink", "#020202": "--grid", "#030303": "--series-1", "#040404": "--series-2"}
_INK, _GRID, _FIRST, _SECOND = _VARIABLES
_PRINT = {"#010101": "#374151", "#020202": "#e5e7eb", "#030303": "#2563eb", "#040404": "#ea580c"}


@dataclass(frozen=True, kw_only=True)
class CurveLine:
    """Line of a diagram: the field of metrics.jsonl that it shows, and how it is drawn."""

    field: str  # of the records in metrics.jsonl
    label: str  # in the legend
    kind: str = "train"  # kind of the records: "train" is drawn as a line, "eval" as a line with points
    color: str = _FIRST
    raw: bool = True  # draw every record; only for "train"
    smooth: bool = True  # draw the smoothed line, over a faint raw one; only for "train"


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One diagram of the report: its lines over the optimizer steps and the format of its y axis."""

    name: str  # identifies the panel, and seeds the ids within its SVG
    title: str
    lines: tuple[CurveLine, ...]  # at most two colors
    scale: Literal["linear", "percent", "thousands", "scientific", "log"] = "linear"


def _loss_panel(tower: str, title: str) -> Panel:
    """Return the diagram of one loss, in training and on held-out rows.

    `tower` selects the loss: "mlm" is the generator's, "rtd" the discriminator's.
    """
    field = f"{tower}_loss"
    held_out = CurveLine(field=field, label="held out", kind="eval", color=_SECOND)
    return Panel(name=field, title=title, lines=(CurveLine(field=field, label="training"), held_out))


PANELS = (
    _loss_panel("mlm", "Generator loss (nats per masked token)"),
    _loss_panel("rtd", "Discriminator loss (nats per token)"),
    Panel(
        name="rtd_accuracy",
        title="Discriminator accuracy",
        lines=(
            CurveLine(field="replaced_accuracy", label="replaced tokens", color=_SECOND),
            CurveLine(field="original_accuracy", label="original tokens"),
        ),
        scale="percent",
    ),
    Panel(
        name="auc",
        title="ROC-AUC on held-out rows",
        lines=(CurveLine(field="auc", label="replaced against original", kind="eval"),),
    ),
    Panel(
        name="lr", title="Learning rate", lines=(CurveLine(field="lr", label="lr", smooth=False),), scale="scientific"
    ),
    Panel(
        name="grad_norm",
        title="Gradient norm before clipping",
        lines=(CurveLine(field="grad_norm", label="global norm"),),
        scale="log",
    ),
    Panel(
        name="replaced_fraction",
        title="Tokens that the generator replaced",
        lines=(CurveLine(field="replaced_fraction", label="of all tokens"),),
        scale="percent",
    ),
    Panel(
        name="tokens_per_s",
        title="Tokens per second",
        lines=(CurveLine(field="tokens_per_s", label="all GPUs"),),
        scale="thousands",
    ),
)


def panel_svg(panel: Panel, records: Sequence[Record], resumes: Sequence[int] = ()) -> str | None:
    """Return a diagram as an <svg> element to embed in a page; None if the records have no finite value for it.

    The element has no width, no height and no XML header, so that the page decides its size. Equal arguments give
    equal text.

    Args:
        panel: what to draw, one of `PANELS`.
        records: all records of metrics.jsonl.
        resumes: steps at which the run was resumed; each is marked by a dotted line.
    """
    if not any(_series(records, line)[0].size for line in panel.lines):
        return None
    with matplotlib.rc_context(_style() | {"svg.hashsalt": panel.name}):
        figure = Figure(figsize=(4.0, 2.35), layout="constrained")
        _draw(figure.add_subplot(), panel, records, resumes)
        buffer = io.StringIO()
        FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', rf'\1 role="img" aria-label="{panel.title}"', svg, count=1)
    for color, variable in _VARIABLES.items():
        svg = svg.replace(color, f"var({variable})")
    return svg


def write_curves_png(run_dir: Path, out: Path) -> Path:
    """Draw generator and discriminator loss, accuracies and AUC of a run as a PNG, 1500 x 900 pixels, on white.

    Args:
        run_dir: folder of the run, with its metrics.jsonl.
        out: the PNG to write; an existing file is overwritten.

    Returns:
        `out`, as a path.
    """
    records = read_metrics(Path(run_dir))
    with matplotlib.rc_context(print_style()):
        layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)
        figure = Figure(figsize=(10, 6), layout=layout, facecolor="white", dpi=150)
        for axes, panel in zip(figure.subplots(2, 2).flat, PANELS[:4], strict=True):
            _draw(axes, panel, records, (), _PRINT)
        FigureCanvasAgg(figure).print_png(str(out))
    return Path(out)


def smoothed(values: np.ndarray, span: float = SMOOTHING_SPAN) -> np.ndarray:
    """Return the values smoothed without lag: the mean of two exponential means, from the left and from the right.

    Args:
        values: values of consecutive records, [n].
        span: records over which each exponential mean extends; for a short curve at most a tenth of its length.
    """
    decay = 1 - 2 / (min(span, max(1.0, len(values) / 10)) + 1)
    return (_exponential_mean(values, decay) + _exponential_mean(values[::-1], decay)[::-1]) / 2


def _exponential_mean(values: np.ndarray, decay: float) -> np.ndarray:
    """Return the exponential mean of the values so far, at every value, [n].

    The weights sum to 1 at every value, so that the first means are not pulled to zero.
    """
    means = np.empty(len(values))
    weighted_sum = 0.0
    weight_sum = 0.0
    for index, value in enumerate(values):
        weighted_sum = decay * weighted_sum + value
        weight_sum = decay * weight_sum + 1
        means[index] = weighted_sum / weight_sum
    return means


def thinned(steps: np.ndarray, values: np.ndarray, num_buckets: int = MAX_BUCKETS) -> tuple[np.ndarray, np.ndarray]:
    """Return the points of a curve that keep its shape: both ends, and the lowest and highest of every bucket.

    Args:
        steps: x values, [n], ascending.
        values: y values, [n], all finite.
        num_buckets: parts of equal numbers of points.

    Returns:
        Steps and values of at most 2 * `num_buckets` + 2 points, in order. A curve of at most 2 * `num_buckets`
        points is returned whole.
    """
    if len(values) <= 2 * num_buckets:
        return steps, values
    selected = {0, len(values) - 1}
    for bucket in np.array_split(np.arange(len(values)), num_buckets):
        bucket_values = values[bucket]
        selected.add(int(bucket[bucket_values.argmin()]))
        selected.add(int(bucket[bucket_values.argmax()]))
    indices = np.array(sorted(selected))
    return steps[indices], values[indices]


def _series(records: Sequence[Record], line: CurveLine) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps and the values of a line, float64 [n] each; records without a finite value are left out."""
    points = []
    for record in records:
        value = record.get(line.field)
        if record.get("kind") == line.kind and value is not None and math.isfinite(value):
            points.append((record["step"], value))
    steps, values = np.array(points, dtype=np.float64).reshape(-1, 2).T
    return steps, values


def _draw(
    axes: Axes, panel: Panel, records: Sequence[Record], resumes: Sequence[int], colors: dict[str, str] | None = None
) -> None:
    """Draw a diagram: the curves, dotted lines at the steps of `resumes`, axes and, for two curves or more, a legend.

    `colors` maps the placeholder colors, which stand for CSS variables of the page, to real ones; None keeps them.
    """
    if colors is None:
        colors = {}
    for step in resumes:
        axes.axvline(step, color=colors.get(_INK, _INK), linewidth=0.6, linestyle=":", alpha=0.5)
    for line in panel.lines:
        _draw_line(axes, line, records, colors.get(line.color, line.color))
    axes.set_title(panel.title, loc="left")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    _format_y_axis(axes, panel.scale)
    if len(axes.get_legend_handles_labels()[0]) > 1:
        axes.legend(loc="best")


def _draw_line(axes: Axes, line: CurveLine, records: Sequence[Record], color: str) -> None:
    """Draw one line of a diagram; draw nothing if the records have no value for it."""
    steps, values = _series(records, line)
    if not values.size:
        return
    if line.kind == "eval":
        axes.plot(*thinned(steps, values), color=color, marker="o", markersize=3, linewidth=1, label=line.label)
        return
    if line.raw and line.smooth:
        axes.plot(*thinned(steps, values), color=color, alpha=0.3, linewidth=0.7)
    elif line.raw:
        axes.plot(*thinned(steps, values), color=color, linewidth=1.5, label=line.label)
    if line.smooth:
        axes.plot(*thinned(steps, smoothed(values)), color=color, linewidth=1.5, label=line.label)


def _format_y_axis(axes: Axes, scale: str) -> None:
    """Set scale, ticks and number format of the y axis; call it after everything is drawn. See `Panel.scale`."""
    if scale == "percent":
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    elif scale == "thousands":
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
    elif scale == "scientific":
        axes.yaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.2e}".replace("e-0", "e-") if x else "0"))
    elif scale == "log":
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=_log_ticks(*axes.get_ylim())))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axes.yaxis.set_minor_locator(NullLocator())


def _log_ticks(low: float, high: float) -> tuple[float, ...]:
    """Return the ticks within a decade of a log axis from `low` to `high`: more of them on a shorter axis."""
    decades = math.log10(high / low)
    if decades > 2:
        return (1.0,)
    if decades > 0.8:
        return (1.0, 2.0, 5.0)
    return (1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 7.0)


def print_style() -> dict[str, object]:
    """Return matplotlib's settings for a PNG on white; pass them to `matplotlib.rc_context`."""
    style: dict[str, object] = {}
    for key, value in _style().items():
        style[key] = _PRINT.get(value, value) if isinstance(value, str) else value
    return style | {"font.size": 9, "axes.titlesize": 10}


def _style() -> dict[str, object]:
    """Return matplotlib's settings for an SVG, with placeholder colors and with text kept as text."""
    return {
        "font.family": "sans-serif",
        "font.size": 8,
        "svg.fonttype": "none",
        "text.color": _INK,
        "axes.labelcolor": _INK,
        "axes.edgecolor": _GRID,
        "axes.facecolor": "none",
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 8.5,
        "axes.titleweight": "bold",
        "axes.titlepad": 6,
        "axes.xmargin": 0.01,
        "figure.facecolor": "none",
        "grid.color": _GRID,
        "grid.linewidth": 0.6,
        "xtick.color": _INK,
        "ytick.color": _INK,
        "xtick.major.size": 0,
        "ytick.major.size": 0,
        "legend.frameon": False,
        "legend.fontsize": 7.5,
        "lines.solid_capstyle": "round",
        "path.simplify": True,
    }
