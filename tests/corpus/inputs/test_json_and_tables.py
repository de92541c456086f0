"""JSON files in all their shapes, CSV, TSV and Markdown: the same texts as the writers were given."""

from __future__ import annotations

import csv
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.compute
import pyarrow.ipc
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from electra_dist.corpus.inputs import json_values
from electra_dist.corpus.inputs.file_kinds import FORMATS
from electra_dist.corpus.inputs.find_inputs import find_inputs, num_with_content, search_inputs
from electra_dist.corpus.inputs.text_decoding import SkippedDocument, decode
from electra_dist.corpus.inputs.text_readers import DocumentStream
from electra_dist.errors import UserError

TEXTS = ['a "quoted" text', "two\nlines, with a comma", "na\u00efve \u4e2d\u6587 \U0001f600", "x " * 70_000, "[1, 2]"]


def texts_of(path: Path, text_field: str = "text") -> list[str]:
    """Return the text of every document of a file or folder."""
    return [decode(document, text_field) for document in DocumentStream(find_inputs([path]), text_field)]


def records(texts: list[str]) -> list[dict[str, Any]]:
    """Return a JSON object for each text, with other fields beside it."""
    return [{"id": number, "meta": {"tags": ["}", "]"]}, "text": text} for number, text in enumerate(texts)]


JSON_WRITERS: dict[str, Callable[[list[dict[str, Any]]], str]] = {
    "lines": lambda values: "\n".join(map(json.dumps, values)),
    "array": json.dumps,
    "indented_array": lambda values: json.dumps(values, indent=2),
    "array_of_one_value_a_line": lambda values: "[\n" + ",\n".join(map(json.dumps, values)) + "\n]\n",
    "indented_values": lambda values: "\n\n".join(json.dumps(value, indent=2) for value in values),
    "utf8_array": lambda values: "\ufeff" + json.dumps(values, ensure_ascii=False),
}


@pytest.mark.parametrize("shape", JSON_WRITERS)
def test_json_files_of_every_shape_give_the_same_texts(tmp_path: Path, shape: str) -> None:
    path = tmp_path / "c4-train.00000-of-01024.json"
    path.write_text(JSON_WRITERS[shape](records(TEXTS)), encoding="utf-8")

    assert texts_of(path) == TEXTS


VALUES = st.lists(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=8)),
        lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
        max_leaves=8,
    ),
    max_size=6,
)


@example(values=[0.0, -1e-7, 12, 1e300], indent=1, ascii_only=False)
@given(values=VALUES, indent=st.sampled_from([None, 1]), ascii_only=st.booleans())
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_the_elements_of_an_array_are_found_whatever_the_size_of_the_blocks_read(
    monkeypatch: pytest.MonkeyPatch, values: list[Any], indent: int | None, ascii_only: bool
) -> None:
    """The independent truth is json.loads of the whole file."""
    data = json.dumps(values, indent=indent, ensure_ascii=ascii_only).encode()

    for block_bytes in (1, 3, 1 << 20):
        monkeypatch.setattr(json_values, "READ_BYTES", block_bytes)
        found = [json.loads(value) for value in json_values.read_json(io.BytesIO(data))]  # type: ignore[arg-type]
        assert found == values


@pytest.mark.parametrize(
    "content",
    [
        b'[{"text": "a"}, {"text": "b',
        b'[{"text": "a"}, ',
        b'[{"text": "a"}] {"text": "b"}',
        b'[{"text": "a"} x]',
        b'{\n"text": "a",\n',
        b"no json",
        b'\xff\xfe[\x00"\x001\x00',
    ],
)
def test_a_json_file_that_is_cut_off_or_no_json_is_an_error_with_its_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)

    with pytest.raises(UserError, match=r"a\.json: cannot be read to its end") as error:
        texts_of(path)
    assert "\n" not in str(error.value)


