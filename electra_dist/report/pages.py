"""Make the report pages from the templates in `templates/`: the page itself, tables, tiles, curves and small formats.

Guarantee: a page needs no other file; its style sheet and its script, `page.css` and `page.js`, become part of it.
Every value is escaped, so that none of it is markup and every character of it can be seen (`escapes.html_text`).

How: a template is rendered by jinja2. Style: light or dark by the reader's preference, one column on a phone. The
script shows the values of a diagram's curves at the step under the pointer: each diagram is followed by a JSON element
with the positions of its axes and the points of its curves (`curves.DrawnPanel.hover`). Without scripts, the page
shows everything except these values.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from electra_dist.escapes import html_text, printable
from electra_dist.report.curves import DrawnPanel, draw_panel
from electra_dist.report.panels import PANELS, RunCurves
from electra_dist.store.atomic_files import replacing

Tile = tuple[str, str, str]  # name, value, remark
NONE = "-"  # for a value that a run does not have
_FIGURE = re.compile(r"-|-?[0-9][0-9,.]*( ?%|[kMBT]|e[+-]?[0-9]+)?")


def render(template: str, **values: Any) -> str:
    """Return the HTML text of the page that a file in `templates/` makes of `values`."""
    return _ENVIRONMENT.get_template(template).render(now=now(), **values)


def write_page(path: Path, text: str) -> None:
    """Write an HTML page atomically; create a missing folder, and replace an existing file."""
    with replacing(path) as file:
        file.write(text.encode(errors="backslashreplace"))  # a damaged record may hold half of a character


def draw_diagrams(runs: Sequence[RunCurves]) -> list[DrawnPanel]:
    """Draw the report's diagrams of one or several runs; those for which no run has a value are left out."""
    drawn = (draw_panel(panel, runs) for panel in PANELS)
    return [diagram for diagram in drawn if diagram is not None]


def percent(fraction: float) -> str:
    """Return a fraction as a percentage with one decimal, such as "12.5 %"; a dash if it is not finite."""
    return f"{100 * fraction:.1f} %" if math.isfinite(fraction) else NONE


def decimals(value: float) -> str:
    """Return a value with four decimals; a dash if it is not finite."""
    return f"{value:.4f}" if math.isfinite(value) else NONE


def minute(time: str) -> str:
    """Return an ISO 8601 time for display, without its seconds and time zone, such as 2026-01-31 09:05."""
    return datetime.fromisoformat(time).strftime("%Y-%m-%d %H:%M")


def now() -> str:
    """Return the present time in UTC for display, such as 2026-01-31 09:05."""
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M")


def _shown(value: Any) -> Any:
    """Put an escape in place of each character of a value that cannot be seen; jinja2 then escapes markup."""
    return value if hasattr(value, "__html__") else printable(str(value))


def unbroken(text: str) -> Markup:
    """Return a text as HTML in which percentages and ranges stay on one line."""
    return Markup(html_text(text).replace(" %", "&nbsp;%").replace(" to ", "&nbsp;to&nbsp;"))


def _figure_columns(rows: Sequence[Sequence[str]]) -> list[int]:
    """Return the indices of a table's columns that hold numbers only, which are aligned to the right."""
    return [
        column
        for column, cells in enumerate(zip(*rows, strict=True))
        if all(map(_FIGURE.fullmatch, cells)) and set(cells) != {"-"}
    ]


def _values(tree: dict[str, Any]) -> Markup:
    """Return JSON for a script element; "<" is written as an escape, so that no text can end the element."""
    return Markup(json.dumps(tree, separators=(",", ":")).replace("<", "\\u003c"))


def _lines(text: str) -> Markup:
    """Escape the markup in a text of several lines whose characters can all be seen, such as YAML of this project."""
    return Markup(html.escape(text))


_ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,
    finalize=_shown,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=False,
)
_ENVIRONMENT.filters |= {
    "minute": minute,
    "unbroken": unbroken,
    "values": _values,
    "lines": _lines,
    "figure_columns": _figure_columns,
}
