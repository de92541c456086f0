"""Reads the import graph of the project's sources from their syntax trees.

    python tests/support/import_graph.py [ROOT]      prints its figures

Guarantee: no source is executed. Every import statement counts, wherever it stands: at the top of a file, inside a
function, or under TYPE_CHECKING. `from package import name` is an import of the module `package.name` if that exists,
otherwise of `package/__init__.py`.

How: a file is identified by its path below the root, for example `electra_dist/store/open_store.py`. Packages are
those that `docs/layers.md` lists: a folder of electra_dist or of electra_launcher with all its subfolders (except
those of `APART`, which are packages of their own), a single module of one of the two, electra_kernels, or the
benchmarks.

Cost: half a second. Limits: modules that are imported by a name in a string, and processes that are started with
`python -m`, are not counted.
"""

from __future__ import annotations

import ast
import re
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("benchmarks", "electra_dist", "kernels", "launcher")
LAYERS_FILE = "docs/layers.md"
APART = (
    "electra_dist/corpus/find",
    "electra_dist/corpus/plan",
)  # sub-packages with layers
SMALL_MODULE = 50  # lines of code; a smaller module with one importer belongs into its importer

Graph = dict[str, set[str]]  # who imports -> what is imported; every node is a key
Layer = tuple[int, str]  # "7b" is (7, "b"): layers compare as they are ordered

_LAYER_ROW = re.compile(r"^\| (\d+)([a-z]?) \| (.*) \|$", re.MULTILINE)


def source_files(root: Path = ROOT) -> list[str]:
    """Return the Python files of the project's source folders as sorted paths below `root`."""
    found = [path for folder in FOLDERS for path in (root / folder).rglob("*.py")]
    return sorted(path.relative_to(root).as_posix() for path in found)


