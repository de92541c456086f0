"""Make text of unknown origin safe to show: on a terminal or in a log, in a Markdown page, and in an HTML page.

Names of files, hosts and sources, and every text that is read from a record, may hold escape sequences, line breaks
and marks that reverse or hide what is beside them. Guarantee: what these functions return is one line, on which a
reader sees every character. It cannot change the terminal, or become a link, markup or a table cell of its own.

How: every character that shows nothing by itself appears as a Python escape such as \\x1b, \\u202e or \\n. Markdown's
and HTML's own characters are escaped in addition.
"""

from __future__ import annotations

import html
import re

# Characters that Python calls printable although they show nothing: fillers, joiners and selectors of variants.
_INVISIBLE = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")
# Markdown's own characters, and those that it takes as its own at the beginning of a line.
_MARKDOWN = re.compile(r"[\\`*_{}\[\]|~$]|^[#+=.:!()-]")
_LIST_NUMBER = re.compile(r"^\d+(?=[.)]( |$))")


def printable(text: str) -> str:
    """Return a text as one line in which every character can be seen.

    Control characters, line breaks, text-direction marks, spaces other than U+0020, characters without width, and
    bytes of a file name that are not UTF-8, appear as escapes.
    """
    if text.isprintable() and not _INVISIBLE.search(text):
        return text
    return "".join(char if char.isprintable() and not _INVISIBLE.match(char) else _escape(char) for char in text)


def markdown_text(text: str) -> str:
    """Escape a text for a line or a table cell of a Markdown page, so that none of it is markup, HTML or a link."""
    escaped = _MARKDOWN.sub(r"\\\g<0>", html.escape(printable(text), quote=False))
    return _LIST_NUMBER.sub(r"\g<0>\\", escaped)


def markdown_code(text: str) -> str:
    """Return a text as a code span of a Markdown page, so that none of it is markup.

    Use it in table cells, where `|` must be escaped; elsewhere, readers would see a backslash before each `|`.
    """
    shown = printable(text).replace("|", "\\|")  # A table is divided into cells before its code spans are read.
    longest_run = max((len(run) for run in re.findall("`+", shown)), default=0)
    fence = "`" * (longest_run + 1)
    padding = " " if shown.startswith("`") or shown.endswith("`") else ""
    return f"{fence}{padding}{shown}{padding}{fence}"


def html_text(text: str) -> str:
    """Escape a text so that none of it is markup in the content or a quoted attribute of an HTML element."""
    return html.escape(printable(text))


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")
