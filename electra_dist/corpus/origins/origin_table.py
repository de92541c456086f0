"""Make the table that says which documents are in the rows of a shard, and write it as a parquet file.

| column | content |
| --- | --- |
| `row` | number of the row in the shard, from 0 |
| `start` | place of the first id of the example ([CLS]) in the row, from 0 |
| `file`, `number` | name of the input file, and number of the document in it, from 0 |
| `source` | source of the file, a key of `sources` in build.json |
| `id` | the document's own id (JSON field or table column `id`); null without one |
| `record_source` | source in the document's record (`metadata.source`, as `corpus prepare` writes it), or null |

There is a line for each example, in the order of the rows; the example reaches to the next `start` or to [PAD].

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
    """Where a document of a build comes from."""

    file: str  # name of its input file
    number: int  # position in the file, from 0
    source: str  # source of the file
    names: DocumentNames  # names of its own


def table_of_examples(places: np.ndarray, origins: Sequence[Origin]) -> pyarrow.Table:
    """Return a table with one line for each example: where it begins, and which document it is of.

    Args:
        places: int64 [examples, 3], sorted by row: row, position of the example's first token in the row, and index of
            its document in `origins`.
        origins: the documents.
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
    """Return the table of consecutive blocks of rows.

    Args:
        parts: for each block its table, whose rows count from 0, and its number of rows.
    """
    tables = [SCHEMA.empty_table()]
    first_row = 0
    for table, num_rows in parts:
        tables.append(_shifted(table, first_row))
        first_row += num_rows
    return pyarrow.concat_tables(tables)


def rows_of_table(table: pyarrow.Table, first_row: int, num_rows: int) -> pyarrow.Table:
    """Return the part of a table for a range of its rows, which count from 0 in the result."""
    start, end = np.searchsorted(table.column("row").to_numpy(), [first_row, first_row + num_rows])
    return _shifted(table.slice(int(start), int(end - start)), -first_row)


def _shifted(table: pyarrow.Table, offset: int) -> pyarrow.Table:
    """Return a table with `offset` added to its rows."""
    rows = pyarrow.array(table.column("row").to_numpy() + offset, pyarrow.int32())
    return table.set_column(0, SCHEMA.field("row"), rows)


def table_to_bytes(table: pyarrow.Table) -> bytes:
    """Return a table as the bytes of a parquet file."""
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
    """Return the table in the bytes of a parquet file.

    Raises:
        ValueError: the bytes are no parquet file with the columns of such a table.
    """
    try:
        return pyarrow.parquet.read_table(io.BytesIO(data)).select(SCHEMA.names).cast(SCHEMA)
    except (pyarrow.ArrowException, KeyError, OSError, ValueError) as error:
        raise ValueError(str(error)) from None
