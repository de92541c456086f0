"""Print to a terminal with the library rich, without obeying markup in text that a stranger wrote.

Guarantee: each text that a `Console` gets, alone or in a table, is shown on one line, with the escapes of `printable`.
"""

from __future__ import annotations

from typing import Any

import rich.console
from rich.text import Text
from typing_extensions import override

from electra_dist.escapes import printable


class Console(rich.console.Console):
    """Console of rich that shows markup and emoji codes as plain text; colours come from `styled` only."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    @override
    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


def styled(*parts: str | tuple[str, str]) -> Text:
    """Join `parts` into one text for a `Console`. A part is a text, or a pair (text, style) such as ("bad", "red")."""
    pairs = [(part, "") if isinstance(part, str) else part for part in parts]
    return Text.assemble(*((printable(text), style) for text, style in pairs))
