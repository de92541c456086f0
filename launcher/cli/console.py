"""Print the results of commands: text and tables, which are not cut when they go into a pipe, and JSON."""

from __future__ import annotations

import json
import math

from electra_dist.console import Console

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


def _without_nan(tree: object) -> object:
    if isinstance(tree, float) and not math.isfinite(tree):
        return None
    if isinstance(tree, dict):
        return {key: _without_nan(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_without_nan(value) for value in tree]
    return tree
