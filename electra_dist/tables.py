"""Read tables of users, for fine-tuning and evaluations: lines of text, JSON objects, tables, and the text in these.

Guarantee: a value becomes a text, a label or an id only if it is text, or for labels and ids a number. Values of other
types (null, booleans, lists, objects, NaN) are refused, and so is half of a surrogate pair, which no tokenizer takes:
none of them becomes a word such as "None". Errors name the file and the line or, in a file of Arrow, the row. Text is
UTF-8, or UTF-16 with a byte order mark.

A table is a .tsv file, which is split at tabs only because GLUE contains unbalanced quotes, a .csv file with quotes
as in RFC 4180, a .jsonl file, a .parquet file, or a folder of `datasets.save_to_disk`. The delimiter of a .csv file is
the one of , ; | and the tab that gives its header most columns. Where Arrow files say the names of a column's classes,
as those of the library datasets do, the names take the place of the numbers. The columns of text and label are found
by usual titles, or else by their values.
"""

from __future__ import annotations

import codecs
import csv
import hashlib
import io
import itertools
import json
import math
import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from electra_dist.errors import StoreMissing, UserError
from electra_dist.store.atomic_files import MOST_DATA_BYTES, did_you_mean, read_regular, readable
from electra_dist.store.json_file import DamagedJson, parse_json_object

if TYPE_CHECKING:
    import pyarrow as pa

Column = str | int  # name in the header of a file, or index (from 0) in a file without a header

TABLE_SUFFIXES = (".tsv", ".csv", ".jsonl", ".parquet")
SAVED_STATE = "state.json"  # of a dataset that `datasets.save_to_disk` has written
_SPREADSHEETS = (".xlsx", ".xls", ".xlsm", ".ods")
_BINARY_FILES = {  # first bytes -> what such a file is
    b"PK\x03\x04": "a spreadsheet or a .zip file",
    b"\xd0\xcf\x11\xe0": "an old spreadsheet",
    b"PAR1": "a .parquet file",
    b"\x1f\x8b": "a .gz file",
    b"\x28\xb5\x2f\xfd": "a .zst file",
}
_DELIMITERS = (",", ";", "\t", "|")
_ROWS_OF_SAMPLE = 1000  # lines by which the columns are found
_TEXT_TITLES = [
    "text",
    "sentence",
    "content",
    "review",
    "comment",
    "tweet",
    "document",
    "body",
    "message",
    "utterance",
]
_LABEL_TITLES = ["label", "labels", "class", "category", "target", "intent", "sentiment"]

_LINE_END = re.compile(r"(?<!\r)\r*\n|\r")  # a search begins at the first of several \r, so that it stays linear
_MAX_SHOWN_CHARS = 40  # of a value in an error message
_MAX_SHOWN_PLACES = 5  # lines or rows in a message


class NotText(ValueError):
    """Error for a JSON value that is not text; its message shows the value or tells its fault."""


class JsonLine(NamedTuple):
    """JSON object in one line of a file, or line of a table; every error about its values names the file and the line.

    In a table without header, the keys are the numbers of the columns, from 0.
    """

    place: str  # FILE:LINE
    record: dict[Any, Any]

    def text(self, key: Column) -> str:
        """Return the text under `key`; raise UserError if the value is not text."""
        try:
            return as_text(self.record[key])
        except NotText as error:
            raise UserError(
                f"{self.place}: the value of `{key}` is no text, but {error}; write a text in quotes, or remove the "
                f"line"
            ) from None

    def name(self, key: Column) -> str:
        """Return the label or id under `key` as text; raise UserError if the value is neither text nor a number."""
        try:
            return as_name(self.record[key])
        except NotText as error:
            raise UserError(
                f"{self.place}: the value of `{key}` is neither text nor a number, but {error}; write a text in "
                f"quotes or a number, or remove the line"
            ) from None


def split_lines(data: bytes, file: Path) -> list[str]:
    """Return the lines of a file, without line ends and byte order mark; `data` is the content of `file`.

    A line ends at a line feed, a carriage return, or both together, as when Python opens a text file. Other
    separators, such as U+2028, end no line. Raises UserError, which names `file`, if `data` has another encoding.
    """
    return _LINE_END.split(_decode(data, file))


