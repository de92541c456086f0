"""Find the words of a text in any script."""

from __future__ import annotations

import unicodedata

# Python's `\w` has no combining marks: it cuts words of Hindi, Bengali and Tamil at vowel signs, vowelled Arabic at
# its points, decomposed text (NFD) at accents, and Persian at the joiners U+200C and U+200D.
_MARKS = "".join(
    chr(code)
    for code in (*range(0x300, 0x20000), *range(0xE0100, 0xE01F0))  # all marks are in these ranges
    if unicodedata.category(chr(code)).startswith("M")
)

# Letters and digits in a row, with the marks on them. Possessive, so that a search takes linear time.
WORD_PATTERN = rf"\w++(?:[{_MARKS}\u200c\u200d]++\w*+)*+"
