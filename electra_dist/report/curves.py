"""Draw the curves of a run: each as SVG text for report.html, four of them as one PNG for a README.

Guarantee: a curve is thinned to at most some 1,200 points. It is cut into buckets of consecutive points, and the
lowest and the highest point of each are kept, so a spike of one step stays visible in a run of 400,000 steps. SVG
colors are names of CSS variables (`--ink`, `--grid`, `--series-1`, ...), so the page that embeds the SVG decides the
colors, in light and in dark mode. Text is kept as text. No global state of matplotlib is changed: pyplot is not
imported, and no backend is chosen.

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

# Placeholder colors for matplotlib, which needs real colors. They are replaced by CSS variables in an SVG, and by the
# colors of _PRINT in a PNG.
_INK = "#010101"
_GRID = "#020202"
_FIRST = "#030303"
_SECOND = "#040404"
_VARIABLES = {_INK: "--ink", _GRID: "--grid", _FIRST: "--series-1", _SECOND: "--series-2"}
_PRINT = {_INK: "#374151", _GRID: "#e5e7eb", _FIRST: "#2563eb", _SECOND: "#ea580c"}


@dataclass(frozen=True, kw_only=True)
class CurveLine:
    """Line of a diagram: which field of the records in metrics.jsonl it shows, and how it is drawn.

    A record is one logged training step or one evaluation. A line whose field is in no record is left out.
    """

    field: str  # of the records in metrics.jsonl
    label: str  # in the legend
    kind: str = "train"  # kind of the records: "train" is drawn as a line, "eval" as a line with points
    color: str = _FIRST  # placeholder of the color, _FIRST or _SECOND
    raw: bool = True  # draw every record; only for "train"
    smooth: bool = True  # draw the smoothed line, over a faint raw one; only for "train"


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One diagram of the report: its lines over the optimizer steps and the format of its y axis.

    `PANELS` lists all diagrams in the order of the page.
    """

    name: str  # identifies the panel, and seeds the ids within its SVG
    title: str  # above the diagram, with the unit
    lines: tuple[CurveLine, ...]  # at most two colors
    scale: Literal["linear", "percent", "thousands", "scientific", "log"] = "linear"  # of the y axis


