"""The text of the installed Python documentation: prose without code, equal in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.real_runs import REPOSITORY

from examples.python_docs import _docstrings_of_file, prose, write_python_docs

DOCSTRING = """Return the mean of :func:`~numpy.add` over ``axis``, as a *float*.

    The mean is the sum of all elements
    divided by their number::

        mean = sum(x) / len(x)

        # code goes on here, for a while, in words

    Args:
        axis (int, optional): Axis or axes along which the means
            are computed, first by first.
        keep: Whether the reduced axes are left in the result.

    :param out: Where the result of all this is to be put.

    =====  =====
    a      b
    =====  =====

    >>> mean([1, 2, 3])
    2.0

    .. versionadded:: 1.7
    Short.
    """


def test_prose_of_a_docstring_is_its_sentences_without_code_tables_and_markup() -> None:
    assert prose(DOCSTRING) == [
        "Return the mean of numpy.add over axis, as a *float*.",
        "The mean is the sum of all elements divided by their number",
        "axis (int, optional): Axis or axes along which the means are computed, first by first.",
        "keep: Whether the reduced axes are left in the result.",
        "out: Where the result of all this is to be put.",
    ]


def test_docstrings_of_modules_classes_and_inner_functions_are_read_and_unreadable_files_give_none(
    tmp_path: Path,
) -> None:
    """A file also gives none if its docstrings are too small a part of it to be worth parsing."""
    path = tmp_path / "a.py"

    path.write_text(
        '"""Module."""\nclass A:\n    """Class."""\n    if 1:\n        async def f():\n            """Inner."""\n'
    )
    assert _docstrings_of_file(path) == ["Module.", "Class.", "Inner."]

    python_2 = '"""Python of another\n version."""\nprint "x"\n'
    path.write_text(python_2)
    assert _docstrings_of_file(path) == []

    not_utf_8 = b'"""Bytes \xff of another encoding, no doubt about it."""\n'
    path.write_bytes(not_utf_8)
    assert _docstrings_of_file(path) == []

    almost_only_code = '"""Few."""\n' + "x = 1\n" * 100
    path.write_text(almost_only_code)
    assert _docstrings_of_file(path) == []


@pytest.mark.sample
def test_the_text_is_equal_in_another_process_and_holds_no_paragraph_twice(tmp_path: Path) -> None:
    """The other process has another hash seed, so an order that depends on sets would differ."""
    path, num_documents = write_python_docs(tmp_path / "here", packages=["yaml"])
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from examples.python_docs import write_python_docs\n"
        "write_python_docs(Path(sys.argv[1]), ['yaml'])\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "there")]
    subprocess.run(command, check=True, cwd=REPOSITORY, env={**os.environ, "PYTHONHASHSEED": "77"})

    text = path.read_text()
    assert text == (tmp_path / "there" / path.name).read_text()
    documents = text.split("\n\n")  # the last one is empty: each document ends with a blank line
    assert len(documents) - 1 == num_documents
    assert num_documents > 200
    assert len(text) > 1_000_000
    assert ">>>" not in text
    paragraphs = [line.lower() for line in text.split("\n") if line]
    assert len(set(paragraphs)) == len(paragraphs), "a paragraph comes twice"