def _decode(data: bytes, file: Path) -> str:
    is_utf_16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) and not data.startswith(
        (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)
    )
    try:
        return data.decode("utf-16" if is_utf_16 else "utf-8-sig")
    except UnicodeDecodeError as error:
        if is_utf_16:
            reason = f": not UTF-16, as its first bytes say (byte {error.start}); convert the file to UTF-8"
        else:
            reason = _not_utf_8(data, file, error.start)
        raise UserError(f"{file}{reason}") from None


def _not_utf_8(data: bytes, file: Path, start: int) -> str:
    """Return which lines of a file are not UTF-8, the first at byte `start`, and what to do about them.

    Of a file that is no text, return what it is.
    """
    for beginning, what in _BINARY_FILES.items():
        if data.startswith(beginning):
            return f": {what}, going by its first bytes, whatever its name is; convert it to text in UTF-8"
    lines = re.split(_LINE_END.pattern.encode(), data)
    wrong = [number for number, line in enumerate(lines, 1) if not line.isascii() and not _is_utf_8(line)]
    lines_text = "1 line" if len(wrong) == 1 else f"{len(wrong):,} lines"
    reason = f":{wrong[0]}: not UTF-8 (byte {start}; in all {lines_text})"
    if not data.decode("utf-8", "ignore").isascii():
        # A conversion of the whole file would turn its letters that are UTF-8 into others, without an error.
        return (
            f"{reason}, but other letters of the file are; write {list_places(wrong, 'line')} again as UTF-8 in an "
            f"editor, and do not convert the whole file"
        )
    command = f"iconv -f WINDOWS-1252 -t UTF-8 {shlex.quote(str(file))} > NEW{file.suffix}"
    return f"{reason}; convert the file to UTF-8, such as a file of Western Windows by: {command}"


def _is_utf_8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def list_places(places: Sequence[int], unit: str) -> str:
    """Return the first five of some numbers after their unit: "line 2, 3, 5, 8, 9, ..."."""
    shown = ", ".join(map(str, places[:_MAX_SHOWN_PLACES]))
    return f"{unit} {shown}" + (", ..." if len(places) > _MAX_SHOWN_PLACES else "")


def parse_json_line(file: Path, number: int, line: str) -> JsonLine:
    """Parse one line of a file as a JSON object; raise UserError, which names file and line `number`, if it is not."""
    try:
        return JsonLine(f"{file}:{number}", parse_json_object(line))
    except DamagedJson as error:
        raise UserError(f"{file}:{number}: not a JSON object ({error}); write one object per line") from None


def as_text(value: object) -> str:
    """Return a JSON value if it is text; raise NotText if it has another type or contains half of a surrogate pair."""
    if not isinstance(value, str):
        shown = json.dumps(value, default=str)
        raise NotText(shown if len(shown) <= _MAX_SHOWN_CHARS else f"{shown[:_MAX_SHOWN_CHARS]}...")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        half = ord(value[error.start])
        raise NotText(f"has half of a surrogate pair, \\u{half:04x}, at character {error.start}") from None
    return value


