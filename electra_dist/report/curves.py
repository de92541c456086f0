"""Draw the curves of one run or of several: each as SVG text for a page, four of them as one PNG for a README.

Guarantee: a curve keeps its shape although few of its points are drawn (`panels.py`). SVG colors are names of
CSS variables (`--ink`, `--grid`, `--series-1`, ...), so the page that embeds the SVG decides the colors, in light and
in dark mode. Text is kept as text. Global state of matplotlib is restored: pyplot is not imported, and no backend
is chosen.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator, NullLocator, PercentFormatter

from electra_dist.escapes import html_text
from electra_dist.report.panels import PANELS, Curve, CurveLine, Panel, RunCurves, columns_of
from electra_dist.report.plot_style import INK, PRINT, SERIES, SOFT, VARIABLES, line_color, print_style, svg_style
from electra_dist.run.folder import METRICS_FILE
from electra_dist.run.metrics import parse_metric
from electra_dist.run.records import read_records

MAX_HOVER_POINTS = 300  # of a curve, whose values a page shows under the pointer
SIZE_INCHES = (4.0, 2.2)  # of a diagram; the page scales it
_POINTS_PER_INCH = 72  # unit of an SVG's viewBox
_LEAST_DISTANCE = 0.05  # of the ends of an axis from the value of a guess
# Names of diagrams: a PNG shows the first four of them that have values.
_PNG_PANELS = ("mlm_loss", "rtd_loss", "token_loss", "rtd_accuracy", "context_auc", "lr", "grad_norm")


@dataclass(frozen=True, kw_only=True)
class DrawnPanel:
    """Diagram as an <svg> element, and the values that a page shows while the pointer is over it."""

    title: str  # which the page shows above the diagram, where it can wrap
    svg: str
    # JSON tree. "x" and "y": position of both ends of the axis in the units of the viewBox, then their values; "log":
    # whether the y axis is logarithmic; "scale": as of the panel; "lines": label, color, steps and values of each;
    # "flops": true if the "steps" are training FLOPs.
    hover: dict[str, Any]


def draw_panel(panel: Panel, runs: Sequence[RunCurves]) -> DrawnPanel | None:
    """Draw a diagram of one run, or of up to `MAX_RUNS` runs together; return None if there is no value to draw.

    The <svg> element has no width and height, so that the page decides its size. Equal arguments give equal text.
    With several runs, each run has a color, training curves are drawn smoothed only, and neither resumes nor baselines
    are shown.
    """
    if not _has_values(panel, runs):
        return None

    def draw(axes: Axes) -> None:
        if len(runs) > 1:
            _draw_overlay(axes, panel, runs)
            return
        _draw(axes, panel, runs[0])
        handles, _labels = axes.get_legend_handles_labels()
        if len(handles) > 1:
            _draw_legend_above(axes, handles)

    return draw_diagram(panel.name, panel.title, draw, scale=panel.scale, lines=_hover_lines(panel, runs))


def draw_diagram(name: str, title: str, draw: Callable[[Axes], None], **hover: Any) -> DrawnPanel:
    """Let `draw` draw a diagram for a page with placeholder colors; `name` seeds the ids within its SVG.

    `hover` are the further keys of `DrawnPanel.hover` beside those of the axes.
    """
    # Without these two settings, the text would have random ids (svg.hashsalt) and the date.
    with matplotlib.rc_context(svg_style() | {"svg.hashsalt": name}):
        figure = Figure(figsize=SIZE_INCHES, layout="constrained")
        axes = figure.add_subplot()
        draw(axes)
        buffer = io.StringIO()
        FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None})
    svg = svg_for_page(buffer.getvalue(), title)
    return DrawnPanel(title=title, svg=svg, hover={**_axis_positions(axes), **hover})


def svg_for_page(svg_file: str, title: str) -> str:
    """Return the <svg> element from an SVG file of matplotlib, ready to be part of an HTML page.

    It has no size, CSS variables as colors, and `title` as its label for screen readers.
    """
    svg = svg_file[svg_file.index("<svg") :]  # without the XML header
    # Only the first tag, that of the whole diagram, loses its width and height.
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    labelled = f' role="img" aria-label="{html_text(title)}"'
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', lambda match: match[1] + labelled, svg, count=1)
    for color, variable in VARIABLES.items():
        svg = svg.replace(color, f"var({variable})")
    return svg


def _axis_positions(axes: Axes) -> dict[str, Any]:
    """Return where both axes of a drawn diagram end in the SVG, and the values at these ends.

    "x" is [left, right, value at the left end, value at the right end], and "y" is the same for the bottom and the
    top. Positions are in the units of the viewBox, whose origin is the upper left corner.
    """
    width, height = (inches * _POINTS_PER_INCH for inches in SIZE_INCHES)
    box = axes.get_position()  # as shares of the figure, from the lower left corner
    return {
        "x": [box.x0 * width, box.x1 * width, *axes.get_xlim()],
        "y": [(1 - box.y0) * height, (1 - box.y1) * height, *axes.get_ylim()],
        "log": axes.get_yscale() == "log",
    }


def _has_values(panel: Panel, runs: Sequence[RunCurves]) -> bool:
    """Return whether a run has recorded a value of a line of the diagram; baselines do not count."""
    lines = [line for line in panel.lines if not line.is_baseline]
    return any(len(run.curve(line).steps) for run in runs for line in lines)


def _hover_lines(panel: Panel, runs: Sequence[RunCurves]) -> list[dict[str, Any]]:
    """Return the values that a page shows under the pointer: at most 300 evenly spaced points of each line.

    "color" is the name of a CSS variable. A line that is drawn smoothed has also "smooth", the smoothed values.
    """
    lines = []
    for number, run in enumerate(runs):
        for line in panel.lines:
            curve = run.curve(line)
            is_left_out = line.is_baseline and len(runs) > 1
            if not len(curve.steps) or is_left_out:
                continue
            label = line.label if len(runs) == 1 else f"{run.name}: {line.label}"
            color = line_color(line) if len(runs) == 1 else SERIES[number]
            lines.append({"label": label, "color": VARIABLES[color], **_hover_points(line, curve)})
    return lines


def _hover_points(line: CurveLine, curve: Curve) -> dict[str, Any]:
    """Return "steps", "values" and, for a line that is drawn smoothed, "smooth" of evenly spaced points."""
    chosen = curve.evenly_spaced(MAX_HOVER_POINTS)
    points: dict[str, Any] = {
        "steps": [int(step) for step in chosen.steps],
        "values": [_rounded(value) for value in chosen.values],
    }
    if line.kind == "train" and line.smooth:
        smooth_at_chosen = np.interp(chosen.steps, *curve.smoothed())
        points["smooth"] = [_rounded(value) for value in smooth_at_chosen]
    return points


def _rounded(value: float) -> float:
    """Round a number to five significant figures, which keeps a page small."""
    return float(f"{value:.5g}")


def write_curves_png(run_dir: Path, out: Path) -> Path:
    """Draw four diagrams of a run as a PNG on white, 1500 x 900 pixels, and return the path of the PNG.

    They are the first four of these that have a value: the parts of the loss, the discriminator's accuracies, the
    context AUC, the learning rate and the gradient norm. If there are fewer, the rest of the picture is empty.
    """
    records = read_records(Path(run_dir) / METRICS_FILE, parse_metric)
    run = RunCurves(name=Path(run_dir).name, columns=columns_of(records))
    panels = [panel for panel in PANELS if panel.name in _PNG_PANELS and _has_values(panel, [run])]
    with matplotlib.rc_context(print_style()):
        layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)
        figure = Figure(figsize=(10, 6), layout=layout, facecolor="white", dpi=150)  # inches, so 1500 x 900 pixels
        all_axes = figure.subplots(2, 2).flat
        for axes in all_axes[len(panels) :]:
            axes.set_axis_off()
        for axes, panel in zip(all_axes, panels, strict=False):
            _draw(axes, panel, run, colors=PRINT)
            axes.set_title(panel.title, loc="left")
            if len(axes.get_legend_handles_labels()[0]) > 1:
                axes.legend(loc="best")
        for axes in figure.axes[2:]:  # the lower row
            axes.set_xlabel("training step")
        FigureCanvasAgg(figure).print_png(str(out))
    return Path(out)


def _draw(axes: Axes, panel: Panel, run: RunCurves, colors: dict[str, str] | None = None) -> None:
    """Draw a diagram of one run: curves, dotted lines at resumes and axes, without a legend.

    `colors` maps placeholder colors to real ones; None keeps the placeholders, which `svg_for_page` replaces.
    """
    if colors is None:
        colors = {}
    for step in run.resumes:
        axes.axvline(step, color=colors.get(INK, INK), linewidth=0.6, linestyle=":", alpha=0.5)
    for line in panel.lines:
        color = line_color(line)
        _draw_line(axes, line, run, colors.get(color, color))
    _draw_chance(axes, panel, colors.get(SOFT, SOFT))
    _format_axes(axes, panel, [run])


def _overlay_style(line: CurveLine) -> dict[str, Any]:
    """Return matplotlib's properties, except the color, of a line in a diagram in which each run has a color."""
    if line.kind == "eval":
        return {"linewidth": 0.9, "marker": "o", "markersize": 2.5, "linestyle": "-"}
    return {"linewidth": 1.5, "linestyle": "--" if line.is_second else "-"}


