"""Extract the prose of a Python installation, docstrings and help topics: a small corpus that needs no network.

    python examples/python_docs.py --output FOLDER

The demo trains on it (`make pretrain`).

Guarantee: one installation gives one file, byte for byte. No installed module is imported, except a fixed list of the
standard library's C modules, whose docstrings exist nowhere else.

How: `ast` reads the docstrings of every .py file of the standard library and of the installed packages, sorted by
path; `pydoc_data.topics` holds the language reference; `inspect` gives the docstrings of builtins and C modules. A
docstring is dedented; code (doctests, indented blocks after `::`, signatures, tables without words) is dropped; the
lines of a paragraph are joined, so that a line is a paragraph of prose; repeated paragraphs are dropped.

Limits: the text is technical English of one style. It shows that training works; it does not make a useful model.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import inspect
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

FILE_NAME = "python_docs.txt"
MIN_WORDS = 12  # a docstring with fewer new words is dropped
# Share of a .py file that must be docstrings: half of all code has nearly none and would cost half of the time.
MIN_SHARE = 0.15
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
_MIN_PARAGRAPH_WORDS = 5  # a shorter paragraph is a heading or a label
_MIN_LETTER_SHARE = 0.8  # share of a paragraph that must be letters of words, and spaces
_WORD = re.compile(r"[A-Za-z]{2,}")
# The first line of a list item, or of an argument in NumPy or Google style.
_ITEM = re.compile(r"^\s*([-*+] |\d+[.)] |\*{0,2}`{0,2}[\w.]+`{0,2}( ?\([^)]*\))? ?: )")
# Directives, doctests, shell and IPython prompts, decorators, comments, tables.
_NOT_PROSE = re.compile(r"^\s*(\.\. |>>> |\.\.\. |\$ |@|#|In \[|Out\[|\|)")
_FIELD = re.compile(r"^\s*:(\w+)((?: [^:]*)?):")  # a Sphinx field, such as `:param x:`
# A Sphinx role, such as :func:`f`. The match begins with the row of letters and colons, which is so searched once;
# letters before the first colon stay.
_ROLE = re.compile(r"(?<![\w:])(\w*):[\w:]+:`~?([^`<]*?)(?: ?<[^`>]*>)?`")
_MARKS = re.compile(r"`{1,2}|\*\*")
_QUOTED = re.compile(rb'"""(.*?)"""', re.DOTALL)
_SPACE = re.compile(r"\s+")


def write_python_docs(folder: Path, packages: Sequence[str] = PACKAGES) -> tuple[Path, int]:
    """Write the prose of docstrings to `python_docs.txt` in `folder`; return the path and the number of documents.

    A blank line separates two documents. `packages` are import names to read beside the standard library; packages
    that are not installed are ignored.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE_NAME
    num_documents = 0
    with path.open("wb") as out:
        for document in python_documents(packages):
            out.write(document.encode(errors="replace") + b"\n\n")
            num_documents += 1
    return path, num_documents


def python_documents(packages: Sequence[str] = PACKAGES) -> Iterator[str]:
    """Yield one document per source file, help topic or C module: its paragraphs of prose, one on a line.

    A paragraph that occurred before (letter case ignored) is left out. Sources without new prose give no document.
    """
    seen: set[int] = set()  # hashes of the paragraphs that a document contains
    for docstrings in _docstrings_by_source(packages):
        document: list[str] = []
        for docstring in docstrings:
            new_paragraphs = _new_paragraphs(docstring, seen)
            num_words = sum(len(_WORD.findall(paragraph)) for paragraph in new_paragraphs.values())
            if num_words >= MIN_WORDS:
                seen.update(new_paragraphs.keys())
                document.extend(new_paragraphs.values())
        if document:
            yield "\n".join(document)


def _new_paragraphs(docstring: str, seen: set[int]) -> dict[int, str]:
    """Return the prose of a docstring that is not in `seen` yet: hash (letter case ignored) -> paragraph."""
    new_paragraphs: dict[int, str] = {}
    for paragraph in prose(docstring):
        key = _paragraph_hash(paragraph)
        if key not in seen:
            new_paragraphs[key] = paragraph
    return new_paragraphs


def prose(docstring: str) -> list[str]:
    """Return the paragraphs of a docstring that are sentences, each on one line and without mark-up.

    Code, doctests, tables and paragraphs of fewer than five words are left out.
    """
    paragraphs: list[str] = []
    # After a block that ends in `::`, its indentation: blocks that are indented deeper are code (reStructuredText).
    code_indent: int | None = None
    for block in re.split(r"\n\s*\n", inspect.cleandoc(docstring)):
        lines = block.splitlines()
        indent = _indent(lines[0]) if lines else 0
        is_code = code_indent is not None and indent > code_indent
        if is_code:
            continue
        code_indent = indent if block.rstrip().endswith("::") else None
        paragraphs.extend(paragraph for paragraph in _paragraphs(lines) if _is_prose(paragraph))
    return paragraphs


