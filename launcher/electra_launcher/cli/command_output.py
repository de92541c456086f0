"""Print the results of commands, text and tables that are not cut in a pipe, and JSON; show how far a command is."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from electra_dist.console import Console
from electra_dist.errors import EXIT_STOPPED
from electra_dist.escapes import printable

_WIDTH_OF_A_PIPE = 10_000  # columns; wider than any table, and a table is only as wide as its cells
_FIRST_PAUSE_S = 3.0  # until the first line, if it can say how long the rest takes
# Seconds between two lines of progress: a tenth of the time so far, within limits.
_PAUSE_SHARE = 0.1
_LEAST_PAUSE_S = 10.0
_MOST_PAUSE_S = 300.0


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
    """Write `tree` to the file `path` as indented JSON; make its folder if it is missing."""
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


class _ProgressLines:
    """Lines of progress for an output that is no terminal: an estimate after three seconds, then ever more rarely."""

    def __init__(self, out: Console, amount: Callable[[int], str] = "{:,}".format) -> None:
        self._out = out
        self._amount = amount  # how a number of parts is written
        self._began = self._newest_line = time.monotonic()
        self._activity = ""
        self._activity_began = 0.0
        self._done_before = 0  # parts that were done when the activity began

    def report(self, activity: str, done: int, total: int | None) -> None:
        """Print how many parts are done and about how long the rest takes, unless the newest line is too recent.

        If `total` is None, the number of parts is not known, and the time is left out.
        """
        now = time.monotonic()
        if activity != self._activity:
            self._activity, self._activity_began, self._done_before = activity, now, done
        pause_s = max(_LEAST_PAUSE_S, min(_MOST_PAUSE_S, _PAUSE_SHARE * (now - self._began)))
        if self._newest_line == self._began and total is not None and done > self._done_before:
            pause_s = min(pause_s, _FIRST_PAUSE_S)
        if now - self._newest_line < pause_s:
            return
        self._newest_line = now
        new = done - self._done_before
        line = f"{activity}: {self._amount(done)}"
        if total is not None:
            line += f" of {self._amount(total)}"
        if total is not None and new > 0:
            left_s = (now - self._activity_began) * (total - done) / new
            line += f", about {left_s:,.0f} s left"
        self._out.print(line, soft_wrap=True)


@contextmanager
def progress_bar(out: Console) -> Iterator[Callable[[str, int, int], None]]:
    """Show progress while the `with` block runs: a bar on a terminal, otherwise a line now and then.

    Yields a function that updates it. Its arguments are the name of the current activity, the number of parts that
    are done, and the number of all parts. The bar restarts when the name changes.
    """
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    if not out.is_terminal:
        yield _ProgressLines(out).report
        return
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=out,
        transient=True,
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
def resumable(kept: str) -> Iterator[None]:
    """On Ctrl-C within the `with` block, print how to go on and what is `kept`, and end with exit code 75."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"interrupted; run the same command again to go on; {kept}", file=sys.stderr)
        raise typer.Exit(EXIT_STOPPED) from None


def tracked(shards: Iterable[int], activity: str) -> Iterator[int]:
    """Yield the numbers `shards`, and show on stderr, with the name `activity`, how many of them are done."""
    numbers = list(shards)
    with progress_bar(Console(stderr=True)) as report:
        for num_done, number in enumerate(numbers):
            report(activity, num_done, len(numbers))
            yield number


@contextmanager
def byte_progress(out: Console, total: int | None) -> Iterator[Callable[[int], None]]:
    """Show how many bytes are verified while the `with` block runs; `total` None means that nobody knows their number.

    Yields a function to call with the number of bytes verified since its last call.
    """
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    if not out.is_terminal:
        lines = _ProgressLines(out, lambda num_bytes: f"{num_bytes / 1e6:,.0f} MB")
        verified = 0

        def add(num_bytes: int) -> None:
            nonlocal verified
            verified += num_bytes
            lines.report("verified", verified, total)

        lines.report("verified", 0, total)
        yield add
        return
    columns = [TextColumn("verified"), BarColumn(), DownloadColumn(), TransferSpeedColumn()]
    with Progress(*columns, transient=True, console=out) as progress:
        bar = progress.add_task("verified", total=total)
        yield lambda num_bytes: progress.advance(bar, num_bytes)
