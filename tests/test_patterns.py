"""Every regular expression of the sources takes a time that is linear in the length of the text."""

from __future__ import annotations

import ast
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.import_graph import ROOT

from re import _compiler as compiler  # type: ignore[attr-defined]  # isort: skip
from re import _constants as codes  # type: ignore[attr-defined]  # isort: skip
from re import _parser as parser  # type: ignore[attr-defined]  # isort: skip

LENGTH = 20_000
SECONDS = 0.06  # of processor time: a linear expression takes a hundredth of it, a quadratic one several times it
SEARCHES = {"search", "finditer", "findall", "sub", "subn", "split"}
Node = tuple[Any, Any]
_FOREIGN = "\x01"  # a character that no expression of this project names
_CHARACTERS = "a0 !b" + "".join(map(chr, range(9, 0x3100)))


class Pattern(NamedTuple):
    """A regular expression in a source file, and the methods that are called with it."""

    file: str
    pattern: str | bytes
    flags: int
    methods: frozenset[str]


def patterns_of(file: str, source: str) -> Iterator[Pattern]:
    """Yield the regular expressions that a source passes to `re` as constants."""
    tree = ast.parse(source)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    methods_of_name: dict[str, set[str]] = {}
    for call in calls:
        if isinstance(call.func.value, ast.Name):  # type: ignore[attr-defined]
            methods_of_name.setdefault(call.func.value.id, set()).add(call.func.attr)  # type: ignore[attr-defined]
    name_of_call = {
        id(node.value): node.targets[0].id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    for call in calls:
        function = call.func
        assert isinstance(function, ast.Attribute)
        is_of_re = isinstance(function.value, ast.Name) and function.value.id == "re"
        if not is_of_re or not call.args:
            continue
        first = call.args[0]
        if not isinstance(first, ast.Constant) or not isinstance(first.value, str | bytes):
            continue
        names = [
            name.attr for argument in call.args[1:] for name in ast.walk(argument) if isinstance(name, ast.Attribute)
        ]
        flags = sum(int(getattr(re, name)) for name in names if name.isupper())
        methods = {function.attr}
        if function.attr == "compile":
            methods = methods_of_name.get(name_of_call.get(id(call), ""), SEARCHES)
        yield Pattern(file, first.value, flags, frozenset(methods))


def all_patterns() -> list[Pattern]:
    """Return the regular expressions of the library, the kernels and the launcher."""
    files = [path for package in ("electra_dist", "launcher", "kernels") for path in (ROOT / package).rglob("*.py")]
    return [
        found for path in sorted(files) for found in patterns_of(path.relative_to(ROOT).as_posix(), path.read_text())
    ]


class TooSlow(Exception):
    """A match has taken more processor time than any linear one takes."""


def slow_text(pattern: str | bytes, flags: int, methods: frozenset[str]) -> str | None:
    """Return the beginning of a text on which a method takes more than SECONDS, or None."""
    expression = re.compile(pattern, flags)
    for text in texts_that_go_back(pattern, flags, LENGTH):
        given = text.encode() if isinstance(pattern, bytes) else text
        for method in methods:
            call = getattr(expression, method) if method in ("match", "fullmatch") else expression.findall
            try:
                run_within(SECONDS, call, given)
            except TooSlow:
                return text[:100]
    return None


def run_within(seconds: float, call: Callable[[Any], object], text: str | bytes) -> None:
    """Match a text; raise an error after so many seconds of processor time, for which `re` looks while it matches."""

    def stop(*_: object) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        call(text)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def texts_that_go_back(pattern: str | bytes, flags: int, length: int) -> Iterator[str]:
    """Yield texts that make an expression go back often: what matches its first parts, then a row of characters.

    The row is made of one or two of the characters that the expression distinguishes, and ends in a character that
    nothing in it matches.
    """
    nodes = list(parser.parse(pattern, flags))
    alphabet = sorted(_characters(nodes))[:8]
    pairs = [first + second for first in alphabet for second in alphabet if first != second]
    for num_parts in range(len(nodes)):
        prefix = "".join(map(_shortest, nodes[:num_parts]))
        for pump in alphabet + (pairs if num_parts == 0 else []):
            yield prefix + pump * (length // len(pump)) + _FOREIGN


def _characters(nodes: Any) -> set[str]:
    """Return characters that the nodes of an expression distinguish, one of each range and category."""
    found: set[str] = set()
    for code, value in nodes:
        if code in (codes.LITERAL, codes.NOT_LITERAL):
            found.add(chr(value))
        elif code is codes.RANGE:
            found.add(chr(value[0]))
        elif code in (codes.CATEGORY, codes.ANY):
            found.add(_accepted((codes.IN, [(code, value)]) if code is codes.CATEGORY else (code, value)))
        elif code is codes.IN:
            found |= _characters(value)
        elif code in (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.SUBPATTERN):
            found |= _characters(value[-1])
        elif code is codes.BRANCH:
            found = found.union(*map(_characters, value[1]))
        elif code in (codes.ASSERT, codes.ASSERT_NOT):
            found |= _characters(value[1])
    return found


def _shortest(node: Node) -> str:
    """Return a short text that a node matches; a repetition that may be empty is there once."""
    code, value = node
    if code in (codes.LITERAL, codes.NOT_LITERAL, codes.ANY, codes.IN):
        return _accepted(node)
    if code in (codes.MAX_REPEAT, codes.MIN_REPEAT):
        least, _, inner = value
        return "".join(map(_shortest, inner)) * max(1, least)
    if code is codes.SUBPATTERN:
        return "".join(map(_shortest, value[-1]))
    if code is codes.BRANCH:
        return "".join(map(_shortest, value[1][0]))
    return ""


def _accepted(node: Node) -> str:
    """Return a character that a node for one character accepts."""
    if node[0] is codes.LITERAL:
        return chr(node[1])
    expression: re.Pattern[str] = compiler.compile(parser.SubPattern(parser.State(), [node]))
    return next(filter(expression.match, _CHARACTERS))


PATTERNS = all_patterns()


def test_the_patterns_are_found() -> None:
    files = {pattern.file for pattern in PATTERNS}
    assert len(PATTERNS) > 50
    assert "electra_dist/corpus/prepare/filter_steps.py" in files
    assert "electra_dist/store/s3/answers.py" in files


@pytest.mark.parametrize("pattern", PATTERNS, ids=[f"{Path(p.file).stem}-{n}" for n, p in enumerate(PATTERNS)])
def test_no_long_text_takes_long(pattern: Pattern) -> None:
    assert slow_text(pattern.pattern, pattern.flags, pattern.methods) is None, pattern


@pytest.mark.parametrize(
    "pattern",
    [
        r"[^\n]*?[.!?]+[)]*(?=\s|$)|[^\n]+",  # the dots of a line
        r"\s*(<\?xml[^>]*\?>)?\s*<Error",  # white space before nothing
        r":[\w:]+:`",  # a row of colons
        r"(a+)+b",
        r"x*x*y",
    ],
)
def test_a_quadratic_pattern_is_found(pattern: str) -> None:
    assert slow_text(pattern, 0, frozenset(["search"])) is not None
