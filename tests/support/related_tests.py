"""Finds the test files that a change of some files concerns, the nearest first.

How: a test file has a distance from a changed file. It is 0 for a test file that has changed itself, 1 for one that
imports the changed module or names the changed file, 2 for one that does so through one other module, and so on.
Imports are read from the syntax trees; a string that is just the name of a module or of a program counts as an import,
because tests start programs. A test file whose name or folder mirrors that of the changed file has distance 1 or 2,
whatever it imports.

Cost: two seconds. Limits: a test that reads a file without naming it or its folder is not found, and neither is one
that is farther than FARTHEST. Tests in tests/cluster are left out.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from support.import_graph import Graph, imported_names, reachable

FARTHEST = 3
PACKAGES = ("benchmarks", "electra_dist", "kernels", "launcher")  # folders whose files the sources import or read
FOLDERS = (*PACKAGES, "docker", "examples", "tests")
PROGRAMS = {"electra-dist": "launcher/electra_launcher/cli/main.py"}
READ_ALL = ("tests/support/import_graph.py", "tests/test_docs.py")  # these read the texts of all sources


@dataclass(frozen=True)
class Selected:
    """A test file that a change concerns."""

    file: str
    distance: int
    way: tuple[str, ...]  # from the test file to the changed file


def read_python_files(root: Path) -> dict[str, str]:
    """Return the texts of the project's Python files by their paths below `root`, sorted."""
    found = [path for folder in FOLDERS for path in (root / folder).rglob("*.py")]
    return {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in sorted(found)}


def module_names(files: Iterable[str]) -> dict[str, str]:
    """Map each name under which the project's programs and tests import a module to the file of the module.

    The folders `kernels`, `launcher`, `benchmarks` and `tests` are on the path of imports, so their names are
    not part of the name of a module. A name that a test and a source file share is the source file's.
    """
    names: dict[str, str] = {}
    for file in sorted(files, key=lambda file: not file.startswith("tests/")):
        parts = list(PurePosixPath(file).with_suffix("").parts)
        if parts[0] in ("kernels", "launcher", "benchmarks", "tests"):
            parts.pop(0)
        if parts[-1] == "__init__":
            parts.pop()
        names[".".join(parts)] = file
    return names


def references(root: Path, texts: Mapping[str, str], changed: Sequence[str]) -> Graph:
    """Return which project files each Python file imports or names, and which conftest.py files a test uses.

    Args:
        root: folder of the repository.
        texts: its Python files.
        changed: changed files. Those that are no Python file of the project are found by their names.
    """
    modules = module_names([*texts, *(file for file in changed if file.endswith(".py"))])
    programs: dict[str, set[str]] = defaultdict(set)
    for name, file in [*modules.items(), *PROGRAMS.items()]:
        programs[name.removesuffix(".__main__")].add(file)
        programs[file].add(file)
        programs[PurePosixPath(file).name].add(file)
    graph: Graph = {file: set() for file in [*texts, *changed]}
    for file, text in texts.items():
        folder = PurePosixPath(file).parent
        for name in _imported_names(root, file):
            target = modules.get(name) or modules.get(name.rpartition(".")[0])
            graph[file].add(target or f"{folder}/{name.partition('.')[0]}.py")
        # A string that looks like a file or a program: it has a dot, a slash or a hyphen inside.
        for name in re.findall(r"[\"']([\w/-]+[./-][\w./-]+)[\"']", text):
            graph[file] |= {target for target in programs.get(name, set()) if not target.startswith("tests/")}
        graph[file] &= graph.keys() - {file}
    for file in changed:
        if file not in texts:
            _add_mentions(graph, texts, file)
        if file.endswith(".py") and file.startswith(PACKAGES):
            for reader in graph.keys() & set(READ_ALL):
                graph[reader].add(file)
    _add_conftests(graph, texts)
    return graph


def _imported_names(root: Path, file: str) -> set[str]:
    """Return the names that a file imports; none if its syntax is wrong, which ruff reports."""
    try:
        return imported_names(root, file)
    except SyntaxError:
        return set()


