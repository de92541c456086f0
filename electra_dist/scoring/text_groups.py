"""Read texts to score from lines: one text a line, and groups of lines that an empty line ends.

Guarantee: every line that is not blank is a text; a line that is not UTF-8 is an error with its number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from electra_dist.errors import UserError


class TextLine(NamedTuple):
    """Text of one input line, with the numbers of the line and of its group."""

    line: int  # number of the line, from 1
    group: int  # number of its group, from 1; a group is a run of lines without a blank line between them
    text: str


def read_text_lines(data: bytes, name: str) -> list[TextLine]:
    r"""Return the texts of an input in UTF-8, one for each line that is not blank.

    A byte order mark is left out, and `\r\n` ends a line, too. Raises UserError, which gives the input's `name`, if
    there is no text or a line is not UTF-8.
    """
    texts: list[TextLine] = []
    group = 0
    previous_is_blank = True
    for number, raw_line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        try:
            text = raw_line.decode("utf-8").strip()
        except UnicodeDecodeError:
            raise UserError(f"{name}:{number}: not UTF-8; convert the file to UTF-8") from None
        if not text:
            previous_is_blank = True
            continue
        if previous_is_blank:
            group += 1
        previous_is_blank = False
        texts.append(TextLine(line=number, group=group, text=text))
    if not texts:
        raise UserError(f"{name}: no text; write one text on each line")
    return texts


def ranks(texts: Sequence[TextLine], scores: Sequence[float]) -> list[tuple[int, int]]:
    """Rank the texts of each group, highest score first, ties by line; return (index in `texts`, rank from 1)."""
    order = sorted(range(len(texts)), key=lambda index: (texts[index].group, -scores[index], index))
    ranked = []
    rank = 0
    previous_group = 0
    for index in order:
        rank = rank + 1 if texts[index].group == previous_group else 1
        previous_group = texts[index].group
        ranked.append((index, rank))
    return ranked
