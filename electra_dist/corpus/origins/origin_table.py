"""Make the table that names the documents in the rows of a shard, and convert it to and from a parquet file.

| column | content |
| --- | --- |
| `row` | number of the row in the shard, from 0 |
| `start` | position of the example's first token, [CLS], in the row, from 0 |
| `file`, `number` | name of the input file, and number of the document in it, from 0 |
| `source` | source of the file, a key of `sources` in build.json |
| `id` | id of the document (JSON field or table column `id`); null if it has no id |
| `record_source` | field `metadata.source` of the document's record, which `corpus prepare` writes; null if missing |

There is a line for each training example, in the order of the rows. An example ends where the next example of its row
begins, at the first [PAD], or at the end of the row.

Guarantee: equal examples give equal bytes with equal versions of pyarrow.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow
import pyarrow.parquet

from electra_dist.corpus.text_decoding import DocumentNames

SCHEMA = pyarrow.schema(
    [
        pyarrow.field("row", pyarrow.int32(), nullable=False),
        pyarrow.field("start", pyarrow.int32(), nullable=False),
        pyarrow.field("file", pyarrow.string(), nullable=False),
        pyarrow.field("number", pyarrow.int64(), nullable=False),
        pyarrow.field("source", pyarrow.string(), nullable=False),
        pyarrow.field("id", pyarrow.string()),
        pyarrow.field("record_source", pyarrow.string()),
    ]
)
_COMPRESSION_LEVEL = 9  # of zstd; a shard's table takes milliseconds at any level


class Origin(NamedTuple):
    """Where a document comes from: input file, number in this file, source, and the names in its own record."""

    file: str  # name of the document's input file
    number: int  # number of the document in the file, from 0
    source: str  # source of the file, a key of `sources` in build.json
    names: DocumentNames  # id and source that the document's own record has


def table_of_examples(places: np.ndarray, origins: Sequence[Origin]) -> pyarrow.Table:
    """Return a table with one line for each example: where the example begins, and from which document it was made.

    `places` is int64 [examples, 3], sorted by row: the row, the position of the example's first token in the row, and
    the index of its document in `origins`.
    """
    documents = [origins[index] for index in places[:, 2].tolist()]
    columns = [
        places[:, 0],
        places[:, 1],
        [document.file for document in documents],
        [document.number for document in documents],
        [document.source for document in documents],
        [document.names.id for document in documents],
        [document.names.source for document in documents],
    ]
    arrays = [pyarrow.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)]
    return pyarrow.Table.from_arrays(arrays, schema=SCHEMA)


def joined(parts: Iterable[tuple[pyarrow.Table, int]]) -> pyarrow.Table:
    """Join the tables of consecutive blocks of rows, given as (table, number of rows), and renumber all rows."""
    tables = [SCHEMA.empty_table()]
    first_row = 0
    for table, num_rows in parts:
        tables.append(_shifted(table, first_row))
        first_row += num_rows
    return pyarrow.concat_tables(tables)


def rows_of_table(table: pyarrow.Table, first_row: int, num_rows: int) -> pyarrow.Table:
    """Return the lines of `num_rows` rows from `first_row` on, renumbered from 0; `table` must be sorted by row."""
    start, end = np.searchsorted(table.column("row").to_numpy(), [first_row, first_row + num_rows])
    return _shifted(table.slice(int(start), int(end - start)), -first_row)


def _shifted(table: pyarrow.Table, offset: int) -> pyarrow.Table:
    rows = pyarrow.array(table.column("row").to_numpy() + offset, pyarrow.int32())
    return table.set_column(0, SCHEMA.field("row"), rows)


def table_to_bytes(table: pyarrow.Table) -> bytes:
    """Return a table as the bytes of a zstd-compressed parquet file; equal tables give equal bytes."""
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(
        table.combine_chunks(),
        buffer,
        compression="zstd",
        compression_level=_COMPRESSION_LEVEL,
        use_dictionary=["file", "source", "id", "record_source"],
        column_encoding={"row": "DELTA_BINARY_PACKED", "start": "PLAIN", "number": "DELTA_BINARY_PACKED"},
        write_statistics=False,
        store_schema=False,
    )
    return buffer.getvalue()


def table_from_bytes(data: bytes) -> pyarrow.Table:
    """Return the table that `table_to_bytes` has written; raise ValueError if the bytes are no such table."""
    try:
        # Without threads of Arrow's: one that still held `data` when the interpreter ends would abort the process.
        file = pyarrow.parquet.ParquetFile(pyarrow.BufferReader(data), pre_buffer=False)
        return file.read(use_threads=False).select(SCHEMA.names).cast(SCHEMA)
    except (pyarrow.ArrowException, KeyError, OSError, ValueError) as error:
        raise ValueError(str(error)) from None