def _add_mentions(graph: Graph, texts: Mapping[str, str], changed: str) -> None:
    """Add an edge to a changed file from each Python file that has its path or name, in C also its name as a module.

    A file outside the packages is looked for in the tests only, because the sources name such files in explanations.
    A test that has the name of its folder gets an edge to the folder, through which the file is one step farther.
    """
    path = PurePosixPath(changed)
    names = [changed, path.name, *([path.stem] if path.suffix in (".c", ".cu", ".h") else [])]
    mention = re.compile(rf"(?<![\w.-])(?:{'|'.join(map(re.escape, names))})(?![\w-])")
    top = path.parts[0]
    folder = re.compile(rf"\b{re.escape(top)}(?:[\"']|/[\"'{{*])")
    is_in_package = top in PACKAGES
    graph.setdefault(f"{top}/", set()).add(changed)
    for file, text in texts.items():
        if not is_in_package and not file.startswith("tests/"):
            continue
        if mention.search(text):
            graph[file].add(changed)
        elif not is_in_package and folder.search(text):
            graph[file].add(f"{top}/")


def _add_conftests(graph: Graph, texts: Mapping[str, str]) -> None:
    """Add an edge from each test file to each conftest.py of its folders of which it names a fixture."""
    for conftest, text in texts.items():
        if PurePosixPath(conftest).name != "conftest.py":
            continue
        names = re.findall(r"@pytest\.fixture\b.*?\ndef (\w+)", text, re.DOTALL)
        for shared in re.findall(r"__all__ = \[([^]]*)\]", text):
            names += re.findall(r"\w+", shared)
        for file in tests_below(str(PurePosixPath(conftest).parent), texts):
            if names and re.search(rf"\b(?:{'|'.join(names)})\b", texts[file]):
                graph[file].add(conftest)


def tests_below(folder: str, files: Iterable[str]) -> list[str]:
    """Return those of the files that pytest collects in a folder, without the tests that need a cluster."""
    below = [file for file in files if file.startswith(f"{folder}/") and not file.startswith("tests/cluster/")]
    return [file for file in below if PurePosixPath(file).match("test_*.py")]


def mirrored(changed: str, tests: Sequence[str]) -> dict[str, int]:
    """Return the distances of the test files to which the name (1) or the folder (2) of a changed source leads."""
    path = PurePosixPath(changed)
    if path.suffix != ".py" or path.parts[0] not in PACKAGES:
        return {}
    folders = path.parent.parts
    if folders[0] == "electra_dist":
        folders = folders[1:]
    elif folders[0] in ("kernels", "launcher"):
        folders = (folders[0], *folders[2:])
    named = re.compile(rf"test_{path.stem.strip('_')}(?:_\w+)?\.py")
    found = {}
    for file in tests:
        test = PurePosixPath(file)
        if test.parts[1:-1] == folders and folders:
            found[file] = 2
        if test.parts[1:-1][:1] == folders[:1] and named.fullmatch(test.name):
            found[file] = 1
    return found


def ways_to(graph: Graph, changed: str) -> dict[str, tuple[str, ...]]:
    """Return a shortest way to a changed file from each file that depends on it, both ends included."""
    users: Graph = defaultdict(set)
    for file, targets in graph.items():
        for target in targets:
            users[target].add(file)
    ways: dict[str, tuple[str, ...]] = {changed: (changed,)}
    waiting = deque([changed])
    while waiting:
        file = waiting.popleft()
        for user in sorted(users[file] - ways.keys()):
            ways[user] = (user, *ways[file])
            waiting.append(user)
    return ways


def select(root: Path, changed: Sequence[str]) -> list[Selected]:
    """Return the test files that a change concerns, in the order in which to run them.

    The nearest come first, but files that start several ranks come last unless their distance is below 2. Of equally
    near ones those come first to which the name or folder of the changed file leads, then those that start no ranks,
    then those that depend on the fewest files.
    """
    texts = read_python_files(root)
    graph = references(root, texts, changed)
    tests = tests_below("tests", texts)
    best: dict[str, Selected] = {}
    by_place: set[str] = set()
    for file in changed:
        near = mirrored(file, tests)
        by_place |= near.keys()
        if PurePosixPath(file).name == "conftest.py":
            near = dict.fromkeys(tests_below(str(PurePosixPath(file).parent), texts), 1)
        ways = ways_to(graph, file)
        found = [Selected(test, distance, (test, "by its place", file)) for test, distance in near.items()]
        found += [Selected(test, len(ways[test]) - 1, ways[test]) for test in tests if test in ways]
        for one in found:
            if one.distance <= FARTHEST and (one.file not in best or one.distance <= best[one.file].distance):
                best[one.file] = one

    def place(one: Selected) -> tuple[bool, int, bool, bool, int, str]:
        """Return what the test files are ordered by."""
        is_slow = "pytest.mark.multiproc" in texts[one.file]
        num_reached = len(reachable(graph, [one.file]))
        return is_slow and one.distance >= 2, one.distance, one.file not in by_place, is_slow, num_reached, one.file

    return sorted(best.values(), key=place)
