"""Read documents from a table (CSV, TSV, parquet or Arrow): their texts from one column, their ids from `id`.

CSV is read as RFC 4180 defines it: a cell in quotes may hold line ends, and two quotes within it stand for one. TSV
has no quotes (IANA, text/tab-separated-values): a quote is a character like any other. The first row of both names
the columns.

Cost: one core reads 190 MB of CSV a second.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import pyarrow
import pyarrow.ipc
import pyarrow.parquet

from electra_dist.corpus.inputs.decompression import MOST_DOCUMENT_BYTES, lines_of
from electra_dist.corpus.text_decoding import RawDocument, name_of_value
from electra_dist.shown_text.escapes import printable

_ARROW_FILE_MARK = b"ARROW1"
_PARQUET_BATCH_ROWS = 1024
_MAX_COLUMNS_SHOWN = 20  # in an error message
_MAX_NAME_CHARS = 40
_ID_COLUMN = "id"  # optional column with the ids of the documents


class NoTextColumn(Exception):
    """Exception for a table without the column that holds the text; its message lists the columns that it has."""

    def __init__(self, columns: Sequence[str]) -> None:
        """Write the message: the names of the first 20 columns on one line, each cut to 40 characters.

        Args:
            columns: names of the columns. The first row of data is taken for them if a CSV file has no row of names,
                so they may be long.
        """
        names = [_short_name(column) for column in columns[:_MAX_COLUMNS_SHOWN]]
        if len(columns) > _MAX_COLUMNS_SHOWN:
            names.append(f"and {len(columns) - _MAX_COLUMNS_SHOWN} more")
        super().__init__(", ".join(names))


def _short_name(column: str) -> str:
    """Return the name of a column, cut to 40 characters; other characters than printable ones appear as escapes."""
    return printable(column if len(column) <= _MAX_NAME_CHARS else column[:_MAX_NAME_CHARS] + "...")


def read_csv(stream: io.BufferedIOBase, text_field: str, *, is_tsv: bool) -> Iterator[RawDocument]:
    """Yield the cells of one column as undecoded documents.

    A row with another number of cells than the first row gives a document whose `data` is None.

    Args:
        stream: the file, decompressed; it is closed at the end.
        text_field: name of the column.
        is_tsv: tab between the cells and no quotes, instead of a comma.

    Raises:
        NoTextColumn: the first row does not name the column.
        OSError: a quoted cell is not closed, or there is text between its closing quote and the next comma.
    """
    csv.field_size_limit(MOST_DOCUMENT_BYTES)  # the csv module's own limit is 128 KiB
    # Bytes that are not UTF-8 become surrogates, from which `encode` makes the same bytes again.
    text = io.TextIOWrapper(stream, "utf-8-sig", "surrogateescape", newline="")  # type: ignore[type-var]
    dialect: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if is_tsv else {"strict": True}
    rows = csv.reader(lines_of(text), **dialect)
    try:
        columns = next(rows, None)
        if columns is None:
            return  # an empty file
        if text_field not in columns:
            raise NoTextColumn(columns)
        index = columns.index(text_field)
        id_index = columns.index(_ID_COLUMN) if _ID_COLUMN in columns else None
        for row in rows:
            if len(row) == len(columns):
                document_id = None if id_index is None else name_of_value(row[id_index])
                yield RawDocument(row[index].encode("utf-8", "surrogateescape"), False, id=document_id)
            elif row:  # an empty row is an empty line
                yield RawDocument(None, False)
    except csv.Error as error:
        raise OSError(f"line {rows.line_num} is not CSV: {error}") from None


def read_parquet(stream: BinaryIO, text_field: str) -> Iterator[RawDocument]:
    """Yield the cells of one column of a parquet file as undecoded documents; `data` is None for a null cell.

    Args:
        stream: the file, opened to read bytes.
        text_field: name of the column.

    Raises:
        NoTextColumn: there is no column of that name with strings or bytes.
    """
    table = pyarrow.parquet.ParquetFile(stream)
    schema = table.schema_arrow
    if text_field not in schema.names or not _is_text(schema.field(text_field).type):
        raise NoTextColumn(schema.names)
    columns = [text_field, _ID_COLUMN] if _has_ids(schema) else [text_field]
    stream.seek(0)
    # Cells stay in the dictionary of their column, which has each text once, however often it is used.
    table = pyarrow.parquet.ParquetFile(stream, read_dictionary=columns)
    for batch in table.iter_batches(batch_size=_PARQUET_BATCH_ROWS, columns=columns):
        yield from _documents(batch, text_field)


def read_arrow(stream: BinaryIO, text_field: str) -> Iterator[RawDocument]:
    """Yield the cells of one column of an Arrow file as undecoded documents; `data` is None for a null cell.

    Both forms of Arrow IPC are read: the stream, which data sets of Hugging Face consist of, and the file.

    Args:
        stream: the file, opened to read bytes.
        text_field: name of the column.

    Raises:
        NoTextColumn: there is no column of that name with strings or bytes.
        ArrowException: the file is damaged or cut off.
    """
    is_file = stream.read(len(_ARROW_FILE_MARK)) == _ARROW_FILE_MARK
    stream.seek(0)
    reader = pyarrow.ipc.open_file(stream) if is_file else pyarrow.ipc.open_stream(stream)
    if text_field not in reader.schema.names or not _is_text(reader.schema.field(text_field).type):
        raise NoTextColumn(reader.schema.names)
    batches = (reader.get_batch(number) for number in range(reader.num_record_batches)) if is_file else reader
    for batch in batches:
        yield from _documents(batch, text_field)


def _documents(batch: pyarrow.RecordBatch, text_field: str) -> Iterator[RawDocument]:
    """Yield a document for each row: the cell of the text column as bytes (strings as UTF-8), and the id."""
    column = batch.column(text_field)
    if isinstance(column, pyarrow.DictionaryArray):
        texts = column.dictionary.cast(pyarrow.large_binary())
        cells = (None if number is None else texts[number].as_py() for number in column.indices.to_pylist())
    else:
        cells = (cell.as_py() for cell in column.cast(pyarrow.large_binary()))
    if not _has_ids(batch.schema):
        yield from (RawDocument(cell, is_json=False) for cell in cells)
        return
    for cell, document_id in zip(cells, batch.column(_ID_COLUMN)):
        yield RawDocument(cell, is_json=False, id=name_of_value(document_id.as_py()))


def _has_ids(schema: pyarrow.Schema) -> bool:
    """Return whether a table has exactly one column `id`, with strings or integers, so that it gives ids."""
    if schema.names.count(_ID_COLUMN) != 1:
        return False
    column_type = schema.field(_ID_COLUMN).type
    if pyarrow.types.is_dictionary(column_type):
        column_type = column_type.value_type
    return (
        pyarrow.types.is_string(column_type)
        or pyarrow.types.is_large_string(column_type)
        or pyarrow.types.is_integer(column_type)
    )


def _is_text(column_type: pyarrow.DataType) -> bool:
    """Return whether a column holds strings or bytes, with 32-bit or 64-bit ("large") offsets."""
    return (
        pyarrow.types.is_string(column_type)
        or pyarrow.types.is_large_string(column_type)
        or pyarrow.types.is_binary(column_type)
        or pyarrow.types.is_large_binary(column_type)
    )
