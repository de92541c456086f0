"""Collect the values of a diagram that a page shows under the pointer, and where they are in the diagram."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from electra_dist.report.curve_points import RunCurves, evenly_spaced, series, smooth_curve
from electra_dist.report.panels import Panel
from electra_dist.report.plot_style import SERIES, VARIABLES, line_color

MAX_HOVER_POINTS = 300  # of a curve, whose values a page shows under the pointer
SIZE_INCHES = (4.0, 2.35)  # of a diagram; the page scales it
_POINTS_PER_INCH = 72  # unit of an SVG's viewBox


def axis_positions(axes: Axes) -> dict[str, Any]:
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


def hover_lines(panel: Panel, runs: Sequence[RunCurves]) -> list[dict[str, Any]]:
    """Return the values that a page shows under the pointer: at most 300 evenly spaced points of each line.
    "color" is the name of a CSS variable. A line that is drawn smoothed has also "smooth", the smoothed values.
    """
    lines = []
    for number, run in enumerate(runs):
        for line in panel.lines:
            steps, values = series(run, line)
            is_left_out = line.is_baseline and len(runs) > 1
            if not len(steps) or is_left_out:
                continue
            chosen = evenly_spaced(len(steps), MAX_HOVER_POINTS)
            label = line.label if len(runs) == 1 else f"{run.name}: {line.label}"
            color = line_color(line) if len(runs) == 1 else SERIES[number]
            hover_line: dict[str, Any] = {
                "label": label,
                "color": VARIABLES[color],
                "steps": [int(step) for step in steps[chosen]],
                "values": [_short(value) for value in values[chosen]],
            }
            if line.kind == "train" and line.smooth:
                smooth_steps, smooth_values = smooth_curve(steps, values)
                smooth_at_chosen = np.interp(steps[chosen], smooth_steps, smooth_values)
                hover_line["smooth"] = [_short(value) for value in smooth_at_chosen]
            lines.append(hover_line)
    return lines


def _short(value: float) -> float:
    """Return a number rounded to five significant figures, which keeps a page small."""
    return float(f"{value:.5g}")
