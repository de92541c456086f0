"""The text of the Python installation: prose, no code, the same each time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from electra_dist.corpus.python_docs import _docstrings_of_file, prose, write_python_docs

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


def test_prose_keeps_sentences_only() -> None:
    assert prose(DOCSTRING) == [
        "Return the mean of numpy.add over axis, as a *float*.",
        "The mean is the sum of all elements divided by their number",
        "axis (int, optional): Axis or axes along which the means are computed, first by first.",
        "keep: Whether the reduced axes are left in the result.",
        "out: Where the result of all this is to be put.",
    ]


def test_docstrings_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text(
        '"""Module."""\nclass A:\n    """Class."""\n    if 1:\n        async def f():\n            """Inner."""\n'
    )
    assert _docstrings_of_file(path) == ["Module.", "Class.", "Inner."]
    path.write_text('"""Python of another\n version."""\nprint "x"\n')
    assert _docstrings_of_file(path) == []
    path.write_bytes(b'"""Bytes \xff of another encoding, no doubt about it."""\n')
    assert _docstrings_of_file(path) == []
    path.write_text('"""Few."""\n' + "x = 1\n" * 100)
    assert _docstrings_of_file(path) == []


def test_the_standard_library_gives_the_same_text_in_every_process(tmp_path: Path) -> None:
    path, num_documents = write_python_docs(tmp_path / "here", packages=["yaml"])
    code = "import sys; from pathlib import Path; from electra_dist.corpus.python_docs import write_python_docs; "
    code += "write_python_docs(Path(sys.argv[1]), ['yaml'])"
    command = [sys.executable, "-c", code, str(tmp_path / "there")]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONHASHSEED": "77"})
    text = path.read_text()
    assert text == (tmp_path / "there" / path.name).read_text()
    documents = text.split("\n\n")
    assert len(documents) - 1 == num_documents > 200
    assert len(text) > 1_000_000
    paragraphs = text.split("\n")
    assert ">>>" not in text
    filled = [paragraph for paragraph in paragraphs if paragraph]
    assert len(set(map(str.lower, filled))) == len(filled), "a paragraph comes twice"