def test_a_bad_byte_in_an_array_belongs_to_its_record_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b'[{"text": "one"}, {"text": "caf\xe9"}, {"text": "three\n"}, {"text": "four"}]')

    documents = list(DocumentStream(find_inputs([path])))

    assert [document.data for document in documents][1] == b'{"text": "caf\xe9"}'
    assert decode(documents[0]) == "one"
    assert decode(documents[3]) == "four"
    for number, kind in [(1, "undecodable"), (2, "broken_json")]:
        with pytest.raises(SkippedDocument) as skipped:
            decode(documents[number])
        assert skipped.value.kind == kind


def test_csv_gives_the_cells_of_its_column_with_quotes_and_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "body"])
        writer.writerows(enumerate(TEXTS))

    assert texts_of(path, "body") == TEXTS


def test_tsv_has_no_quotes_and_a_row_of_another_number_of_cells_has_no_text(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_bytes(b'label\ttext\r\n1\t"An open quote\r\n\r\n0\n0\tlong "enough"\n0\ta\tb\n1\tcaf\xe9\n')

    documents = [document.data for document in DocumentStream(find_inputs([path]))]

    assert documents == [b'"An open quote', None, b'long "enough"', None, b"caf\xe9"]


@pytest.mark.parametrize("delimiter", [";", "\t", "|"])
def test_csv_with_another_delimiter_gives_the_same_texts(tmp_path: Path, delimiter: str) -> None:
    rows = [["id", "Comment", "text"], ["1", "no, thanks", 'said "two;|\tnights"\nand left'], ["2", "", "a, b"]]
    with (tmp_path / "a.csv").open("w", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows(rows)
    assert texts_of(tmp_path / "a.csv") == [row[2] for row in rows[1:]]
    with pytest.raises(UserError, match=r"set --text-field to the column that holds it: id, Comment, text$"):
        texts_of(tmp_path / "a.csv", text_field="body")


@pytest.mark.parametrize("beginning", ["", "\n", "\r\n  \r\n"])
def test_empty_lines_before_the_names_of_the_columns_are_passed_over(tmp_path: Path, beginning: str) -> None:
    (tmp_path / "a.csv").write_text(beginning + "id,text\n1,one\n", encoding="utf-8-sig", newline="")
    (tmp_path / "b.tsv").write_text(beginning + "id\ttext\n1\ttwo\n", newline="")
    assert texts_of(tmp_path) == ["one", "two"]


@pytest.mark.parametrize("num_empty", [0, 2])
def test_csv_with_a_quote_that_is_not_closed_is_an_error_with_its_line(tmp_path: Path, num_empty: int) -> None:
    path = tmp_path / "a.csv"
    path.write_text("\n" * num_empty + 'text\nfine\n"never closed\nand so on\n')

    with pytest.raises(UserError, match=rf"a\.csv: cannot be read to its end \(line {num_empty + 4} is not CSV"):
        texts_of(path)


def test_a_table_without_the_column_is_refused_if_it_was_given_and_counted_if_it_was_found(tmp_path: Path) -> None:
    table = tmp_path / "about.csv"
    table.write_text("file,size\na.txt,3\n")
    (tmp_path / "a.txt").write_text("one")

    stream = DocumentStream(find_inputs([tmp_path]))
    documents = [document.data for document in stream]

    assert documents == [b"one"]
    assert stream.counts.skipped_names == {"no_text_column": ["about.csv"]}
    assert stream.counts.files[".txt"]["files"] == 1
    with pytest.raises(UserError, match=r"about\.csv: no column `text` of text; set --text-field .*: file, size"):
        texts_of(table)


def test_the_error_for_a_table_without_a_row_of_names_is_short_and_on_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    cells = ['"' + "long\ntext " * 1000 + '"', *map(str, range(50))]
    path.write_text(",".join(cells) + "\n")

    with pytest.raises(UserError, match=r"a\.csv: no column `text` of text; .* 0, 1, .* and 31 more$") as error:
        texts_of(path)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 600


def test_a_file_without_a_byte_is_counted_as_left_out_and_not_read(tmp_path: Path) -> None:
    names = sorted(f"empty{ending}" for ending in (*FORMATS, ".txt.gz", ".jsonl.zst", ".tar.xz"))
    for name in names:
        (tmp_path / name).touch()
    (tmp_path / "good.txt").write_text("one")

    found = search_inputs([tmp_path])
    stream = DocumentStream(found.files)

    assert [document.data for document in stream] == [b"one"]
    assert found.skipped.skipped_names == {"empty_file": names}
    assert num_with_content(found.files) == 1
    assert stream.counts.files == {".txt": {"files": 1, "bytes": 3}}


def test_members_of_an_archive_without_a_byte_are_counted_as_left_out_and_not_read(tmp_path: Path) -> None:
    members = [f"empty{number}{ending}" for number, ending in enumerate(FORMATS) if ending not in (".tar", ".zip")]
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for name in members:
            archive.writestr(name, b"")
        archive.writestr("good.txt", b"one")

    stream = DocumentStream(find_inputs([tmp_path]))

    assert [document.data for document in stream] == [b"one"]
    assert stream.counts.skipped_names == {"empty_file": [f"a.zip: {name}" for name in members]}
    assert stream.counts.members == {".txt": 1}


def test_a_markdown_file_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text("# Title\n\nA paragraph.\n\nAnother.\n")

    assert texts_of(path) == ["# Title\n\nA paragraph.\n\nAnother."]


CELLS = ["one", None, "na\u00efve \u4e2d\u6587 and more than twelve bytes", "one"]
TEXT_COLUMNS = {  # ways in which a column of text is stored
    "string": pyarrow.array(CELLS, pyarrow.string()),
    "large_string": pyarrow.array(CELLS, pyarrow.large_string()),
    "string_view": pyarrow.array(CELLS, pyarrow.string_view()),
    "dictionary": pyarrow.array(CELLS).dictionary_encode(),
    "dictionary_of_large_string": pyarrow.array(CELLS, pyarrow.large_string()).dictionary_encode(),
    "dictionary_of_string_view": pyarrow.DictionaryArray.from_arrays(
        pyarrow.array([0, None, 1, 0]), pyarrow.array([CELLS[0], CELLS[2]], pyarrow.string_view())
    ),
    "binary": pyarrow.array(CELLS).cast(pyarrow.binary()),
    "binary_view": pyarrow.array(CELLS).cast(pyarrow.binary_view()),
    "dictionary_of_binary": pyarrow.array(CELLS).cast(pyarrow.binary()).dictionary_encode(),
    "runs": pyarrow.compute.run_end_encode(pyarrow.array(CELLS)),
    "json": pyarrow.ExtensionArray.from_storage(pyarrow.json_(pyarrow.string()), pyarrow.array(CELLS)),
}
ONLY_IN_ARROW = ("dictionary_of_string_view", "runs")  # parquet cannot hold these


def write_table(table: pyarrow.Table, path: Path) -> Path:
    """Write a table as parquet, as an Arrow file, or (.stream.arrow) as a stream of Arrow; return the path."""
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path)
        return path
    new = pyarrow.ipc.new_stream if path.suffixes[0] == ".stream" else pyarrow.ipc.new_file
    with new(path, table.schema) as out:
        out.write_table(table)
    return path


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, kind)
        for name in ("a.parquet", "a.arrow", "a.stream.arrow")
        for kind in TEXT_COLUMNS
        if name != "a.parquet" or kind not in ONLY_IN_ARROW
    ],
)
def test_a_column_of_text_is_read_however_it_is_stored(tmp_path: Path, name: str, kind: str) -> None:
    """The independent truth is the list of cells from which each column was made; the ids are stored the same way."""
    path = write_table(pyarrow.table({"text": TEXT_COLUMNS[kind], "id": TEXT_COLUMNS[kind]}), tmp_path / name)

    documents = list(DocumentStream(find_inputs([path])))

    assert [document.data for document in documents] == [cell and cell.encode() for cell in CELLS]
    assert [document.id for document in documents] == CELLS


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_column_of_nulls_gives_documents_without_text(tmp_path: Path, name: str) -> None:
    path = write_table(pyarrow.table({"text": pyarrow.nulls(3)}), tmp_path / name)

    assert [document.data for document in DocumentStream(find_inputs([path]))] == [None] * 3


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
@pytest.mark.parametrize(
    ("column", "named"),
    [
        (pyarrow.array([["a"]]), r"list<\w+: string>"),
        (pyarrow.array([1.5]), "double"),
        (pyarrow.array([{"en": "a"}]), "struct<en: string>"),
        (pyarrow.array([1]).dictionary_encode(), "(dictionary<values=)?int64"),
        (pyarrow.array([b"ab"], pyarrow.binary(2)), r"fixed_size_binary\[2\]"),
    ],
)
def test_a_column_of_another_type_is_refused_with_its_type(
    tmp_path: Path, name: str, column: pyarrow.Array, named: str
) -> None:
    path = write_table(pyarrow.table({"text": column, "body": ["a"]}), tmp_path / name)

    message = rf"no column `text` of text \(it is of type {named}.*\); .*: text(\.en| \(no text\)), body$"
    with pytest.raises(UserError, match=message):
        texts_of(path)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_fields_within_fields_that_are_not_utf8_are_left_out_and_the_text_stays_as_it_is(
    tmp_path: Path, name: str
) -> None:
    def strings(*values: bytes | None) -> pyarrow.Array:
        array = pyarrow.array(values, pyarrow.binary())
        return pyarrow.Array.from_buffers(pyarrow.string(), len(array), array.buffers())

    tags = pyarrow.ListArray.from_arrays(pyarrow.array([0, 2, 3], pyarrow.int32()), strings(b"caf\xe9", b"x", b"y"))
    columns = [strings(b"caf\xe9", b"tea"), strings(b"caf\xe9", b"ok"), tags]
    data = pyarrow.StructArray.from_arrays(columns, ["text", "title", "tags"])
    path = write_table(pyarrow.table({"data": data, "n": [1, 2]}), tmp_path / name)
    documents = [*DocumentStream(find_inputs([path]), "data.text", with_fields=True)]
    assert [document.data for document in documents] == [b"caf\xe9", b"tea"]
    assert [document.fields for document in documents] == [
        {"data": {"title": None, "tags": [None, "x"]}, "n": 1},
        {"data": {"title": "ok", "tags": ["y"]}, "n": 2},
    ]


