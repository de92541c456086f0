"""Read documents from a table (CSV, TSV, parquet or Arrow): their texts from one column, their ids from `id`.

CSV is read as RFC 4180 defines it: a cell in quotes may hold line ends, and two quotes within it stand for one. TSV
has no quotes (IANA, text/tab-separated-values): a quote is a character like any other. The first row of both names
the columns.

A column holds text if its values are strings or bytes, in any form of pyarrow: with 32-bit or 64-bit offsets, as
views, dictionary-encoded or run-end-encoded. A column that has only nulls gives documents without text. In parquet and
Arrow files, "data.text" names the field text within the column data.

Arrow reads its own memory or a file that it opens itself, and uses no threads where that can be chosen. Otherwise a
thread of Arrow that holds a Python object when the interpreter ends would abort the process.
"""

from __future__ import annotations

import csv
import io
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, BinaryIO

import pyarrow
import pyarrow.compute
import pyarrow.ipc
import pyarrow.parquet

from electra_dist.corpus.inputs.file_kinds import MOST_DOCUMENT_BYTES, lines_of
from electra_dist.corpus.inputs.text_decoding import RawDocument, name_of_value, path_of_field
from electra_dist.escapes import printable
from electra_dist.tables import delimiter_of

_ARROW_FILE_MARK = b"ARROW1"
_PARQUET_BATCH_ROWS = 1024
_MAX_COLUMNS_SHOWN = 20  # in an error message
_MAX_NAME_CHARS = 40
_NO_TEXT = " (no text)"  # behind the name of a column of another type
_BINARY_OF_STRINGS = {
    pyarrow.string(): pyarrow.binary(),
    pyarrow.large_string(): pyarrow.large_binary(),
    pyarrow.string_view(): pyarrow.binary_view(),
}
_TEXT_TYPES = {*_BINARY_OF_STRINGS, *_BINARY_OF_STRINGS.values(), pyarrow.null()}
_ID_COLUMN = "id"  # optional column with the ids of the documents


class NoTextColumn(Exception):
    """Exception for a table without a column of text of the given name; its message lists the table's columns."""

    def __init__(self, text_field: str, columns: Sequence[str], found: str | None = None) -> None:
        """Make the message from the first 20 `columns`; `found` says what the name stands for, "of type int64".

        Names are cut to 40 characters, because without a header the "names" of a CSV file are its first row of data.
        """
        names = [_short_name(column) for column in columns[:_MAX_COLUMNS_SHOWN]]
        self.text_columns = [name for name in names if not name.endswith(_NO_TEXT)]  # those that may hold the text
        if len(columns) > _MAX_COLUMNS_SHOWN:
            names.append(f"and {len(columns) - _MAX_COLUMNS_SHOWN} more")
        reason = f" (it is {_short_name(found)})" if found else ""
        super().__init__(
            f"no column `{_short_name(text_field)}` of text{reason}; set --text-field to the column that holds it: "
            f"{', '.join(names)}"
        )


def _short_name(column: str) -> str:
    return printable(column if len(column) <= _MAX_NAME_CHARS else column[:_MAX_NAME_CHARS] + "...")


def read_csv(
    stream: io.BufferedIOBase, text_field: str, *, with_fields: bool = False, is_tsv: bool
) -> Iterator[RawDocument]:
    """Yield the cells of column `text_field` of a CSV or TSV file as undecoded documents; close the stream at the end.

    A row with another number of cells than the header gives a document whose `data` is None. `with_fields` adds the
    other cells. Raises NoTextColumn if the header does not name the column, and OSError for a quoted cell that is not
    closed, or that has text after it.
    """
    csv.field_size_limit(MOST_DOCUMENT_BYTES)  # the csv module's own limit is 128 KiB
    # Bytes that are not UTF-8 become surrogates, from which `encode` makes the same bytes again.
    text = io.TextIOWrapper(stream, "utf-8-sig", "surrogateescape", newline="")  # type: ignore[type-var]
    lines = lines_of(text)
    num_empty = 0  # lines before the header
    while (first_line := next(lines, None)) is not None and not first_line.strip(" \r\n"):
        num_empty += 1
    if first_line is None:
        return  # nothing but empty lines
    all_lines = itertools.chain([first_line], lines)
    if is_tsv:
        rows = csv.reader(all_lines, delimiter="\t", quoting=csv.QUOTE_NONE)
    else:
        # Semicolons, tabs or bars may separate the cells, if commas do not make a cell `text_field` of the header.
        rows = csv.reader(all_lines, delimiter=delimiter_of(first_line, text_field), strict=True)
    try:
        yield from _documents_of_rows(rows, text_field, with_fields)
    except csv.Error as error:
        raise OSError(f"line {num_empty + max(1, rows.line_num)} is not CSV: {error}") from None


