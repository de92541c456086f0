"""Draw a bar diagram as SVG text for a page, in the style of the curves of a report."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from electra_dist.report.curves import svg_for_page
from electra_dist.report.hover_values import SIZE_INCHES
from electra_dist.report.plot_style import SERIES, svg_style

_MAX_TICKS = 9  # labels below the bars, at most


def draw_bars(title: str, labels: Sequence[str], values: Sequence[int]) -> str:
    """Return a bar diagram as the text of an <svg> element; `title` must need no HTML escaping.
    If there are many bars, evenly spaced labels are shown, at most `_MAX_TICKS`.
    """
    with matplotlib.rc_context(svg_style() | {"svg.hashsalt": title}):
        figure = Figure(figsize=SIZE_INCHES, layout="constrained")
        axes = figure.add_subplot()
        axes.bar(range(len(values)), values, width=0.86, color=SERIES[0])
        axes.set_title(title, loc="left")
        bars_per_label = math.ceil(len(labels) / _MAX_TICKS)
        labelled_bars = range(0, len(labels), bars_per_label)
        axes.set_xticks(list(labelled_bars), [labels[bar] for bar in labelled_bars])
        axes.grid(visible=False, axis="x")
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        buffer = io.StringIO()
        FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None})
    return svg_for_page(buffer.getvalue(), title)