def _paragraphs(lines: Iterable[str]) -> Iterator[str]:
    """Yield the paragraphs of a block of lines, each joined to one line; some of them may be empty strings.

    A list item or a Sphinx field (`:param x:`) begins a new paragraph; a line of code, such as a doctest, ends the
    block.
    """
    paragraph_lines: list[str] = []
    for line in lines:
        if _NOT_PROSE.match(line):
            break
        if not _WORD.search(line):
            continue
        if _ITEM.match(line) or _FIELD.match(line):
            yield _joined_without_markup(paragraph_lines)
            paragraph_lines = []
        paragraph_lines.append(line)
    yield _joined_without_markup(paragraph_lines)


def _joined_without_markup(lines: list[str]) -> str:
    """Join lines and remove mark-up: "- See :func:`f` for" and "  **details**." give "See f for details."."""
    text = _SPACE.sub(" ", " ".join(lines))
    text = _FIELD.sub(r"\2:", text)  # ":param x: the size" becomes " x: the size"
    text = _ROLE.sub(r"\1\2", text)
    text = _MARKS.sub("", text)
    text = text.replace("::", ":")
    text = _SPACE.sub(" ", text)
    return text.strip(" -*+:")


def _is_prose(text: str) -> bool:
    """Return whether a paragraph has five words or more and mostly letters, unlike code, tables and formulas."""
    words = _WORD.findall(text)
    num_letters = sum(map(len, words)) + text.count(" ")
    if len(words) < _MIN_PARAGRAPH_WORDS or num_letters < _MIN_LETTER_SHARE * len(text):
        return False
    return "___" not in text  # a blank to fill in, or a line of a drawing


def _paragraph_hash(text: str) -> int:
    digest = hashlib.blake2b(text.lower().encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _docstrings_by_source(packages: Sequence[str]) -> Iterator[list[str]]:
    """Yield the docstrings of each help topic, of each C module, and of each .py file of the library and packages."""
    topics = importlib.import_module("pydoc_data.topics").topics
    for name in sorted(topics):
        yield [topics[name]]
    for name in _C_MODULES:
        yield _docstrings_of_c_module(name)
    paths = sysconfig.get_paths()
    library = Path(paths["stdlib"])
    for path in _python_files(library, skip=("site-packages", "dist-packages", "lib2to3", "idlelib")):
        yield _docstrings_of_file(path)
    site_folders = sorted({paths["purelib"], paths["platlib"]})  # often one and the same
    for package in packages:
        for site_folder in site_folders:
            for path in _python_files(Path(site_folder) / package, skip=("_vendor",)):
                yield _docstrings_of_file(path)


def _python_files(folder: Path, skip: tuple[str, ...]) -> list[Path]:
    """Return the .py files below `folder`, sorted, without tests and the folders named in `skip`."""
    excluded = {*skip, "test", "tests", "testing", "__pycache__"}
    return sorted(path for path in folder.rglob("*.py") if not excluded.intersection(path.relative_to(folder).parts))


def _docstrings_of_file(path: Path) -> list[str]:
    """Return the docstrings of a .py file; [] if they fill less than `MIN_SHARE` of it, or for a syntax error."""
    source = path.read_bytes()
    # A cheap estimate, which saves the parsing of most files: the text between triple quotes.
    docstring_bytes = sum(map(len, _QUOTED.findall(source)))
    if docstring_bytes < MIN_SHARE * len(source):
        return []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about invalid escape sequences in the source
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return []
    return list(_docstrings_of_node(tree))


def _docstrings_of_node(node: ast.AST) -> Iterator[str]:
    """Yield the docstrings of a syntax tree's node and of everything that is defined in it, in source order.

    Only statements are visited: expressions hold no docstrings, and `ast.walk` would visit far more nodes.
    """
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        docstring = ast.get_docstring(node, clean=False)
        if docstring:
            yield docstring
    for field in ("body", "orelse", "handlers", "finalbody"):  # the fields of a node that hold statements
        statements = getattr(node, field, None)
        if isinstance(statements, list):  # a lambda, for example, has an expression as its body
            for statement in statements:
                yield from _docstrings_of_node(statement)


def _docstrings_of_c_module(name: str) -> list[str]:
    """Import a C module, and return the docstrings of it and its members; [] if this platform lacks the module."""
    try:
        module = importlib.import_module(name)
    except ImportError:
        return []
    classes = [value for _, value in sorted(vars(module).items()) if inspect.isclass(value)]
    owners = [module, *classes]
    members = [value for owner in owners for _, value in sorted(vars(owner).items())]
    # Functions written in Python are hooks that were installed at run time (sys.excepthook), and vary by process.
    routines = [value for value in members if inspect.isroutine(value) and not inspect.isfunction(value)]
    docstrings = [getattr(documented, "__doc__", None) for documented in [*owners, *routines]]
    return [docstring for docstring in docstrings if isinstance(docstring, str)]


def main() -> None:
    """Write the text, and print how much it is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder in which to write python_docs.txt")
    path, num_documents = write_python_docs(parser.parse_args().output)
    print(f"{path}: {num_documents:,} documents, {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
