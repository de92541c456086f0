"""Counts the steps that Python's way of matching takes for a regular expression on a text, without a clock.

`re` tells no number of steps, so this module walks the parsed expression as `re` does: alternatives in their order,
repetitions from the longest or from the shortest one, and back where the rest does not match. The number depends on
the expression and the text alone.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

from re import _constants as codes  # type: ignore[attr-defined]  # isort: skip
from re import _parser as parser  # type: ignore[attr-defined]  # isort: skip

Node = tuple[Any, Any]
_FOREIGN = "\x01"  # a character that no expression of this project names
_MOST_STEPS = 20_000
_CATEGORIES = {
    codes.CATEGORY_DIGIT: re.compile(r"\d"),
    codes.CATEGORY_NOT_DIGIT: re.compile(r"\D"),
    codes.CATEGORY_SPACE: re.compile(r"\s"),
    codes.CATEGORY_NOT_SPACE: re.compile(r"\S"),
    codes.CATEGORY_WORD: re.compile(r"\w"),
    codes.CATEGORY_NOT_WORD: re.compile(r"\W"),
}


class TooManySteps(Exception):
    """A text of a few characters takes so many steps that their number must be growing fast."""


class Matcher:
    """A regular expression that counts the steps of its matching in `steps`."""

    def __init__(self, pattern: str | bytes, flags: int = 0) -> None:
        """Parse an expression."""
        self._nodes: list[Node] = list(parser.parse(pattern, flags))
        self._is_multiline = bool(flags & re.MULTILINE)
        self._is_dot_all = bool(flags & re.DOTALL)
        self._text = ""
        self.steps = 0

    def search_all(self, text: str) -> int:
        """Return the steps of finding all matches in a text, one after another."""
        self._begin(text)
        position = 0
        while position <= len(text):
            end = next(self._ends(self._nodes, position), None)
            position = position + 1 if end is None else max(end, position + 1)
        return self.steps

    def match(self, text: str, *, whole: bool) -> int:
        """Return the steps of a match at the beginning of a text, or of the whole text."""
        self._begin(text)
        for end in self._ends(self._nodes, 0):
            if not whole or end == len(text):
                break
        return self.steps

    def adversaries(self, length: int) -> Iterator[str]:
        """Yield texts that make an expression go back often: what matches its first parts, then a row of characters.

        The row is made of one or two of the characters that the expression distinguishes, and ends in a character that
        nothing in it matches.
        """
        alphabet = sorted(_characters(self._nodes))[:8]
        pairs = [first + second for first in alphabet for second in alphabet if first != second]
        for num_parts in range(len(self._nodes)):
            prefix = "".join(_shortest(node) for node in self._nodes[:num_parts])
            for pump in alphabet + (pairs if num_parts == 0 else []):
                yield prefix + pump * (length // len(pump)) + _FOREIGN

    def _begin(self, text: str) -> None:
        self._text = text
        self.steps = 0

    def _ends(self, nodes: list[Node], position: int) -> Iterator[int]:
        """Yield the ends of the matches of nodes in a row, the preferred one first."""
        if not nodes:
            yield position
            return
        for middle in self._ends_of(*nodes[0], position):
            yield from self._ends(nodes[1:], middle)

    def _ends_of(self, code: Any, value: Any, position: int) -> Iterator[int]:
        """Yield the ends of the matches of one node."""
        self.steps += 1
        if self.steps > _MOST_STEPS:
            raise TooManySteps
        if code in (codes.MAX_REPEAT, codes.MIN_REPEAT):
            least, most, inner = value
            yield from self._repeated(list(inner), least, most, position, is_greedy=code is codes.MAX_REPEAT)
        elif code is codes.SUBPATTERN:
            yield from self._ends(list(value[-1]), position)
        elif code is codes.BRANCH:
            for branch in value[1]:
                yield from self._ends(list(branch), position)
        elif code is codes.AT:
            if self._is_at(value, position):
                yield position
        elif code in (codes.ASSERT, codes.ASSERT_NOT):
            direction, inner = value
            begin = position if direction > 0 else position - inner.getwidth()[0]
            found = begin >= 0 and next(self._ends(list(inner), begin), None) is not None
            if found == (code is codes.ASSERT):
                yield position
        elif position < len(self._text) and self._accepts(code, value, self._text[position]):
            yield position + 1

    def _repeated(self, inner: list[Node], least: int, most: Any, position: int, *, is_greedy: bool) -> Iterator[int]:
        """Yield the ends of a repetition."""
        if len(inner) == 1 and inner[0][0] in (codes.LITERAL, codes.NOT_LITERAL, codes.ANY, codes.IN):
            yield from self._repeated_character(inner[0], least, most, position, is_greedy=is_greedy)
            return
        if least <= 0 and not is_greedy:
            yield position
        if most is codes.MAXREPEAT or most > 0:
            rest = most if most is codes.MAXREPEAT else most - 1
            for end in self._ends(inner, position):
                if end > position or least > 0:
                    yield from self._repeated(inner, least - 1, rest, end, is_greedy=is_greedy)
        if least <= 0 and is_greedy:
            yield position

    def _repeated_character(
        self, node: Node, least: int, most: Any, position: int, *, is_greedy: bool
    ) -> Iterator[int]:
        """Yield the ends of a repetition of one character, without a level of recursion for each."""
        end = position
        ends = []
        while True:
            if end - position >= least:
                if not is_greedy:
                    yield end
                ends.append(end)
            self.steps += 1
            is_last = most is not codes.MAXREPEAT and end - position >= most
            if is_last or end >= len(self._text) or not self._accepts(*node, self._text[end]):
                break
            end += 1
        if is_greedy:
            for end in reversed(ends):
                self.steps += 1
                yield end

    def _is_at(self, place: Any, position: int) -> bool:
        """Return whether a position is a beginning, an end or a border of a word."""
        before = self._text[position - 1 : position] if position else ""
        after = self._text[position : position + 1]
        if place is codes.AT_BEGINNING:
            return position == 0 or (self._is_multiline and before == "\n")
        if place is codes.AT_BEGINNING_STRING:
            return position == 0
        if place is codes.AT_END:
            return position == len(self._text) or (after == "\n" and position == len(self._text) - 1)
        if place is codes.AT_END_STRING:
            return position == len(self._text)
        is_border = bool(re.match(r"\w", before)) != bool(re.match(r"\w", after))
        return is_border == (place is codes.AT_BOUNDARY)

    def _accepts(self, code: Any, value: Any, character: str) -> bool:
        """Return whether a node for one character accepts a character."""
        if code is codes.LITERAL:
            return ord(character) == value
        if code is codes.NOT_LITERAL:
            return ord(character) != value
        if code is codes.ANY:
            return self._is_dot_all or character != "\n"
        assert code is codes.IN, code
        return _is_in(value, character)


def _is_in(items: list[Node], character: str) -> bool:
    """Return whether a set of characters has a character."""
    is_negated = items[0][0] is codes.NEGATE
    found = False
    for code, value in items:
        if code is codes.LITERAL:
            found |= ord(character) == value
        elif code is codes.RANGE:
            found |= value[0] <= ord(character) <= value[1]
        elif code is codes.CATEGORY:
            found |= _CATEGORIES[value].match(character) is not None
    return found != is_negated


def _characters(nodes: Any) -> set[str]:
    """Return characters that the nodes of an expression distinguish, one of each range and category."""
    found: set[str] = set()
    for code, value in nodes:
        if code in (codes.LITERAL, codes.NOT_LITERAL):
            found.add(chr(value))
        elif code is codes.RANGE:
            found.add(chr(value[0]))
        elif code is codes.CATEGORY:
            found.add(next(character for character in "a0 !" if _CATEGORIES[value].match(character)))
        elif code is codes.ANY:
            found.add("a")
        elif code is codes.IN:
            found |= _characters(value)
        elif code in (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.SUBPATTERN):
            found |= _characters(value[-1])
        elif code is codes.BRANCH:
            found = found.union(*(_characters(branch) for branch in value[1]))
        elif code in (codes.ASSERT, codes.ASSERT_NOT):
            found |= _characters(value[1])
    return found


def _shortest(node: Node) -> str:
    """Return a short text that a node matches; a repetition that may be empty is there once."""
    code, value = node
    if code is codes.LITERAL:
        return chr(value)
    if code is codes.NOT_LITERAL:
        return "a" if value != ord("a") else "b"
    if code is codes.ANY:
        return "a"
    if code is codes.IN:
        return next((c for c in map(chr, range(32, sys.maxunicode)) if _is_in(value, c)), "")
    if code in (codes.MAX_REPEAT, codes.MIN_REPEAT):
        least, _, inner = value
        return "".join(_shortest(child) for child in inner) * max(1, least)
    if code is codes.SUBPATTERN:
        return "".join(_shortest(child) for child in value[-1])
    if code is codes.BRANCH:
        return "".join(_shortest(child) for child in value[1][0])
    return ""
