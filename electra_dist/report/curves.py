"""The curves of a run: each as SVG text for the report, four of them as one PNG for a README.

Guarantees: a curve is thinned to at most some 1,200 points by keeping the lowest and the highest value of each bucket,
so a spike of one step stays visible in a run of 400,000. SVG colours are names of CSS variables (`--ink`, `--grid`,
`--series-1`, ...), so the page that embeds it decides, in light and in dark; text stays text.

Cost: 0.1 s a panel, after 1 s for importing matplotlib. Nothing global is changed: no pyplot, no backend.
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
from electra_dist.run.metrics import read_metrics

MAX_BUCKETS = 600
SMOOTHING_SPAN = 40  # records

# Colours that matplotlib draws with and that are then replaced by the page's own.
_VARIABLES = {"#010101": "--ink", "#020202": "--grid", "#030303": "--series-1", "#040404": "--series-2"}
_INK, _GRID, _FIRST, _SECOND = _VARIABLES
_PRINT = {"#010101": "#374151", "#020202": "#e5e7eb", "#030303": "#2563eb", "#040404": "#ea580c"}


@dataclass(frozen=True, kw_only=True)
class CurveLine:
    """A field of the records: `kind` "train" is drawn raw (if `raw`) and smoothed, "eval" as points."""

    field: str
    label: str
    kind: str = "train"
    color: str = _FIRST
    raw: bool = True
    smooth: bool = True


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One diagram."""

    name: str
    title: str
    lines: tuple[CurveLine, ...]
    scale: Literal["linear", "percent", "thousands", "scientific", "log"] = "linear"


def _loss_panel(tower: str, title: str) -> Panel:
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
    """The panel as an <svg> element without size or XML header; None if there is nothing to draw.

    Args:
        panel: what to draw.
        records: of metrics.jsonl.
        resumes: steps at which the run was resumed, marked by dotted lines.
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
    """Both losses, the accuracies and the AUC of a run as one picture (1500 x 900 pixels, light)."""
    records = read_metrics(Path(run_dir))
    with matplotlib.rc_context(print_style()):
        layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)
        figure = Figure(figsize=(10, 6), layout=layout, facecolor="white", dpi=150)
        for axes, panel in zip(figure.subplots(2, 2).flat, PANELS[:4], strict=True):
            _draw(axes, panel, records, (), _PRINT)
        FigureCanvasAgg(figure).print_png(str(out))
    return Path(out)


def smoothed(values: np.ndarray, span: float = SMOOTHING_SPAN) -> np.ndarray:
    """Mean of the exponential means from the left and from the right, over about `span` records each: no lag."""
    decay = 1 - 2 / (min(span, max(1.0, len(values) / 10)) + 1)
    return (_exponential_mean(values, decay) + _exponential_mean(values[::-1], decay)[::-1]) / 2


def _exponential_mean(values: np.ndarray, decay: float) -> np.ndarray:
    """The first values are means of what there is, not pulled to zero."""
    out, weighted, weight = np.empty(len(values)), 0.0, 0.0
    for index, value in enumerate(values):
        weighted, weight = decay * weighted + value, decay * weight + 1
        out[index] = weighted / weight
    return out


def thinned(steps: np.ndarray, values: np.ndarray, num_buckets: int = MAX_BUCKETS) -> tuple[np.ndarray, np.ndarray]:
    """At most 2 * `num_buckets` + 2 points in order: both ends, and the lowest and the highest of every bucket."""
    if len(values) <= 2 * num_buckets:
        return steps, values
    keep = {0, len(values) - 1}
    for bucket in np.array_split(np.arange(len(values)), num_buckets):
        keep |= {int(bucket[values[bucket].argmin()]), int(bucket[values[bucket].argmax()])}
    chosen = np.array(sorted(keep))
    return steps[chosen], values[chosen]


def _series(records: Sequence[Record], line: CurveLine) -> tuple[np.ndarray, np.ndarray]:
    """Steps and finite values of a line."""
    points = [
        (r["step"], r[line.field]) for r in records if r.get("kind") == line.kind and r.get(line.field) is not None
    ]
    finite = [(step, value) for step, value in points if math.isfinite(value)]
    steps, values = np.array(finite, dtype=np.float64).reshape(-1, 2).T
    return steps, values


def _draw(
    axes: Axes, panel: Panel, records: Sequence[Record], resumes: Sequence[int], colors: dict[str, str] | None = None
) -> None:
    for step in resumes:
        axes.axvline(step, color=(colors or {}).get(_INK, _INK), linewidth=0.6, linestyle=":", alpha=0.5)
    for line in panel.lines:
        steps, values = _series(records, line)
        color = (colors or {}).get(line.color, line.color)
        if not values.size:
            continue
        if line.kind == "eval":
            axes.plot(*thinned(steps, values), color=color, marker="o", markersize=3, linewidth=1, label=line.label)
            continue
        if line.raw:
            quiet = {"alpha": 0.3, "linewidth": 0.7} if line.smooth else {"linewidth": 1.5, "label": line.label}
            axes.plot(*thinned(steps, values), color=color, **quiet)
        if line.smooth:
            axes.plot(*thinned(steps, smoothed(values)), color=color, linewidth=1.5, label=line.label)
    axes.set_title(panel.title, loc="left")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    _scale(axes, panel.scale)
    if len(axes.get_legend_handles_labels()[0]) > 1:
        axes.legend(loc="best")


def _scale(axes: Axes, scale: str) -> None:
    if scale == "percent":
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    elif scale == "thousands":
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
    elif scale == "scientific":
        axes.yaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.2e}".replace("e-0", "e-") if x else "0"))
    elif scale == "log":
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        decades = math.log10(high / low)
        subs = (1.0,) if decades > 2 else (1.0, 2.0, 5.0) if decades > 0.8 else (1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 7.0)
        axes.yaxis.set_major_locator(LogLocator(subs=subs))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axes.yaxis.set_minor_locator(NullLocator())


def print_style() -> dict[str, object]:
    """matplotlib's settings for a PNG on white."""
    style = {key: _PRINT.get(value, value) if isinstance(value, str) else value for key, value in _style().items()}
    return style | {"font.size": 9, "axes.titlesize": 10}


def _style() -> dict[str, object]:
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
