"""Print the results of commands, text and tables that are not cut in a pipe, and JSON; show how far a command is."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from electra_dist.console import Console
from electra_dist.escapes import printable

_WIDTH_OF_A_PIPE = 10_000  # columns; wider than any table, and a table is only as wide as its cells


def open_console(*, soft_wrap: bool = True) -> Console:
    """Return a console for stdout.

    On a terminal, tables fit its width and have colours. In a pipe or a file nothing is cut, wrapped or coloured, even
    if FORCE_COLOR is set, so that other programs can read the lines. Set `soft_wrap` for text, so that the terminal
    breaks long lines; unset it for tables, so that rich breaks long lines within the cells.
    """
    console = Console(soft_wrap=soft_wrap)
    if console.file.isatty():
        return console
    return Console(soft_wrap=soft_wrap, width=_WIDTH_OF_A_PIPE, force_terminal=False, color_system=None)


def print_json(tree: object) -> None:
    """Print a JSON value on stdout, indented by two spaces; NaN and infinities, which JSON lacks, become null."""
    print(json.dumps(_without_nan(tree), indent=2).replace("\x7f", "\\u007f"))


def write_json(path: Path, tree: dict[str, object]) -> None:
    """Write JSON for other programs to read; make the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(tree, indent=2) + "\n", "utf-8")


def _without_nan(tree: object) -> object:
    if isinstance(tree, float) and not math.isfinite(tree):
        return None
    if isinstance(tree, dict):
        return {key: _without_nan(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_without_nan(value) for value in tree]
    return tree


@contextmanager
def progress_bar(out: Console) -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress bar while the `with` block runs; show nothing if `out` is not a terminal.

    Yields a function that updates the bar. Its arguments are the name of the current activity, the number of parts
    that are done, and the number of all parts. The bar restarts when the name changes.
    """
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=out,
        transient=True,
        disable=not out.is_terminal,
    )
    with bar:
        bar_id = bar.add_task("", total=None)

        def report(activity: str, done: int, total: int) -> None:
            description = printable(activity)
            if bar.tasks[0].description != description:
                bar.reset(bar_id, description=description)
            bar.update(bar_id, completed=done, total=total)

        yield report


@contextmanager
def byte_progress(out: Console, total: int | None) -> Iterator[Callable[[int], None]]:
    """Show a progress bar of bytes that are verified while the `with` block runs; yield a function that adds bytes."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = [TextColumn("verified"), BarColumn(), DownloadColumn(), TransferSpeedColumn()]
    with Progress(*columns, transient=True, console=out) as progress:
        bar = progress.add_task("verified", total=total)
        yield lambda num_bytes: progress.advance(bar, num_bytes)