def test_a_name_that_two_columns_have_is_refused(tmp_path: Path) -> None:
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"])
    paths = [write_table(table, tmp_path / "a.parquet"), tmp_path / "b.csv", tmp_path / "c.tsv"]
    paths[1].write_text("text,n,text\na,1,b\n")
    paths[2].write_text("text\ttext\na\tb\n")

    for path in paths:
        with pytest.raises(UserError, match=r"no column `text` of text \(it is the name of 2 columns\)"):
            texts_of(path)


@pytest.mark.parametrize(
    ("kind", "place", "value"),
    [
        (pyarrow.string(), 4, 1 << 30),  # the end of the first string
        (pyarrow.string_view(), 8, 99),  # the number of the buffer that holds the first string
    ],
)
def test_an_arrow_file_whose_cells_point_outside_of_it_is_an_error_with_its_name(
    tmp_path: Path, kind: pyarrow.DataType, place: int, value: int
) -> None:
    """Arrow itself would read memory that is not the file's, and die."""
    _, places, *data = pyarrow.array(["a text of more than twelve bytes"] * 2, kind).buffers()
    bad_places = bytearray(places.to_pybytes())
    bad_places[place : place + 4] = value.to_bytes(4, "little")
    bad = pyarrow.Array.from_buffers(kind, 2, [None, pyarrow.py_buffer(bytes(bad_places)), *data])
    path = write_table(pyarrow.table({"text": bad}), tmp_path / "a.stream.arrow")

    with pytest.raises(UserError, match=r"a\.stream\.arrow: cannot be read to its end"):
        texts_of(path)