def _loss_panel(tower: str, title: str) -> Panel:
    """Return the diagram of one loss, with one line for training and one for held-out rows.

    Args:
        tower: prefix of the loss's field in the records: "mlm" for the generator's, "rtd" for the discriminator's.
        title: title of the diagram, with the unit.
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
        lines=(
            CurveLine(field="auc", label="generator's replacements", kind="eval"),
            CurveLine(field="context_auc", label="unigram replacements: context AUC", kind="eval", color=_SECOND),
        ),
    ),
    Panel(
        name="lr",
        title="Learning rate",
        lines=(
            CurveLine(field="lr", label="lr", smooth=False),
            CurveLine(field="generator_lr", label="generator's lr", smooth=False),
        ),
        scale="scientific",
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
        name="temperature",
        title="Temperature of the generator's samples",
        lines=(CurveLine(field="temperature", label="scheduled", smooth=False),),
    ),
    Panel(
        name="loss_weights",
        title="Weights of the losses",
        lines=(
            CurveLine(field="mlm_weight", label="generator", color=_SECOND, smooth=False),
            CurveLine(field="rtd_weight", label="discriminator", smooth=False),
        ),
    ),
    Panel(
        name="mask_shares",
        title="Masked tokens, and masked tokens replaced at random",
        lines=(
            CurveLine(field="mask_prob", label="masked, of all tokens", smooth=False),
            CurveLine(field="random_share", label="random, of the masked", color=_SECOND, smooth=False),
        ),
        scale="percent",
    ),
    Panel(
        name="generator_entropy",
        title="Entropy of the generator (nats per masked token)",
        lines=(CurveLine(field="generator_entropy", label="held out", kind="eval"),),
    ),
    Panel(
        name="sampled_correct",
        title="Samples of the generator that are right",
        lines=(CurveLine(field="sampled_correct", label="held out", kind="eval"),),
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
    """Return a diagram as an <svg> element to embed in a page; None if no record has a value to draw.

    The element has no width, no height and no XML header, so that the page decides its size. A value that is not
    finite is not drawn. Equal arguments give equal text.

    Args:
        panel: what to draw, one of `PANELS`.
        records: all records of metrics.jsonl.
        resumes: steps at which the run was resumed; each is marked by a dotted line.
    """
    num_points = sum(len(_series(records, line)[0]) for line in panel.lines)
    if num_points == 0:
        return None
    # Equal ids (svg.hashsalt) and no date make equal arguments give equal text.
    with matplotlib.rc_context(_style() | {"svg.hashsalt": panel.name}):
        figure = Figure(figsize=(4.0, 2.35), layout="constrained")
        _draw(figure.add_subplot(), panel, records, resumes)
        buffer = io.StringIO()
        FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None})
    return _for_page(buffer.getvalue(), panel.title)


def _for_page(svg_file: str, title: str) -> str:
    """Return the <svg> element of an SVG file, changed so that the page decides its size and its colors.

    The XML header, the width and the height are removed, and the placeholder colors that the diagram is drawn with are
    replaced by CSS variables such as var(--ink).

    Args:
        svg_file: text of the file as matplotlib writes it.
        title: title of the diagram, which screen readers read out; it must need no HTML escaping.
    """
    svg = svg_file[svg_file.index("<svg") :]  # without the XML header
    # Only the first tag, that of the whole diagram, loses its width and height.
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', rf'\1 role="img" aria-label="{title}"', svg, count=1)
    for color, variable in _VARIABLES.items():
        svg = svg.replace(color, f"var({variable})")
    return svg


def write_curves_png(run_dir: Path, out: Path) -> Path:
    """Draw four diagrams of a run as a PNG on white, 1500 x 900 pixels.

    They show the generator's and the discriminator's loss, the discriminator's accuracies, and the ROC-AUC. A value
    that the run did not record leaves its diagram empty.

    Args:
        run_dir: folder of the run, with its metrics.jsonl.
        out: the PNG to write; an existing file is overwritten.

    Returns:
        `out`, as a path.
    """
    records = read_metrics(Path(run_dir))
    first_four_panels = PANELS[:4]
    with matplotlib.rc_context(print_style()):
        layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)
        figure = Figure(figsize=(10, 6), layout=layout, facecolor="white", dpi=150)  # inches, so 1500 x 900 pixels
        for axes, panel in zip(figure.subplots(2, 2).flat, first_four_panels, strict=True):
            _draw(axes, panel, records, resumes=(), colors=_PRINT)
        FigureCanvasAgg(figure).print_png(str(out))
    return Path(out)


def smoothed(values: np.ndarray, span: float = SMOOTHING_SPAN) -> np.ndarray:
    """Return the values smoothed without lag: the mean of two exponential means, from the left and from the right.

    An exponential mean is a running mean in which older values weigh less, so it lags behind its values. The two means
    lag in opposite directions, and the lags cancel.

    Args:
        values: values of consecutive records, [n].
        span: sets how fast weights fall: by the factor 1 - 2 / (span + 1) for each record further away. A short curve
            uses n / 10 instead, at least 1, if that is less.
    """
    used_span = min(span, max(1.0, len(values) / 10))
    decay = 1 - 2 / (used_span + 1)
    mean_from_left = _exponential_mean(values, decay)
    mean_from_right = _exponential_mean(values[::-1], decay)[::-1]
    return (mean_from_left + mean_from_right) / 2


def _exponential_mean(values: np.ndarray, decay: float) -> np.ndarray:
    """Return a running mean, [n]: at each value the weighted mean of it and of all earlier ones.

    The weights are divided by their sum, so that the first means are not pulled to zero.

    Args:
        values: the values, [n].
        decay: weight of a value divided by the weight of the next newer one, in [0, 1).
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
    """Return fewer points that keep a curve's shape: both ends, and the lowest and highest point of each bucket.

    The buckets are consecutive parts of the curve with about equally many points. A spike of one point stays visible.

    Args:
        steps: x values, [n], ascending.
        values: y values, [n], all finite.
        num_buckets: number of buckets.

    Returns:
        Steps and values of at most 2 * `num_buckets` + 2 points, in order. A curve of at most 2 * `num_buckets` points
        is returned whole.
    """
    if len(values) <= 2 * num_buckets:
        return steps, values
    last_index = len(values) - 1
    selected = {0, last_index}
    for bucket_indices in np.array_split(np.arange(len(values)), num_buckets):
        bucket_values = values[bucket_indices]
        selected.add(int(bucket_indices[bucket_values.argmin()]))
        selected.add(int(bucket_indices[bucket_values.argmax()]))
    indices = np.array(sorted(selected))
    return steps[indices], values[indices]


def _series(records: Sequence[Record], line: CurveLine) -> tuple[np.ndarray, np.ndarray]:
    """Return the points of a line: the optimizer steps and the values, float64 [n] each.

    Records of another kind than the line's (training instead of evaluation, or the reverse) are left out, and so are
    records in which the line's field is missing or not finite. n is 0 if that leaves none.
    """
    steps = []
    values = []
    for record in records:
        if record.get("kind") != line.kind:
            continue
        value = record.get(line.field)
        if value is not None and math.isfinite(value):
            steps.append(record["step"])
            values.append(value)
    return np.array(steps, dtype=np.float64), np.array(values, dtype=np.float64)


