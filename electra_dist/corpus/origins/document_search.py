"""Find the rows of a shard that hold a given document, or any document of a source, by the shard's origin file.

An origin file is a table with one line for each training example of the shard (`origin_table.SCHEMA`). A search first
marks lines (`lines_of_source`, `lines_of_document`) and then looks up the rows of these lines (`rows_of_lines`).

Guarantee: the rows that are found are exactly those with an example of the document or of the source. No shard is
read.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow
import pyarrow.compute
from numpy.typing import NDArray

from electra_dist.corpus.inputs.skipped_inputs import encodable

Mask = NDArray[np.bool_]  # [lines of an origin file]: whether the line belongs to what is searched for


class RowDocument(NamedTuple):
    """Document from which one training example of a row was made."""

    start: int  # position of the example's first token in the row, from 0
    source: str  # source that the document's record names; without one, the source of its input file
    document: str  # id of the document; without one, FILE#NUMBER as in `place`
    place: str  # FILE#NUMBER: name of the input file, and number of the document in this file, from 0


def lines_of_source(table: pyarrow.Table, source: str) -> Mask:
    """Return for each line of an origin file whether its document is from a source, such as "wiki" or "texts/wiki".

    `source` is a name in build.json or in the documents' `metadata.source`; the last folders of a name are enough.
    """
    name = encodable(source)  # as a build writes the name of a folder that is not UTF-8
    return _is_source(table.column("source"), name) | _is_source(table.column("record_source"), name)


def _is_source(names: pyarrow.ChunkedArray, source: str) -> Mask:
    """Return for each name whether it equals `source`, or ends with "/" and `source`; False for null."""
    is_equal = pyarrow.compute.equal(names, source)
    ends_so = pyarrow.compute.ends_with(names, pattern="/" + source)
    return _without_nulls(pyarrow.compute.or_(is_equal, ends_so))


def lines_of_document(table: pyarrow.Table, document: str) -> Mask:
    """Return for each line of an origin file whether it is of `document`, an id or FILE#NUMBER (number from 0)."""
    name = encodable(document)  # as a build writes the name of a file that is not UTF-8
    is_document = _without_nulls(pyarrow.compute.equal(table.column("id"), name))
    file, _, number = name.rpartition("#")
    if number.isdecimal():
        is_file = _without_nulls(pyarrow.compute.equal(table.column("file"), file))
        is_document |= is_file & (table.column("number").to_numpy() == int(number))
    return is_document


def _without_nulls(values: pyarrow.ChunkedArray) -> Mask:
    return np.array(pyarrow.compute.fill_null(values, False), bool)


def rows_of_lines(table: pyarrow.Table, lines: Mask) -> NDArray[np.int64]:
    """Return the numbers of the rows to which the marked lines of an origin file belong, ascending, each once."""
    return np.unique(table.column("row").to_numpy()[lines]).astype(np.int64)


def documents_of_rows(
    table: pyarrow.Table, rows: NDArray[np.integer], lines: Mask | None = None
) -> dict[int, list[RowDocument]]:
    """Return the documents of the given rows of a shard: row -> its documents from left to right.

    A document with several examples in a row occurs several times. `lines` marks the lines of the origin file that
    count (None: all); a row without a marked line has no entry.
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
    """Return the names of all sources in an origin file, both of input files and from the documents' own records."""
    names: set[str] = set()
    for column in ("source", "record_source"):
        names.update(table.column(column).unique().to_pylist())
    return {name for name in names if name is not None}
