"""Find the rows of a corpus that hold documents of a source, or one document, by the side files.

Guarantee: the rows that are found are exactly those with an example of such a document.

Cost: one pass over the side files, which are a small part of the shards; no shard is read.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow
import pyarrow.compute
from numpy.typing import NDArray

Mask = NDArray[np.bool_]  # for each line of a side file, whether it is one that is searched for


class RowDocument(NamedTuple):
    """Document with an example in a row."""

    start: int  # place of the first id of the example in the row
    source: str  # source that its record names, or source of its file
    document: str  # its id, or FILE#NUMBER
    place: str  # FILE#NUMBER: name of the input file, and number of the document in it from 0


def lines_of_source(table: pyarrow.Table, source: str) -> Mask:
    """Return which lines of a side file belong to a source.

    Args:
        table: the side file.
        source: name of the source, as build.json or the documents' records name it; the last folders of a name are
            enough, such as "wiki" for texts/wiki.
    """
    return _is_source(table.column("source"), source) | _is_source(table.column("record_source"), source)


def _is_source(names: pyarrow.ChunkedArray, source: str) -> Mask:
    """Return where a name is the source or ends with its folders."""
    is_equal = pyarrow.compute.equal(names, source)
    ends_so = pyarrow.compute.ends_with(names, pattern="/" + source)
    return _without_nulls(pyarrow.compute.or_(is_equal, ends_so))


def lines_of_document(table: pyarrow.Table, document: str) -> Mask:
    """Return which lines of a side file belong to a document.

    Args:
        table: the side file.
        document: id of the document, or FILE#NUMBER: the name of its file below the input, and its number from 0.
    """
    is_document = _without_nulls(pyarrow.compute.equal(table.column("id"), document))
    file, _, number = document.rpartition("#")
    if number.isdecimal():
        is_file = _without_nulls(pyarrow.compute.equal(table.column("file"), file))
        is_document |= is_file & (table.column("number").to_numpy() == int(number))
    return is_document


def _without_nulls(values: pyarrow.ChunkedArray) -> Mask:
    """Return a column of booleans as a new array, in which nulls are false."""
    return np.array(pyarrow.compute.fill_null(values, False), bool)


def rows_of_lines(table: pyarrow.Table, lines: Mask) -> NDArray[np.int64]:
    """Return the rows that have one of some lines of a side file, in order, each once."""
    return np.unique(table.column("row").to_numpy()[lines]).astype(np.int64)


def documents_of_rows(
    table: pyarrow.Table, rows: NDArray[np.integer], lines: Mask | None = None
) -> dict[int, list[RowDocument]]:
    """Return the documents of some rows of a shard, from left to right: row -> documents.

    Args:
        table: side file of the shard.
        rows: numbers of the rows.
        lines: which lines count; None for all.
    """
    wanted = np.isin(table.column("row").to_numpy(), rows)
    if lines is not None:
        wanted &= lines
    documents: dict[int, list[RowDocument]] = {}
    for line in table.filter(pyarrow.array(wanted)).to_pylist():
        place = f"{line['file']}#{line['number']}"
        source = line["record_source"] or line["source"]
        document = RowDocument(line["start"], source, line["id"] or place, place)
        documents.setdefault(line["row"], []).append(document)
    return documents


def sources_of_table(table: pyarrow.Table) -> set[str]:
    """Return the names of all sources in a side file."""
    names: set[str] = set()
    for column in ("source", "record_source"):
        names.update(table.column(column).unique().to_pylist())
    return {name for name in names if name is not None}
