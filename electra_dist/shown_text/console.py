"""Print for people with the library rich, which by itself would obey text that a stranger wrote.

Guarantee: a text that is given to a `Console`, alone or as a cell, heading or title of a table, is shown as
`printable` makes it: tags such as `[red]` and names such as `:smile:` stay as they are, and nothing reaches the
terminal as a control. Each text is one line: print lines one by one. Colours are given as styles (`styled`).
"""

from __future__ import annotations

from typing import Any

import rich.console
from rich.text import Text

from electra_dist.shown_text.escapes import printable


class Console(rich.console.Console):
    """Console of rich that shows every text as it is, without markup, emoji codes, highlighting and controls."""

    def __init__(self, **options: Any) -> None:
        """Take the options of rich's console, except those for markup, emoji codes and highlighting."""
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a text as rich renders it, after `printable`; rich calls this for each text that it is given."""
        return super().render_str(printable(text), **options)


def styled(*parts: str | tuple[str, str]) -> Text:
    """Return a text for a `Console` whose parts are a text, or a text and its style, such as ("bad", "red")."""
    pairs = [(part, "") if isinstance(part, str) else part for part in parts]
    return Text.assemble(*((printable(text), style) for text, style in pairs))
