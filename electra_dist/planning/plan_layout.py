"""Lay out the tables of a plan: by the library rich on a terminal, as aligned plain text on any other stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from rich import box
from rich.console import Group
from rich.table import Table

from electra_dist.console import Console
from electra_dist.escapes import printable


@dataclass(frozen=True)
class PlanSection:
    """Table of a plan, with a title and cells of text; printed as a rich table or as aligned plain text."""

    title: str
    rows: list[list[str]]  # equally many cells in every row, and in the header
    header: list[str] | None = None
    mark: int | None = None  # index of the row that the config selects; it is highlighted
    note: str = ""  # printed below the table
    prose: bool = True  # the last column is text (aligned to the left), not numbers


def print_sections(sections: Sequence[PlanSection], stream: TextIO) -> None:
    """Print tables: framed ones on a terminal, plain text with an empty line between them on any other stream."""
    if stream.isatty():
        tables = [_rich_table(section) for section in sections]
        Console(file=stream).print(Group(*tables))
    else:
        plain_texts = [_plain(section) for section in sections]
        print("\n\n".join(plain_texts), file=stream, flush=True)


def _widths(section: PlanSection) -> list[int]:
    lines = list(section.rows)
    if section.header:
        lines.append(section.header)
    columns = zip(*lines, strict=True)
    return [max(len(cell) for cell in column) for column in columns]


def _plain(section: PlanSection) -> str:
    """Return a section as aligned text; the row that the config selects starts with ">"."""
    widths = _widths(section)
    lines = [section.title]
    if section.header:
        lines.append(_plain_line(section, section.header, widths, marker="  "))
    for number, row in enumerate(section.rows):
        marker = "> " if number == section.mark else "  "
        lines.append(_plain_line(section, row, widths, marker))
    if section.note:
        lines.append(f"  ({section.note})")
    return "\n".join(printable(line) for line in lines)


def _plain_line(section: PlanSection, cells: list[str], widths: list[int], marker: str) -> str:
    """Return one line of a table: `marker`, then the cells, with text aligned left and numbers aligned right."""
    aligned_cells = []
    for column, (cell, width) in enumerate(zip(cells, widths, strict=True)):
        if _is_text(section, column):
            aligned_cells.append(cell.ljust(width))
        else:
            aligned_cells.append(cell.rjust(width))
    return (marker + "  ".join(aligned_cells)).rstrip()


def _is_text(section: PlanSection, column: int) -> bool:
    """Return whether a column holds text, not numbers: the first one, and the last one if `prose` is set."""
    last_column = len(section.rows[0]) - 1
    return column == 0 or (section.prose and column == last_column)


def _rich_table(section: PlanSection) -> Table:
    """Return a section as a table of the library rich; the row that the config selects is bold green."""
    table = Table(
        title=section.title,
        title_justify="left",
        title_style="bold",
        caption=section.note or None,
        caption_justify="left",
        show_header=section.header is not None,
        box=box.ROUNDED,
    )

    # Without a header, the columns still need names, which are not shown.
    column_names = section.rows[0] if section.header is None else section.header
    for column, name in enumerate(column_names):
        if column == 0:
            table.add_column(name, justify="left", no_wrap=True)
        elif _is_text(section, column):
            table.add_column(name, justify="left")
        else:
            table.add_column(name, justify="right", no_wrap=True)

    for number, row in enumerate(section.rows):
        style = "bold green" if number == section.mark else None
        table.add_row(*row, style=style)
    return table
