"""Build the parts that the report pages share: the page itself, tables, notes, curves and small formats."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from electra_dist.escapes import html_text
from electra_dist.report.curve_points import RunCurves
from electra_dist.report.curves import draw_panel
from electra_dist.report.page_assets import SCRIPT, STYLE
from electra_dist.report.panels import PANELS
from electra_dist.store.atomic_files import replacing


def page(title: str, body: str) -> str:
    """Return a whole page that needs no other file; `title` (of the window) and `body` (in <main>) are HTML."""
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{title}</title>\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n<main>\n{body}</main>\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def write_page(path: Path, text: str) -> None:
    """Write an HTML page atomically; create a missing folder, and replace an existing file."""
    with replacing(path) as file:
        file.write(text.encode(errors="backslashreplace"))  # a damaged record may hold half of a character


def curves(runs: Sequence[RunCurves], note: str) -> str:
    """Return the HTML section with all diagrams of one or several runs, and below them `note`, which is HTML."""
    cards = ""
    for panel in PANELS:
        drawn = draw_panel(panel, runs)
        if drawn is not None:
            # "<" is written as an escape, so that no text in the values can end the element.
            hover = json.dumps(drawn.hover, separators=(",", ":")).replace("<", "\\u003c")
            cards += f'<div class="card">{drawn.svg}<script type="application/json">{hover}</script></div>\n'
    if not cards:
        return '<p class="note">No step has been recorded yet.</p>\n'
    return f'<h2>Curves</h2>\n<section class="curves">\n{cards}</section>\n<p class="note">{note}</p>\n'


def table(rows: Iterable[Sequence[str]], head: Sequence[str] = (), left: bool = False) -> str:
    """Return an HTML table that scrolls sideways on a narrow screen; the text of the cells is escaped here.
    With `left`, all columns are aligned to the left, otherwise only the first column.
    """
    lines = []
    if head:
        lines.append("".join(f"<th>{html_text(cell)}</th>" for cell in head))
    for row in rows:
        lines.append("".join(f"<td>{html_text(cell)}</td>" for cell in row))
    inner = "".join(f"<tr>{line}</tr>\n" for line in lines)
    css_class = " class=left" if left else ""
    return f'<div class="card scroll"><table{css_class}>\n{inner}</table></div>\n'


def omitted(count: int, name: str) -> str:
    """Return a note such as "12 earlier events are not shown", where `name` is "events"; "" if `count` is 0."""
    if count <= 0:
        return ""
    return f'<p class="note">{count:,} earlier {name} are not shown.</p>\n'


def percent(fraction: float) -> str:
    """Return a fraction as a percentage with one decimal: "12.5 %" for 0.125."""
    return f"{100 * fraction:.1f} %"


def minute(time: str) -> str:
    """Return an ISO 8601 time for display, without its seconds and time zone, such as 2026-01-31 09:05."""
    return datetime.fromisoformat(time).strftime("%Y-%m-%d %H:%M")


def now() -> str:
    """Return the present time in UTC for display, such as 2026-01-31 09:05."""
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