def _documents_of_rows(rows: Iterator[list[str]], text_field: str, with_fields: bool) -> Iterator[RawDocument]:
    """Yield a document for each row after the header; its `data` is None if the row has too few or many cells."""
    columns = next(rows)
    if columns.count(text_field) != 1:
        raise NoTextColumn(text_field, columns, _several_of(text_field, columns))
    index = columns.index(text_field)
    id_index = columns.index(_ID_COLUMN) if _ID_COLUMN in columns else None
    for row in rows:
        if len(row) == len(columns):
            document_id = None if id_index is None else name_of_value(row[id_index])
            data = row[index].encode("utf-8", "surrogateescape")
            fields = None
            if with_fields:
                fields = {column: cell for column, cell in zip(columns, row, strict=True) if column != text_field}
            yield RawDocument(data, False, document_id, fields)
        elif row:  # an empty row is an empty line
            yield RawDocument(None, False)


def read_parquet(stream: BinaryIO, text_field: str, *, with_fields: bool = False) -> Iterator[RawDocument]:
    """Yield the cells of column `text_field` of a parquet file as undecoded documents; a null cell has `data` None.

    `with_fields` adds the other cells of the row. Raises NoTextColumn if there is no such column of text.
    """
    source = _arrow_source(stream)
    schema = pyarrow.parquet.ParquetFile(source, pre_buffer=False).schema_arrow
    path = _path_to_text(schema, text_field)
    text_columns = [text_field, _ID_COLUMN] if _has_ids(schema) else [text_field]
    columns = None if with_fields else text_columns
    # Cells stay in the dictionary of their column, which has each text once, however often it is used.
    table = pyarrow.parquet.ParquetFile(source, pre_buffer=False, read_dictionary=text_columns)
    for batch in table.iter_batches(batch_size=_PARQUET_BATCH_ROWS, columns=columns, use_threads=False):
        yield from _documents(batch, path, with_fields)


def read_arrow(stream: BinaryIO, text_field: str, *, with_fields: bool = False) -> Iterator[RawDocument]:
    """Yield the cells of column `text_field` of an Arrow file as undecoded documents; a null cell has `data` None.

    Both forms of Arrow IPC are read: the file form, and the stream form, in which Hugging Face stores data sets.
    `with_fields` adds the other cells of the row. Raises NoTextColumn if there is no such column of text.
    """
    is_file = stream.read(len(_ARROW_FILE_MARK)) == _ARROW_FILE_MARK
    source = _arrow_source(stream)
    options = pyarrow.ipc.IpcReadOptions(use_threads=False)
    open_reader = pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream
    reader = open_reader(source, options=options)
    path = _path_to_text(reader.schema, text_field)
    batches = (reader.get_batch(number) for number in range(reader.num_record_batches)) if is_file else reader
    for batch in batches:
        yield from _documents(batch, path, with_fields)


def _arrow_source(stream: BinaryIO) -> pyarrow.NativeFile:
    """Return a source that Arrow reads by itself, without calls of Python: a file, or an archive member in memory."""
    if not isinstance(stream, io.BytesIO):
        return pyarrow.OSFile(os.fsencode(stream.name))
    memory = pyarrow.BufferOutputStream()
    memory.write(stream.getbuffer())
    return pyarrow.BufferReader(memory.getvalue())


def _documents(batch: pyarrow.RecordBatch, path: list[str], with_fields: bool) -> Iterator[RawDocument]:
    """Yield a document for each row of a batch: its text cell as bytes, its id and, `with_fields`, the other cells.

    `path` is the name of the text's column or, if the text is nested, the names from the column to the field.
    """
    ids = _ids(batch.column(_ID_COLUMN)) if _has_ids(batch.schema) else itertools.repeat(None)
    fields = _fields(batch, path) if with_fields else itertools.repeat(None)
    for cell, document_id, fields_of_row in zip(_cells(_text_column(batch, path)), ids, fields, strict=False):
        yield RawDocument(cell, is_json=False, id=document_id, fields=fields_of_row)


def _text_column(batch: pyarrow.RecordBatch, path: list[str]) -> pyarrow.Array:
    column = batch.column(path[0])
    for name in path[1:]:
        column.validate()  # a damaged file may have fewer cells of the field than rows
        column = pyarrow.compute.struct_field(column, name)
    return column


def _fields(batch: pyarrow.RecordBatch, path: list[str]) -> Iterator[dict[str, Any]]:
    """Yield for each row the cells beside its text: name of the column -> Python value.

    `path` leads to the text: the name of its column or, for nested text, the names from the column to the field.
    """
    is_nested = len(path) > 1
    places = {name: place for place, name in enumerate(batch.schema.names) if is_nested or name != path[0]}
    columns = {name: _values(batch.column(place)) for name, place in places.items()}
    for row in range(len(batch)):
        fields = {name: values[row] for name, values in columns.items()}
        inner = fields
        for name in path[:-1]:
            inner = inner[name] or {}
        inner.pop(path[-1], None)
        yield fields


def _values(column: pyarrow.Array) -> list[Any]:
    """Return the cells of a column as Python values: text and times as str, text that is not UTF-8 as None."""
    if _is_text(column.type):
        return [_text_or_none(cell) for cell in _cells(column)]
    if pyarrow.types.is_temporal(column.type) and not pyarrow.types.is_duration(column.type):
        column = column.cast(pyarrow.string())
    try:
        return column.to_pylist()
    except UnicodeDecodeError:  # of text within lists or fields
        return [_decodable(cell) for cell in column]


