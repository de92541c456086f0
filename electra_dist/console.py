"""Print to a terminal with the library rich, without obeying markup in text that a stranger wrote.

Guarantee: each text that a `Console` gets, alone or in a table, is shown on one line, with the escapes of `printable`.
While one console of a process shows a progress bar, what the others print on a terminal appears above the bar.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import rich.console
from rich.text import Text
from typing_extensions import override

from electra_dist.escapes import printable

if TYPE_CHECKING:
    from rich.live import Live


class Console(rich.console.Console):
    """Console of rich that shows markup and emoji codes as plain text; colours come from `styled` only."""

    _with_bar: ClassVar[Console | None] = None  # the console that shows a progress bar now

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    @override
    def set_live(self, live: Live) -> bool:  # rich calls it when a bar begins
        Console._with_bar = self
        return super().set_live(live)

    @override
    def clear_live(self) -> None:  # and this when it ends
        Console._with_bar = None
        super().clear_live()

    @override
    def print(self, *objects: Any, **options: Any) -> None:
        bar = Console._with_bar
        if bar is None or bar is self or not self.is_terminal:
            super().print(*objects, **options)
        else:  # Only the bar's own console knows that a line must not begin behind the bar.
            bar.print(*objects, **{"soft_wrap": self.soft_wrap, **options})

    @override
    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


def styled(*parts: str | tuple[str, str]) -> Text:
    """Join `parts` into one text for a `Console`. A part is a text, or a pair (text, style) such as ("bad", "red")."""
    pairs = [(part, "") if isinstance(part, str) else part for part in parts]
    return Text.assemble(*((printable(text), style) for text, style in pairs))