def as_name(value: object) -> str:
    """Convert a JSON value to a label or an id: text stays as it is, and a finite number is written as Python does.

    Raises NotText for any other value.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return str(value) if is_number else as_text(value)


class Table(NamedTuple):
    """Table in memory: the names of its columns, and a function that yields its lines, parsed one by one."""

    file: Path
    columns: list[str]
    lines: Callable[[], Iterator[tuple[int, JsonLine]]]  # each line that is not blank, with its number from 1
    sha256: str  # of the bytes, and of a delimiter that does not follow from them and the kind of table
    may_be_short: bool = False  # whether a line may have fewer columns than the header, as in .tsv files


def read_table(file: Path, delimiter: str | None = None, has_header: bool = True) -> Table:
    """Read a table; the ending of its name decides the format.

    If `delimiter` is given, the file is read as .csv, except if it is .jsonl or in Arrow's format. Without a header, a
    file of any name is read as .tsv. Raises UserError if the file is missing or does not have the format.
    """
    suffix = file.suffix.lower()
    if delimiter == "\\t":
        delimiter = "\t"
    if has_header and delimiter is None and file.is_file() and suffix not in TABLE_SUFFIXES:
        refuse_spreadsheet(file)
        raise UserError(
            f"{file}: no table, going by its name; convert it to a {', '.join(TABLE_SUFFIXES)} file, or pass the "
            f"--delimiter of its columns"
        )
    try:
        with readable(file):
            if file.is_dir():
                return _read_saved_dataset(file)
            raw = read_regular(file, MOST_DATA_BYTES)
    except StoreMissing:
        raise UserError(f"{file}: no such file{did_you_mean(file)}; name a {', '.join(TABLE_SUFFIXES)} file") from None
    if suffix == ".parquet":
        return _arrow_table(file, [raw], hashlib.sha256(raw).hexdigest())
    if suffix == ".jsonl":
        return _json_table(file, raw)
    if suffix == ".csv" or delimiter is not None:
        return csv_table(file, raw, delimiter)
    return _tsv_table(file, raw, has_header)


def csv_table(file: Path, raw: bytes, delimiter: str | None) -> Table:
    """Parse a table with quotes, `raw`, which is the content of `file`; None: find the delimiter in the header."""
    text = _decode(raw, file)
    first_line = next((line for line in _LINE_END.split(text) if line.strip()), "")
    found = delimiter_of(first_line)
    chosen = delimiter or found
    _, header_cells = next(_csv_cells(file, text, chosen), (0, []))
    header = [name.strip() for name in header_cells]
    digest = hashlib.sha256(raw)
    # The same bytes would give other texts with the delimiter of the header or, split at tabs, as a .tsv file.
    if chosen != found or chosen == "\t":
        digest.update(f"\n, quoted and separated by {chosen!r}".encode())
    return Table(file, header, lambda: _csv_lines(file, text, chosen, header), digest.hexdigest())


def refuse_spreadsheet(file: Path) -> None:
    """Raise UserError, which says how to convert it, if the ending of a file's name is that of a spreadsheet."""
    if file.suffix.lower() in _SPREADSHEETS:
        raise UserError(
            f"{file}: a spreadsheet, which is not read; save it as CSV UTF-8 in its program, and name the .csv file"
        )


def check_name_once(file: Path, column: Column, columns: Sequence[str]) -> None:
    """Raise UserError, which names `file`, if the name `column` occurs more than once in `columns`."""
    if columns.count(str(column)) > 1:
        raise UserError(f"{file}: two columns have the name `{column}`; rename or remove one of them")


def _json_table(file: Path, raw: bytes) -> Table:
    lines = [(number, line) for number, line in enumerate(split_lines(raw, file), 1) if line.strip()]
    first_lines = itertools.islice(_json_lines(file, lines), 1)
    columns = [str(key) for _, line in first_lines for key in line.record]
    return Table(file, columns, lambda: _json_lines(file, lines), hashlib.sha256(raw).hexdigest())


def _json_lines(file: Path, lines: list[tuple[int, str]]) -> Iterator[tuple[int, JsonLine]]:
    for number, line in lines:
        yield number, parse_json_line(file, number, line)


def _tsv_table(file: Path, raw: bytes, has_header: bool) -> Table:
    # A line of tabs is a row of empty cells in a file that is known to be a table.
    white_space = " " if has_header and file.suffix.lower() == ".tsv" else None
    lines = [(number, line) for number, line in enumerate(split_lines(raw, file), 1) if line.strip(white_space)]
    header = [name.strip() for name in lines[0][1].split("\t")] if has_header and lines else []
    digest = hashlib.sha256(raw).hexdigest()
    return Table(file, header, lambda: _tsv_lines(file, lines, header), digest, may_be_short=True)


def _tsv_lines(file: Path, lines: list[tuple[int, str]], header: list[str]) -> Iterator[tuple[int, JsonLine]]:
    """Yield the lines after the header, split at tabs; refuse text beyond its columns: a tab has shifted the cells."""
    for number, line in lines[1:] if header else lines:
        cells = line.split("\t")
        if header and any(cell.strip() for cell in cells[len(header) :]):
            raise UserError(
                f"{file}:{number}: {len(cells)} columns where the header has {len(header)}; replace the tabs within "
                f"texts by spaces, or use a .jsonl file"
            )
        titles: list[Any] = header or list(range(len(cells)))
        yield number, JsonLine(f"{file}:{number}", dict(zip(titles, cells)))