def _decodable(cell: pyarrow.Scalar) -> Any:
    """Return a cell as a Python value, in which each text that is not UTF-8 is None."""
    try:
        return cell.as_py()
    except UnicodeDecodeError:
        if isinstance(cell, pyarrow.StructScalar):
            return {name: _decodable(cell[name]) for name in cell}
        if isinstance(cell, (pyarrow.ListScalar, pyarrow.LargeListScalar)):
            return [_decodable(part) for part in cell.values]
        return None


def _text_or_none(data: bytes | None) -> str | None:
    try:
        return None if data is None else data.decode()
    except UnicodeDecodeError:
        return None


def _ids(column: pyarrow.Array) -> Iterator[str | None]:
    """Yield the ids in a column of integers or text; null gives None, and bytes that are not UTF-8 become U+FFFD."""
    if pyarrow.types.is_integer(column.type):
        yield from (name_of_value(value) for value in column.to_pylist())
        return
    for value in _cells(column):
        yield None if value is None else value.decode("utf-8", "replace")


def _cells(column: pyarrow.Array) -> Iterator[bytes | None]:
    """Yield the cells of a column of text as bytes.

    A dictionary-encoded column is expanded cell by cell: a whole batch of long texts could be far larger than the
    file.
    """
    if not isinstance(column, pyarrow.DictionaryArray):
        yield from (cell.as_py() for cell in _as_bytes(column))
        return
    texts = _as_bytes(column.dictionary)
    for number in column.indices.to_pylist():
        yield None if number is None else texts[number].as_py()


def _has_ids(schema: pyarrow.Schema) -> bool:
    if schema.names.count(_ID_COLUMN) != 1:
        return False
    column_type = schema.field(_ID_COLUMN).type
    return pyarrow.types.is_integer(column_type) or _is_text(column_type)


def _path_to_text(schema: pyarrow.Schema, text_field: str) -> list[str]:
    """Return the names that lead to the column `text_field`: one or, as in "data.text", one for each level.

    Raises NoTextColumn if no or several columns have this name, or if it holds no text.
    """
    path = path_of_field(text_field, schema.names)
    found_type = _type_at(schema, path)
    if found_type is not None and _is_text(found_type):
        return path
    found = f"of type {found_type}" if found_type is not None else _several_of(text_field, schema.names)
    raise NoTextColumn(text_field, list(_names_of_columns(schema)), found)


def _several_of(name: str, columns: Sequence[str]) -> str | None:
    """Return what a name stands for that several columns have, as a phrase for the user; None for another name."""
    return f"the name of {columns.count(name)} columns" if columns.count(name) > 1 else None


def _type_at(schema: pyarrow.Schema, path: list[str]) -> pyarrow.DataType | None:
    """Return the type of a column, or of a field within a column; None if no or several columns have this name."""
    found: Any = None
    fields: Iterable[pyarrow.Field] = schema
    for name in path:
        named = [field for field in fields if field.name == name]
        if len(named) != 1:
            return None
        found = named[0].type
        fields = _fields_within(found)
    return found


def _names_of_columns(fields: Iterable[pyarrow.Field], prefix: str = "") -> Iterator[str]:
    """Yield the names of columns; for a column with fields, those of its fields, such as data.text.

    A name of a column that holds no text says so. `prefix` is the name of the outer column, with a dot at its end.
    """
    for field in fields:
        inner = _fields_within(field.type)
        if inner:
            yield from _names_of_columns(inner, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}" if _is_text(field.type) else f"{prefix}{field.name}{_NO_TEXT}"


def _fields_within(column_type: pyarrow.DataType) -> list[pyarrow.Field]:
    return list(column_type) if pyarrow.types.is_struct(column_type) else []


def _is_text(column_type: pyarrow.DataType) -> bool:
    """Return whether a column of this type holds strings, bytes or only nulls."""
    types = pyarrow.types
    if isinstance(column_type, pyarrow.BaseExtensionType):
        return _is_text(column_type.storage_type)
    if types.is_dictionary(column_type) or types.is_run_end_encoded(column_type):
        return _is_text(column_type.value_type)
    return column_type in _TEXT_TYPES


def _as_bytes(column: pyarrow.Array) -> pyarrow.Array:
    """Convert a column of text, in any encoding of Arrow, to an array of bytes, with strings in UTF-8.

    Raises an error of Arrow if the column's offsets are damaged.
    """
    types = pyarrow.types
    if isinstance(column.type, pyarrow.BaseExtensionType):
        return _as_bytes(column.storage)
    if types.is_dictionary(column.type):
        return _as_bytes(column.dictionary).take(column.indices)
    if types.is_run_end_encoded(column.type):
        return _as_bytes(pyarrow.compute.run_end_decode(column))
    # Arrow reads any memory that a damaged file points to, unless the array is checked first. A check of strings would
    # also refuse those that are not UTF-8, of which the documents are counted one by one.
    checked = column.cast(_BINARY_OF_STRINGS.get(column.type, column.type))
    checked.validate(full=True)
    return checked.cast(pyarrow.large_binary())