def _draw_overlay(axes: Axes, panel: Panel, runs: Sequence[RunCurves]) -> None:
    """Draw a diagram of several runs: a color stands for a run, and a line style for a line of the diagram.

    Training steps are solid, or dashed for the diagram's second line; evaluations are thin lines with points.
    Baselines are not drawn, because they differ from run to run.
    """
    lines = [line for line in panel.lines if not line.is_baseline]
    drawn_lines: dict[CurveLine, Line2D] = {}
    for number, run in enumerate(runs):
        for line in lines:
            curve = run.curve(line)
            if not len(curve.steps):
                continue
            if line.kind == "train" and line.smooth:
                curve = curve.smoothed()
            style = _overlay_style(line)
            axes.plot(*curve.thinned(), color=SERIES[number], **style)
            drawn_lines[line] = Line2D([], [], color=INK, label=line.label, **style)
    _draw_chance(axes, panel, SOFT)
    _format_axes(axes, panel, runs)
    if len(drawn_lines) > 1:
        _draw_legend_above(axes, list(drawn_lines.values()))


def _draw_legend_above(axes: Axes, handles: Sequence[Artist]) -> None:
    """Draw a legend in one line above the diagram, where it covers no curve."""
    axes.legend(
        handles=list(handles),
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=len(handles),
        borderaxespad=0.1,
        handlelength=1.3,
        columnspacing=1.0,
    )