def _draw(
    axes: Axes, panel: Panel, records: Sequence[Record], resumes: Sequence[int], colors: dict[str, str] | None = None
) -> None:
    """Draw a diagram: the curves, dotted lines at the steps of `resumes`, axes and, for two curves or more, a legend.

    Args:
        axes: what to draw on.
        panel: the diagram.
        records: all records of metrics.jsonl.
        resumes: steps at which the run was resumed from a checkpoint.
        colors: the color to draw with, for each placeholder color of this module. None draws with the placeholders,
            which `_for_page` replaces by CSS variables.
    """
    if colors is None:
        colors = {}
    for step in resumes:
        axes.axvline(step, color=colors.get(_INK, _INK), linewidth=0.6, linestyle=":", alpha=0.5)
    for line in panel.lines:
        _draw_line(axes, line, records, colors.get(line.color, line.color))
    axes.set_title(panel.title, loc="left")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 20000 as 20k
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    _format_y_axis(axes, panel.scale)
    legend_handles, _labels = axes.get_legend_handles_labels()
    if len(legend_handles) > 1:
        axes.legend(loc="best")


def _draw_line(axes: Axes, line: CurveLine, records: Sequence[Record], color: str) -> None:
    """Draw one line of a diagram; draw nothing if the records have no value for it.

    Values of evaluations are drawn as points joined by a line. Values of training steps are drawn unsmoothed
    (`CurveLine.raw`), smoothed (`CurveLine.smooth`), or both, then with the unsmoothed line faint.

    Args:
        axes: what to draw on.
        line: the line.
        records: all records of metrics.jsonl.
        color: color of the line.
    """
    steps, values = _series(records, line)
    if not values.size:
        return
    thin_steps, thin_values = thinned(steps, values)
    if line.kind == "eval":
        axes.plot(thin_steps, thin_values, color=color, marker="o", markersize=3, linewidth=1, label=line.label)
        return
    if line.raw and line.smooth:
        axes.plot(thin_steps, thin_values, color=color, alpha=0.3, linewidth=0.7)
    elif line.raw:
        axes.plot(thin_steps, thin_values, color=color, linewidth=1.5, label=line.label)
    if line.smooth:
        smooth_steps, smooth_values = thinned(steps, smoothed(values))
        axes.plot(smooth_steps, smooth_values, color=color, linewidth=1.5, label=line.label)


def _format_y_axis(axes: Axes, scale: str) -> None:
    """Set scale, ticks and number format of the y axis. Call it after everything is drawn, when its range is known.

    Args:
        axes: the diagram.
        scale: a value of `Panel.scale`: "percent" shows 0.5 as 50 %, "thousands" shows 20000 as 20k and begins at 0,
            "scientific" shows 0.0002 as 2.00e-4, "log" is logarithmic, and "linear" keeps matplotlib's defaults.
    """
    if scale == "percent":
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    elif scale == "thousands":
        _, highest = axes.get_ylim()
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set_ylim(0, 1.05 * highest)
    elif scale == "scientific":
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _position: _scientific(value)))
    elif scale == "log":
        axes.set_yscale("log")
        lowest, highest = axes.get_ylim()
        axes.yaxis.set_major_locator(LogLocator(subs=_log_ticks(lowest, highest)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _position: f"{value:g}"))
        axes.yaxis.set_minor_locator(NullLocator())


def _scientific(value: float) -> str:
    """Return a number as text with three significant digits and a short exponent, such as 2.00e-4; "0" for 0."""
    if value == 0:
        return "0"
    return f"{value:.2e}".replace("e-0", "e-")


def _log_ticks(low: float, high: float) -> tuple[float, ...]:
    """Return which multiples of each power of ten get a tick on a log axis from `low` to `high`.

    The shorter the axis, the more multiples. For example, (1.0, 2.0, 5.0) means ticks at 1, 2, 5, 10, 20, 50, ... Both
    ends must be positive.
    """
    decades = math.log10(high / low)
    if decades > 2:
        return (1.0,)
    if decades > 0.8:
        return (1.0, 2.0, 5.0)
    return (1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 7.0)


def print_style() -> dict[str, object]:
    """Return matplotlib's settings for a PNG on white; pass them to `matplotlib.rc_context`.

    They are the settings for an SVG with a larger font and with colors in place of the placeholders, which stand for
    CSS variables.
    """
    style = _style()
    for key, value in style.items():
        if isinstance(value, str) and value in _PRINT:
            style[key] = _PRINT[value]
    return style | {"font.size": 9, "axes.titlesize": 10}


def _style() -> dict[str, object]:
    """Return matplotlib's settings for an SVG: text kept as text, a plain light frame, and placeholder colors.

    A placeholder is a color that `_for_page` replaces by a CSS variable. The keys are those of matplotlib's rcParams;
    sizes are in points.
    """
    return {
        "font.family": "sans-serif",
        "font.size": 8,
        "svg.fonttype": "none",  # text stays text instead of becoming outlines
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
