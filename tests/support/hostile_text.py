"""A text as somebody may write it to deceive whoever reads it, and what the output of a command may show of it."""

from __future__ import annotations

HOSTILE = "\x1b]0;owned\x07\u202e[link=file:///x]\x9b31m[/] \u2066|\u200b\nrun b: finished"
SHOWN = "\\x1b]0;owned\\x07\\u202e[link=file:///x]\\x9b31m[/] \\u2066|\\u200b\\nrun b: finished"


def assert_shown(output: str, times: int = 1) -> None:
    """Check that a command without a terminal has printed HOSTILE at least `times` times, visibly and on one line."""
    assert output.replace("\n", "").isprintable(), ascii(output)
    assert output.count(SHOWN) >= times, output