def _draw_chance(axes: Axes, panel: Panel, color: str) -> None:
    """Draw a dashed line at `panel.chance`, the value that a random guess reaches; draw nothing if it is None."""
    if panel.chance is not None:
        # The axis has room around a guess, so that noise does not look like learning.
        axes.update_datalim([(0, panel.chance - _LEAST_DISTANCE), (0, panel.chance + _LEAST_DISTANCE)], updatex=False)
        axes.autoscale_view(scalex=False)
        axes.axhline(panel.chance, color=color, linewidth=0.9, linestyle="--", label=f"{panel.chance:g}: a guess")


def _draw_line(axes: Axes, line: CurveLine, run: RunCurves, color: str) -> None:
    """Draw one line of a diagram: evaluations as joined points, training steps raw, smoothed, or both."""
    curve = run.curve(line)
    if not len(curve.steps):
        return
    if line.kind == "eval":
        axes.plot(*curve.thinned(), color=color, marker="o", markersize=3, linewidth=1, label=line.label)
        return
    if line.is_baseline:
        axes.plot(*curve.smoothed().thinned(), color=color, linewidth=0.9, linestyle="--", label=line.label)
        return
    if line.raw and line.smooth:
        axes.plot(*curve.thinned(), color=color, alpha=0.3, linewidth=0.7)
    elif line.raw:
        axes.plot(*curve.thinned(), color=color, linewidth=1.5, label=line.label)
    if line.smooth:
        axes.plot(*curve.smoothed().thinned(), color=color, linewidth=1.5, label=line.label)


def _format_axes(axes: Axes, panel: Panel, runs: Sequence[RunCurves]) -> None:
    """Set ranges and ticks of both axes. Call it last, because it needs the range of the drawn values.

    The axis of steps goes from 0 to the last step of all records, so that it is the same in all diagrams of a page.
    """
    last_step = max(run.last_step for run in runs)
    if last_step > 0:
        axes.set_xlim(-0.01 * last_step, 1.01 * last_step)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 20000 as 20k
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    _format_y_axis(axes, panel.scale)


def _format_y_axis(axes: Axes, scale: str) -> None:
    """Set scale, ticks and number format of the y axis; `scale` is a `Panel.scale`. Call it after the drawing."""
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
    """Return a number with three significant digits and a short exponent, such as 2.00e-4; "0" for 0."""
    if value == 0:
        return "0"
    return f"{value:.2e}".replace("e-0", "e-")


def _log_ticks(low: float, high: float) -> tuple[float, ...]:
    """Return the factors of each power of ten that get a tick, more of them the fewer powers the axis spans.

    An axis of one or two powers of ten, for example, has ticks at 1, 2 and 5. Both ends must be above 0.
    """
    decades = math.log10(high / low)
    if decades > 2:
        return (1.0,)
    if decades > 0.8:
        return (1.0, 2.0, 5.0)
    return (1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 7.0)
