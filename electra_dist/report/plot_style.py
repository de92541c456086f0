"""Hold the colors and the style of diagrams: of SVGs in a page, whose style sheet decides the colors, and of PNGs.

How: matplotlib accepts no CSS variables as colors, so an SVG is drawn with placeholder colors, which are then replaced
by CSS variables. A PNG on white is drawn with the colors of `PRINT` in place of the placeholders.
"""

from __future__ import annotations

from electra_dist.report.panels import CurveLine

MAX_RUNS = 8  # that one diagram can show, each in a color of its own

INK = "#010101"
GRID = "#020202"
SOFT = "#030303"
SERIES = tuple(f"#0404{number:02d}" for number in range(1, MAX_RUNS + 1))
VARIABLES = {INK: "--ink", GRID: "--grid", SOFT: "--soft"} | {
    color: f"--series-{number}" for number, color in enumerate(SERIES, start=1)
}
_PRINT_SERIES = ("#2563eb", "#ea580c", "#15803d", "#7c3aed", "#b91c1c", "#0891b2", "#a16207", "#db2777")
PRINT = {INK: "#374151", GRID: "#e5e7eb", SOFT: "#6b7280"} | dict(zip(SERIES, _PRINT_SERIES, strict=True))


def line_color(line: CurveLine) -> str:
    """Return the placeholder color of a line in a diagram of one run; the real color replaces it later."""
    if line.is_baseline:
        return SOFT
    return SERIES[1] if line.is_second else SERIES[0]


def print_style() -> dict[str, object]:
    """Return matplotlib's settings for a PNG on white, with a larger font; pass them to `matplotlib.rc_context`."""
    style = svg_style()
    for key, value in style.items():
        if isinstance(value, str) and value in PRINT:
            style[key] = PRINT[value]
    return style | {"font.size": 9, "axes.titlesize": 10}


def svg_style() -> dict[str, object]:
    """Return matplotlib's settings for an SVG: text kept as text, a plain light frame, and placeholder colors."""
    return {
        "font.family": "sans-serif",
        "font.size": 10,
        "svg.fonttype": "none",  # text stays text instead of becoming outlines
        "text.parse_math": False,  # a name may hold dollar signs
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": GRID,
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
        "grid.color": GRID,
        "grid.linewidth": 0.6,
        "xtick.color": INK,
        "ytick.color": INK,
        "xtick.major.size": 0,
        "ytick.major.size": 0,
        "legend.frameon": False,
        "legend.fontsize": 8.5,
        "lines.solid_capstyle": "round",
        "path.simplify": True,
    }
