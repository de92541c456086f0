"""Find the rows of a corpus that hold documents of a source, or one document, by the side files.

Guarantee: the rows that are named are exactly those with an example of such a document.

Cost: one pass over the side files, which are a small part of the shards; no shard is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow
import pyarrow.compute


class RowDocument(NamedTuple):
    """Document with an example in a row."""

    start: int  # place of the first id of the example in the row
    source: str  # source that its record names, or source of its file
    document: str  # its id, or FILE#NUMBER
    place: str  # FILE#NUMBER: name of the input file, and number of the document in it from 0


class RowOfDocument(NamedTuple):
    """Row with documents that were searched for."""

    shard: int  # index of its shard in the manifest
    row: int  # number within the shard
    documents: list[RowDocument]  # those that were searched for, from left to right


def rows_of_source(tables: Iterable[tuple[int, pyarrow.Table]], source: str) -> Iterator[RowOfDocument]:
    """Yield the rows with an example of a source.

    Args:
        tables: index of a shard, and its side file, for each shard.
        source: name of the source, as build.json or the documents' records name it; the last folders of a name are
            enough, such as "wiki" for texts/wiki.
    """
    for shard, table in tables:
        matches = np.zeros(len(table), bool)
        for column in ("source", "record_source"):
            matches |= _matches_source(table.column(column), source)
        yield from _rows(shard, table, matches)


def _matches_source(names: pyarrow.ChunkedArray, source: str) -> np.ndarray:
    """Return where a name is the source or ends with its folders, bool."""
    is_equal = pyarrow.compute.equal(names, source)
    ends_so = pyarrow.compute.ends_with(names, pattern="/" + source)
    matches = pyarrow.compute.or_(is_equal, ends_so)
    return pyarrow.compute.fill_null(matches, False).to_numpy()


def rows_of_document(tables: Iterable[tuple[int, pyarrow.Table]], document: str) -> Iterator[RowOfDocument]:
    """Yield the rows with an example of a document.

    Args:
        tables: index of a shard, and its side file, for each shard.
        document: id of the document, or FILE#NUMBER: the name of its file below the input, and its number from 0.
    """
    file, has_number, number = document.rpartition("#")
    for shard, table in tables:
        has_id = pyarrow.compute.equal(table.column("id"), document)
        matches = pyarrow.compute.fill_null(has_id, False).to_numpy()
        if has_number and number.isdecimal():
            is_file = pyarrow.compute.equal(table.column("file"), file).to_numpy()
            matches |= is_file & (table.column("number").to_numpy() == int(number))
        yield from _rows(shard, table, matches)


def documents_of_rows(table: pyarrow.Table, rows: Sequence[int]) -> dict[int, list[RowDocument]]:
    """Return the documents of some rows of a shard, from left to right: row -> documents."""
    matches = np.isin(table.column("row").to_numpy(), rows)
    return {found.row: found.documents for found in _rows(0, table, matches)}


def sources_of_table(table: pyarrow.Table) -> set[str]:
    """Return the names of all sources in a side file."""
    names: set[str] = set()
    for column in ("source", "record_source"):
        names.update(table.column(column).unique().to_pylist())
    return {name for name in names if name is not None}


def _rows(shard: int, table: pyarrow.Table, matches: np.ndarray) -> Iterator[RowOfDocument]:
    """Yield the rows that have a line of the table where `matches` is true, with the documents of these lines."""
    current: RowOfDocument | None = None
    for line in table.filter(pyarrow.array(matches)).to_pylist():
        if current is None or current.row != line["row"]:
            if current is not None:
                yield current
            current = RowOfDocument(shard, line["row"], [])
        place = f"{line['file']}#{line['number']}"
        source = line["record_source"] or line["source"]
        current.documents.append(RowDocument(line["start"], source, line["id"] or place, place))
    if current is not None:
        yield current
