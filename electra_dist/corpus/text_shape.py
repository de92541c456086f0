"""Recognise input that is no text: base64, the bytes of a program, or one character on each line.

Guarantee: a source is judged by sums over its documents, so neither their order nor the number of workers matters.

How: the first 500 characters of each document are measured. Words are separated by white space, and are counted on
ASCII lines only, because several scripts write none. Words of text have 4 to 8 characters on average, also in source
code.

Limits: a source is judged as a whole. A tenth of base64 among text is not noticed, and neither is text of which only
the beginnings of the documents are text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from pydantic import Field

from electra_dist.config import Section

_MEASURED = 500  # characters of a document
_LEAST = 200  # characters of a source that is judged
_LONG_WORDS = 20.0  # characters of a word on average, from which a source is no text
_SHORT = 2.0  # characters of a word or a line on average, up to which it is none
_MANY_CONTROLS = 0.01  # share of the characters
# Control characters except white space, and the character that stands for what could not be decoded.
_CONTROL = re.compile("[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\ufffd]")


class TextShape(Section):
    """Counts over the beginnings of some documents, by which input that is no text is recognised."""

    lines: int = Field(default=0, description="lines that are not empty")
    characters: int = Field(default=0, description="their characters that are no white space")
    plain_words: int = Field(default=0, description="words of the lines of ASCII")
    plain_characters: int = Field(default=0, description="characters of these words")
    controls: int = Field(default=0, description="control characters, and U+FFFD for what could not be decoded")

    @property
    def oddity(self) -> str:
        """Return why this is no text, in one clause with a figure; "" for text, or for fewer than 200 characters."""
        if self.characters < _LEAST:
            return ""
        if self.controls >= _MANY_CONTROLS * self.characters:
            share = self.controls / self.characters
            return f"{share:.1%} of its characters are control characters, as in a file that is not text"
        line = self.characters / self.lines
        if line <= _SHORT:
            return f"its lines have {line:.1f} characters on average"
        if 2 * self.plain_characters < self.characters:
            return ""
        word = self.plain_characters / self.plain_words
        if word >= _LONG_WORDS:
            return f"its words have {word:.0f} characters on average, as in base64; those of text have 4 to 8"
        if word <= _SHORT:
            return f"its words have {word:.1f} characters on average, as in a dump of bytes; those of text have 4 to 8"
        return ""


def measure(text: str) -> Counter[str]:
    """Count lines, words and characters in the first 500 characters of a document: field of `TextShape` -> number."""
    counts: Counter[str] = Counter()
    beginning = text[:_MEASURED]
    for line in beginning.split("\n"):
        words = line.split()
        if not words:
            continue
        num_characters = sum(map(len, words))
        counts["lines"] += 1
        counts["characters"] += num_characters
        if line.isascii():
            counts["plain_words"] += len(words)
            counts["plain_characters"] += num_characters
    counts["controls"] = len(_CONTROL.findall(beginning))
    return counts


def remark_on_shape(source: str, shape: TextShape) -> str:
    """Return a line for the user if a source looks like base64, a program or other data that is no text, else ""."""
    oddity = shape.oddity
    return oddity and f"{source} looks like no text: {oddity}; check it, and leave it out or decode it first"


def remarks_on_texts(source: str, texts: Iterable[str]) -> list[str]:
    """Return one line for the user if the texts of a source, such as a file, look like no text; otherwise []."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(measure(text))
    remark = remark_on_shape(source, TextShape(**counts))
    return [remark] if remark else []