def delimiter_of(header_line: str, column: str | None = None) -> str:
    """Return the delimiter of a CSV file: the first of , ; tab and | with which its header names `column`.

    If there is none, or `column` is None, it is the one that gives the header most columns.
    """

    def cells(delimiter: str) -> list[str]:
        return next(csv.reader([header_line], delimiter=delimiter), [])

    with_column = [delimiter for delimiter in _DELIMITERS if column in cells(delimiter)]
    return with_column[0] if with_column else max(_DELIMITERS, key=lambda delimiter: len(cells(delimiter)))


def _csv_cells(file: Path, text: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the cells of each record from the header on, with the number of the record's first line.

    Blank lines are left out. A record of empty cells is kept, so that the rows after it keep their places.
    """
    csv.field_size_limit(sys.maxsize)
    try:
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    except TypeError:
        raise UserError(f"--delimiter {delimiter}: one character is needed, such as --delimiter ';'") from None
    number = 1
    has_header = False
    try:
        for cells in reader:
            is_blank_line = len(cells) < 2 and cells != [""] and not "".join(cells).strip(" \t")
            if any(cell.strip() for cell in cells) or (has_header and not is_blank_line):
                yield number, cells
                has_header = True
            number = reader.line_num + 1
    except csv.Error as error:
        raise UserError(
            f"{file}:{number}: not a line of a .csv file ({error}); put texts with quotes in them in quotes, and "
            f"double the quotes within"
        ) from None


def _csv_lines(file: Path, text: str, delimiter: str, header: list[str]) -> Iterator[tuple[int, JsonLine]]:
    for number, cells in itertools.islice(_csv_cells(file, text, delimiter), 1, None):
        if len(cells) != len(header):
            raise UserError(
                f"{file}:{number}: {len(cells)} columns where the header has {len(header)}, separated by "
                f"`{delimiter}`; put texts that contain it in quotes, or pass another --delimiter"
            )
        yield number, JsonLine(f"{file}:{number}", dict(zip(header, cells)))


def _read_saved_dataset(folder: Path) -> Table:
    """Read a folder of `datasets.save_to_disk`: its Arrow files, in the order in which its state.json lists them."""
    try:
        state = parse_json_object(read_regular(folder / SAVED_STATE))
        names = [entry["filename"] for entry in state["_data_files"]]
        if state.get("_indices_files") or state.get("_indices_data_files"):
            raise UserError(
                f"{folder}: a selection of rows that an old version of datasets has written; save it again after "
                f"flatten_indices()"
            )
        parts = [read_regular(folder / Path(name).name, MOST_DATA_BYTES) for name in names]
    except (FileNotFoundError, DamagedJson, KeyError, TypeError):
        raise UserError(
            f"{folder}: no table; name a {', '.join(TABLE_SUFFIXES)} file, or a folder of datasets.save_to_disk "
            f"with its {SAVED_STATE} and all its .arrow files"
        ) from None
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return _arrow_table(folder, parts, digest.hexdigest())


def _arrow_table(file: Path, parts: list[bytes], digest: str) -> Table:
    """Return the table in `parts`: the content of one .parquet file, or the Arrow streams of a saved dataset."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if file.suffix.lower() == ".parquet":
            names = pq.read_schema(pa.BufferReader(parts[0])).names
            for name in names:
                check_name_once(file, name, names)
            table = pq.read_table(pa.BufferReader(parts[0]), use_threads=False)
        else:
            table = pa.concat_tables([pa.ipc.open_stream(part).read_all() for part in parts])
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{file}: not readable as a table of Arrow ({reason}); copy or write it again") from None
    return Table(file, table.column_names, lambda: _arrow_lines(file, table), digest)


def _arrow_lines(file: Path, table: pa.Table) -> Iterator[tuple[int, JsonLine]]:
    """Yield each row with its number, from 1; the number of a class label is replaced by the label's name."""
    names_of = _class_names(table.schema)
    number = 0
    for batch in table.to_batches(max_chunksize=1024):
        for record in batch.to_pylist():
            number += 1
            for column, names in names_of.items():
                value = record.get(column)
                if isinstance(value, int) and 0 <= value < len(names):
                    record[column] = names[value]
            yield number, JsonLine(f"{file}:{number}", record)


def _class_names(schema: pa.Schema) -> dict[str, list[str]]:
    """Return column -> names of its class labels, as far as the library datasets has written them into the file."""
    try:
        features = parse_json_object((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {
            column: [str(name) for name in feature["names"]]
            for column, feature in features.items()
            if isinstance(feature, dict) and feature.get("_type") == "ClassLabel"
        }
    except (DamagedJson, KeyError, TypeError, AttributeError):
        return {}


def find_columns(
    table: Table, text_a: Column, text_b: Column | None, label: Column, is_regression: bool
) -> tuple[Column, Column]:
    """Return the columns of text and label; a given name is kept, and for "" the only candidate is found.

    Columns with a usual title are candidates. If there are none, any column of repeating values may be the label (of a
    regression: any column of numbers), and any column of mostly several words the text. Raises UserError if there is
    not exactly one candidate.
    """
    taken = (text_a, text_b, label)
    if len(table.columns) == 1:
        raise UserError(
            f"{table.file}: only one column, `{table.columns[0][:40]}`, where texts and labels are needed; if another "
            "character separates the columns, pass it as --delimiter"
        )
    if label == "":
        free = [column for column in table.columns if column not in taken]
        label = _find_label_column(table, free, is_regression)
    return text_a or find_text_column(table, [*taken, label]), label


def _find_label_column(table: Table, free: Sequence[str], is_regression: bool) -> str:
    """Return the column of the label among the columns `free`, by its title or else by its values."""
    found = [column for column in free if column.lower() in _LABEL_TITLES]
    if not found:
        fits = _are_numbers if is_regression else _repeat
        others = [column for column in free if column.lower() not in _TEXT_TITLES]
        found = [column for column in others if fits(_sample(table, column))]
        if len(found) == 1 and found[0] in _sample(table, found[0]):
            raise UserError(
                f"{table.file}: the first line seems to hold an example, `{found[0]}` being a label further down; "
                "put a line before it with the names of the columns, such as text and label"
            )
    return _only_candidate(table, found, "label", "--label")


def find_text_column(table: Table, taken: Collection[Column | None]) -> str:
    """Return the only column of texts that is not in `taken`; raise UserError if there is not exactly one."""
    free = [column for column in table.columns if column not in taken]
    found = [column for column in free if column.lower() in _TEXT_TITLES]
    found = found or [column for column in free if _have_words(_sample(table, column))]
    found = found or (free if len(free) == 1 else [])
    return _only_candidate(table, found, "text", "--text-a (and --text-b for pairs)")


def _sample(table: Table, column: str) -> list[str]:
    lines = itertools.islice(table.lines(), _ROWS_OF_SAMPLE)
    return [str(line.record[column]) for _, line in lines if column in line.record]


def _only_candidate(table: Table, found: Sequence[str], what: str, option: str) -> str:
    if not table.columns:
        raise UserError(f"{table.file}: is empty; its first line must name the columns")
    if len(set(found)) == 1:
        return found[0]
    which = f"{' and '.join(found)} may each be the {what}" if found else f"no column is clearly the {what}"
    raise UserError(f"{table.file}: {which}; name one of {', '.join(table.columns)} with {option}")


def _repeat(values: list[str]) -> bool:
    return 0 < len(set(values)) <= len(values) / 2


def number_in(text: str) -> float:
    """Return a text as a number; NaN if it is none. Python alone would read 2019_12 as 201912."""
    try:
        return math.nan if "_" in text else float(text)
    except ValueError:
        return math.nan


def is_number(text: str) -> bool:
    """Return whether a text is a finite number."""
    return math.isfinite(number_in(text))


def _are_numbers(values: list[str]) -> bool:
    return all(map(is_number, values))


def _have_words(values: list[str]) -> bool:
    return sum(" " in value.strip() for value in values) > len(values) / 2
