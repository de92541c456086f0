"""The console of all commands shows what it is given, on a terminal and in a pipe."""

from __future__ import annotations

import io

import pytest
from rich.progress import Progress
from rich.table import Table

from electra_dist.console import Console, styled

HOSTILE = "[link=file:///etc/passwd]x[/link] [/] [bold :smile: \x1b]0;title\x07 \u202e \x9b31m \u2028"
SHOWN = "[link=file:///etc/passwd]x[/link] [/] [bold :smile: \\x1b]0;title\\x07 \\u202e \\x9b31m \\u2028"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_text_is_shown_as_it_is_alone_and_in_every_place_of_a_table(is_terminal: bool) -> None:
    out = Console(file=io.StringIO(), width=300, force_terminal=is_terminal, color_system=None)
    table = Table("name", HOSTILE, title=HOSTILE, caption=HOSTILE)
    table.add_row(HOSTILE, styled(("bad ", "red"), HOSTILE))
    out.print(HOSTILE, soft_wrap=True)
    out.print(table)

    text = out.file.getvalue()  # type: ignore[attr-defined]
    assert text.count(SHOWN) == 6, text
    if not is_terminal:
        assert all(char.isprintable() or char == "\n" for char in text)


def test_a_line_break_in_a_text_makes_no_line() -> None:
    out = Console(file=io.StringIO(), width=80)
    out.print("run a: dead (x\nrun b: finished)")
    assert out.file.getvalue() == "run a: dead (x\\nrun b: finished)\n"  # type: ignore[attr-defined]


def test_a_line_that_another_console_prints_during_a_bar_begins_on_a_line_of_its_own() -> None:
    """After the bar is closed, and into a file, lines are printed as ever."""
    terminal, file = io.StringIO(), io.StringIO()
    out = Console(file=terminal, width=300, force_terminal=True, color_system=None, soft_wrap=True)
    bars = Console(file=terminal, width=40, force_terminal=True, color_system=None)
    with Progress(console=bars, transient=True) as bar:
        bar.add_task("training", total=3)
        bar.refresh()
        out.print("a note that is longer than the forty columns of the console with the bar")
        Console(file=file).print("into a file")
    out.print("at the end")

    text = terminal.getvalue()
    begin = text.index("a note")
    assert text[:begin].endswith("\r\x1b[2K"), repr(text[:begin])  # to the beginning of the bar's line, now empty
    assert text[begin:].startswith("a note that is longer than the forty columns of the console with the bar\n")
    assert text.endswith("at the end\n")
    assert file.getvalue() == "into a file\n"
