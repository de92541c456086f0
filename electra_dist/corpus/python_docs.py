"""The prose that a Python installation carries: docstrings and help topics. A small corpus for every machine.

Guarantee: one installation gives one file, byte for byte; no network; no installed module is run except a fixed list
of the standard library's C modules, whose docstrings exist nowhere else.

How: `ast` reads the docstrings of every .py file of the standard library and of the installed packages (sorted by
path), `pydoc_data.topics` holds the language reference, `inspect` the docs of builtins and C modules. A docstring is
dedented; code (doctest, indented blocks after `::`, signatures, tables without words) is dropped; paragraphs are
joined to lines, so that a line is a paragraph of prose; paragraphs that were seen before are dropped.

Cost: 15 to 25 s and 10 MB of text on an installation with torch, sympy and numpy. It is technical English in one
voice: good for showing that training works, not for a model that anybody needs.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from electra_dist.store.files import replacing

FILE_NAME = "python_docs.txt"
MIN_WORDS = 12  # of a docstring
MIN_SHARE = 0.15  # of a .py file that is docstrings: half of all code has nearly none and would cost half of the time
_C_MODULES = (
    "builtins", "_codecs", "_collections", "_csv", "_datetime", "_decimal", "_functools", "_io", "_json", "_socket",
    "_ssl", "_struct", "_thread", "_weakref", "array", "binascii", "cmath", "errno", "faulthandler", "fcntl", "gc",
    "itertools", "math", "mmap", "operator", "posix", "resource", "select", "signal", "sys", "time", "unicodedata",
    "zlib",
)  # fmt: skip
PACKAGES = (
    "torch", "numpy", "matplotlib", "sympy", "networkx", "deepspeed", "pydantic", "rich", "click", "typer", "pip",
    "setuptools", "jinja2", "fsspec", "huggingface_hub", "webdataset", "tensorboard", "PIL", "psutil",
)  # fmt: skip
_WORD = re.compile(r"[A-Za-z]{2,}")
_ITEM = re.compile(r"^\s*([-*+] |\d+[.)] |\*{0,2}`{0,2}[\w.]+`{0,2}( ?\([^)]*\))? ?: )")
_NOT_PROSE = re.compile(r"^\s*(\.\. |>>> |\.\.\. |\$ |@|#|In \[|Out\[|\|)")
_FIELD = re.compile(r"^\s*:(\w+)((?: [^:]*)?):")
_ROLE = re.compile(r":[\w:]+:`~?([^`<]*?)(?:\s*<[^`>]*>)?`")
_MARKS = re.compile(r"`{1,2}|\*\*")
_QUOTED = re.compile(rb'"""(.*?)"""', re.DOTALL)
_SPACE = re.compile(r"\s+")


def write_python_docs(folder: Path, packages: Sequence[str] = PACKAGES) -> tuple[Path, int]:
    """Writes `python_docs.txt` (a blank line between documents) into `folder`.

    Args:
        packages: import names of installed packages to read beside the standard library; missing ones are passed over.

    Returns:
        Its path and the number of documents.

    Raises:
        StoreError: the folder cannot be written.
    """
    path = folder / FILE_NAME
    num_documents = 0
    with replacing(path) as out:
        for document in python_documents(packages):
            out.write(document.encode(errors="replace") + b"\n\n")
            num_documents += 1
    return path, num_documents


def python_documents(packages: Sequence[str] = PACKAGES) -> Iterator[str]:
    """Documents of paragraphs, a paragraph a line; the docstrings of one source file make one document."""
    seen: set[int] = set()
    for docstrings in _sources(packages):
        document: list[str] = []
        for docstring in docstrings:
            fresh = {key: text for text in prose(docstring) if (key := _key(text)) not in seen}
            if sum(len(_WORD.findall(text)) for text in fresh.values()) >= MIN_WORDS:
                seen.update(fresh)
                document += fresh.values()
        if document:
            yield "\n".join(document)


def prose(docstring: str) -> list[str]:
    """The paragraphs of a docstring that are sentences, each on one line without mark-up."""
    paragraphs: list[str] = []
    code_indent: int | None = None  # blocks that are indented deeper are the code that a `::` announced
    for block in re.split(r"\n\s*\n", inspect.cleandoc(docstring)):
        lines = block.splitlines()
        indent = _indent(lines[0]) if lines else 0
        if code_indent is not None and indent > code_indent:
            continue
        code_indent = indent if block.rstrip().endswith("::") else None
        paragraphs += filter(_is_prose, _paragraphs(lines))
    return paragraphs


def _paragraphs(lines: Iterable[str]) -> Iterator[str]:
    """Joins the lines of a block; an item of a list begins a new paragraph; a doctest ends the block."""
    current: list[str] = []
    for line in lines:
        if _NOT_PROSE.match(line):
            break
        if not _WORD.search(line):
            continue
        if _ITEM.match(line) or _FIELD.match(line):
            yield _clean(current)
            current = []
        current.append(line)
    yield _clean(current)


def _clean(lines: list[str]) -> str:
    text = _FIELD.sub(r"\2:", " ".join(lines))
    text = _MARKS.sub("", _ROLE.sub(r"\1", text)).replace("::", ":")
    return _SPACE.sub(" ", text).strip(" -*+:")


def _is_prose(text: str) -> bool:
    """At least five words, mostly of letters: no code, table or formula."""
    words = _WORD.findall(text)
    letters = sum(map(len, words)) + text.count(" ")
    return len(words) >= 5 and letters >= 0.8 * len(text) and "_" * 3 not in text


def _key(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.lower().encode(), digest_size=8).digest(), "little")


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _sources(packages: Sequence[str]) -> Iterator[list[str]]:
    """The docstrings of one source after another: help topics, C modules, then .py files."""
    topics = importlib.import_module("pydoc_data.topics").topics
    yield from ([topics[name]] for name in sorted(topics))
    for name in _C_MODULES:
        yield _inspected(name)
    paths = sysconfig.get_paths()
    library = Path(paths["stdlib"])
    yield from map(_parsed, _python_files(library, skip=("site-packages", "dist-packages", "lib2to3", "idlelib")))
    for package in packages:
        for site in sorted({paths["purelib"], paths["platlib"]}):
            yield from map(_parsed, _python_files(Path(site) / package, skip=("_vendor",)))


def _python_files(folder: Path, skip: tuple[str, ...]) -> list[Path]:
    left_out = {*skip, "test", "tests", "testing", "__pycache__"}
    return sorted(path for path in folder.rglob("*.py") if not left_out.intersection(path.relative_to(folder).parts))


def _parsed(path: Path) -> list[str]:
    """Docstrings of a .py file; [] if it has few or is not Python of this version."""
    source = path.read_bytes()
    if sum(map(len, _QUOTED.findall(source))) < MIN_SHARE * len(source):
        return []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return []
    return list(_docstrings(tree))


def _docstrings(node: ast.AST) -> Iterator[str]:
    """Of a node and what is defined in it. Far fewer nodes than ast.walk: expressions hold no docstrings."""
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        docstring = ast.get_docstring(node, clean=False)
        if docstring:
            yield docstring
    for block in ("body", "orelse", "handlers", "finalbody"):
        for statement in getattr(node, block, ()) if isinstance(getattr(node, block, ()), list) else ():
            yield from _docstrings(statement)


def _inspected(name: str) -> list[str]:
    """Docstrings of a C module, its functions, classes and methods; [] where this platform lacks it."""
    try:
        module = importlib.import_module(name)
    except ImportError:
        return []
    owners = [module, *(value for _, value in sorted(vars(module).items()) if inspect.isclass(value))]
    members = [value for owner in owners for _, value in sorted(vars(owner).items())]
    # Functions written in Python are hooks that somebody installed (sys.excepthook): not part of the installation.
    routines = [value for value in members if inspect.isroutine(value) and not inspect.isfunction(value)]
    docs = [getattr(item, "__doc__", None) for item in [*owners, *routines]]
    return [doc for doc in docs if isinstance(doc, str)]