def imported_names(root: Path, file: str) -> set[str]:
    """Return the absolute dotted names that a file imports; `from a.b import c` gives `a.b.c`."""
    package = _module_name(file).split(".")
    if not file.endswith("/__init__.py"):
        package.pop()
    names: set[str] = set()
    for node in ast.walk(ast.parse((root / file).read_text(encoding="utf-8"), file)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = package[: len(package) - node.level + 1] if node.level else []
            if node.module:
                parts = [*parts, node.module]
            base = ".".join(parts)
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return names


def file_imports(root: Path = ROOT) -> Graph:
    """Return which source files each source file imports."""
    files = source_files(root)
    modules = {_module_name(file): file for file in files}
    graph: Graph = {}
    for file in files:
        found = (modules.get(name) or modules.get(name.rpartition(".")[0]) for name in imported_names(root, file))
        graph[file] = {target for target in found if target is not None and target != file}
    return graph


def _module_name(file: str) -> str:
    """Return the name under which a file is imported.

    electra_kernels and electra_launcher are installed from the folders `kernels` and `launcher`; a benchmark is a
    script whose own folder is on the path.
    """
    name = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return name.removeprefix("kernels.").removeprefix("launcher.").removeprefix("benchmarks.")


def package_of(file: str) -> str:
    """Return the package that a file belongs to, by the name that it has in the table of layers."""
    parts = PurePosixPath(file).parts
    if "/".join(parts[:3]) in APART or parts[:2] == ("launcher", "electra_launcher"):
        return "/".join(parts[:3])
    return parts[0] if parts[0] == "benchmarks" else "/".join(parts[:2])


def package_imports(files: Mapping[str, set[str]]) -> Graph:
    """Return which other packages each package imports."""
    graph: Graph = defaultdict(set)
    for file, targets in files.items():
        package = package_of(file)
        graph[package] |= {package_of(target) for target in targets} - {package}
    return dict(graph)


def reachable(graph: Mapping[str, set[str]], start: Iterable[str]) -> set[str]:
    """Return the nodes that can be reached from `start` by at least one import."""
    found: set[str] = set()
    waiting = list(start)
    while waiting:
        new = graph[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return each group of nodes that all import one another, directly or through others, sorted by name."""
    from_node = {node: reachable(graph, [node]) for node in graph}
    groups = {
        tuple(sorted(other for other in from_node[node] if node in from_node[other]))
        for node in graph
        if node in from_node[node]
    }
    return [list(group) for group in sorted(groups)]


def read_layers(text: str) -> list[tuple[Layer, str]]:
    """Return (layer, package) of every path in the rows of the table of layers in a Markdown text, in its order."""
    return [
        ((int(number), letter), name.rstrip("/"))
        for number, letter, cell in _LAYER_ROW.findall(text)
        for name in re.findall(r"`([^`]+)`", cell)
    ]


def upward_imports(files: Mapping[str, set[str]], layers: Mapping[str, Layer]) -> list[str]:
    """Return a line for each import between two packages whose target is not in a lower layer.

    `files` has the files that each file imports. Imports from or of packages that `layers` lacks are ignored.
    """
    found = []
    for file, targets in sorted(files.items()):
        for target in sorted(targets):
            package, imported = package_of(file), package_of(target)
            if package == imported or package not in layers or imported not in layers:
                continue
            if layers[imported] >= layers[package]:
                found.append(f"{file} (layer {_label(layers[package])}) imports {target} ({_label(layers[imported])})")
    return found


def _label(layer: Layer) -> str:
    """Return a layer as the table of layers writes it, such as `7b`."""
    return f"{layer[0]}{layer[1]}"


def files_per_folder(files: Iterable[str]) -> Counter[str]:
    """Return how many Python files each folder holds directly, without its subfolders."""
    return Counter(PurePosixPath(file).parent.as_posix() for file in files)


def function_lines(root: Path, file: str) -> dict[str, int]:
    """Return the number of lines of each function of a file, by `file:line name`."""
    tree = ast.parse((root / file).read_text(encoding="utf-8"), file)
    return {
        f"{file}:{node.lineno} {node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


class FileLines(NamedTuple):
    """What the lines of one or several files are; blank lines and comments are neither code nor docstring."""

    all: int
    code: int
    docstring: int


def count_lines(root: Path, file: str) -> FileLines:
    """Return how many lines a file has, and how many are code and docstrings of modules, classes and functions."""
    text = (root / file).read_text(encoding="utf-8")
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text, file)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            docstrings |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines = text.splitlines()
    code = [
        number
        for number, line in enumerate(lines, 1)
        if number not in docstrings and line.strip() and not line.lstrip().startswith("#")
    ]
    return FileLines(len(lines), len(code), len(docstrings))


def docstring_shares(root: Path, files: Iterable[str]) -> dict[str, float]:
    """Return the docstring lines per line of code of each package; the modules beside packages count together."""
    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for file in files:
        lines = count_lines(root, file)
        package = package_of(file)
        total = totals[f"{PurePosixPath(file).parent}/*.py" if package.endswith(".py") else package]
        total[0] += lines.docstring
        total[1] += lines.code
    return {package: docstring / max(1, code) for package, (docstring, code) in sorted(totals.items())}


def only_importers(files: Mapping[str, set[str]]) -> dict[str, str]:
    """Return the importer of each module that exactly one file imports; `__init__.py` is no module here."""
    importers: dict[str, list[str]] = defaultdict(list)
    for file, targets in files.items():
        for target in targets:
            importers[target].append(file)
    return {
        module: names[0]
        for module, names in sorted(importers.items())
        if len(names) == 1 and not module.endswith("__init__.py")
    }


def _print_sizes(what: str, lines: Mapping[str, int]) -> None:
    """Print the number of entries and the median, 90th percentile and maximum of their line counts."""
    counts = sorted(lines.values())
    p90 = statistics.quantiles(counts, n=10)[-1]
    longest = max(lines, key=lambda name: lines[name])
    print(
        f"{what:<28} {len(counts):>5}   lines: median {statistics.median(counts):.0f}, p90 {p90:.0f}, "
        f"max {counts[-1]} ({longest})"
    )


def _print_lines(root: Path, sources: Sequence[str], files: Mapping[str, set[str]]) -> None:
    """Print the lines of all sources, the share of docstrings of each package, and modules with one importer."""
    lines = [count_lines(root, file) for file in sources]
    code, docstring = sum(one.code for one in lines), sum(one.docstring for one in lines)
    print(f"{'lines':<28} {sum(one.all for one in lines):>5}   code {code}, docstrings {docstring}")
    print(f"{'docstring lines per code':<28} {docstring / code:>5.2f}   by package:")
    for package, share in docstring_shares(root, sources).items():
        print(f"    {share:.2f}  {package}")
    alone = only_importers(files)
    small = [module for module in alone if count_lines(root, module).code < SMALL_MODULE]
    print(
        f"{'modules with one importer':<28} {len(alone):>5}   of less than {SMALL_MODULE} lines of code: {len(small)}"
    )
    for module in small:
        print(f"    {module} (by {alone[module]})")


def main() -> None:
    """Print the figures of the source tree given on the command line, by default of this checkout."""
    root = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT
    files = file_imports(root)
    packages = package_imports(files)
    table = read_layers((root / LAYERS_FILE).read_text(encoding="utf-8"))
    upward = upward_imports(files, {name: layer for layer, name in table})
    print(f"{'packages':<28} {len(packages):>5}")
    print(f"{'layers':<28} {len({layer for layer, _ in table}):>5}")
    print(f"{'imports between packages':<28} {sum(len(targets) for targets in packages.values()):>5}")
    print(f"{'imports between files':<28} {sum(len(targets) for targets in files.values()):>5}")
    for what, graph in (("cycles of packages", packages), ("cycles of files", files)):
        found = cycles(graph)
        print(f"{what:<28} {len(found):>5}")
        for group in found:
            print(f"    {', '.join(group)}")
    print(f"{'upward imports':<28} {len(upward):>5}")
    for line in upward:
        print(f"    {line}")
    sources = [file for file in files if not file.startswith("benchmarks/")]
    largest = files_per_folder(sources).most_common(5)
    print(f"{'largest folders':<28}         {', '.join(f'{folder} {count}' for folder, count in largest)}")
    _print_sizes("files", {file: count_lines(root, file).all for file in sources})
    _print_lines(root, sources, files)
    functions: dict[str, int] = {}
    for file in sources:
        functions |= function_lines(root, file)
    _print_sizes("functions", functions)


if __name__ == "__main__":
    main()
