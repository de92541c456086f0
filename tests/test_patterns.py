"""Every regular expression of the sources takes a number of steps that is linear in the length of the text."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from support.import_graph import ROOT
from support.regex_steps import Matcher, TooManySteps

LENGTH = 32
SEARCHES = {"search", "finditer", "findall", "sub", "subn", "split"}


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


def growth(pattern: str | bytes, flags: int, methods: frozenset[str]) -> tuple[float, str]:
    """Return by how much the steps grow for each further character of the worst text, and this text."""
    matcher = Matcher(pattern, flags)
    worst = (0.0, "")
    for short, long in zip(matcher.adversaries(LENGTH), matcher.adversaries(2 * LENGTH), strict=True):
        for method in methods:
            try:
                # What does not grow, such as the cost of the first parts, falls out of the difference.
                more = (steps_of(matcher, method, long) - steps_of(matcher, method, short)) / LENGTH
            except TooManySteps:
                more = float("inf")
            worst = max(worst, (more, long))
    return worst


def steps_of(matcher: Matcher, method: str, text: str) -> int:
    """Return the steps of a method of `re` on a text."""
    if method in SEARCHES:
        return matcher.search_all(text)
    return matcher.match(text, whole=method == "fullmatch")


PATTERNS = all_patterns()


def test_the_patterns_are_found() -> None:
    files = {pattern.file for pattern in PATTERNS}
    assert len(PATTERNS) > 50
    assert "electra_dist/corpus/prepare/filter_steps.py" in files
    assert "electra_dist/store/s3/answers.py" in files


@pytest.mark.parametrize("pattern", PATTERNS, ids=[f"{Path(p.file).stem}-{n}" for n, p in enumerate(PATTERNS)])
def test_a_text_of_twice_the_length_costs_twice_the_steps(pattern: Pattern) -> None:
    steps_per_character, text = growth(pattern.pattern, pattern.flags, pattern.methods)
    assert steps_per_character < 30, (pattern, text)


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
    steps_per_character, _ = growth(pattern, 0, frozenset(["search"]))
    assert steps_per_character > 60


@pytest.mark.parametrize("text", ["ab12 c", "aab", "", "x.x.x", '"(a)" b', "a\nb"])
@pytest.mark.parametrize("pattern", [r"\w+(?:\.\w+)*|[^\w\s]", r"^a*?b$", r"(?<!a)b|\bc", "[^a-c]{1,2}"])
def test_the_counted_matching_finds_what_re_finds(pattern: str, text: str) -> None:
    matcher = Matcher(pattern)
    matcher._begin(text)
    for position in range(len(text) + 1):
        found = re.compile(pattern).match(text, position)
        assert next(matcher._ends(matcher._nodes, position), None) == (found.end() if found else None)
