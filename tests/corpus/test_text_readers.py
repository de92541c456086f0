"""Reading of documents: equal for every format and compression; damaged files are errors, unusable documents skips."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import zipfile
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from electra_dist.corpus.inputs import text_readers
from electra_dist.corpus.inputs.find_inputs import find_inputs
from electra_dist.corpus.inputs.text_decoding import RawDocument, SkippedDocument, decode
from electra_dist.corpus.inputs.text_readers import DocumentStream
from electra_dist.errors import UserError

TEXTS = ["One line.", "Two lines,\nthe second one.", "na\u00efve \u4e2d\u6587 \U0001f600", "x " * 70_000]
COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {  # by the ending of the file name
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


def texts_of_file(path: Path, text_field: str = "text") -> list[str]:
    """Return the text of every document of a file."""
    return [decode(document, text_field) for document in DocumentStream(find_inputs([path]), text_field)]


def json_lines(texts: list[str], field: str = "text") -> bytes:
    """Return a JSON-lines file with one text a line."""
    lines = [json.dumps({"id": 1, field: text}).encode() + b"\n" for text in texts]
    return b"".join(lines)


def wet_file(texts: list[str]) -> bytes:
    """Return a WET file of Common Crawl: a record of type `conversion` for each text, between two of other types."""
    typed_texts = [("warcinfo", "about")]
    typed_texts += [("conversion", text) for text in texts]
    typed_texts += [("metadata", "more")]
    records = []
    for record_type, text in typed_texts:
        body = text.encode()
        header = (
            "WARC/1.0\r\n"
            f"WARC-Type: {record_type}\r\n"
            "WARC-Target-URI: http://x/\r\n"
            f"Content-Length: {len(body)}\r\n"
            "\r\n"
        )
        records.append(header.encode() + body + b"\r\n\r\n")
    return b"".join(records)


@pytest.mark.parametrize("ending", COMPRESSORS)
def test_all_file_formats_and_compressions_give_the_same_documents(tmp_path: Path, ending: str) -> None:
    """Only words are compared, because readers of .txt strip the documents and keep the line ends of Windows."""
    words_of_texts = [text.split() for text in TEXTS]
    paragraphs = "\n\n" + " \n\t\n".join(text + "\n" for text in TEXTS)
    windows_paragraphs = "\r\n\r\n".join(text.replace("\n", "\r\n") for text in TEXTS)
    contents = {
        "a.jsonl": json_lines(TEXTS),
        "b.ndjson": json_lines(TEXTS).rstrip(b"\n"),
        "c.txt": paragraphs.encode(),
        "d.TXT": windows_paragraphs.encode(),
        "e.warc.wet": wet_file(TEXTS),
    }
    compress = COMPRESSORS[ending]

    for name, content in contents.items():
        path = tmp_path / (name + ending)
        path.write_bytes(compress(content))
        assert [text.split() for text in texts_of_file(path)] == words_of_texts, name


@given(st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\n", b"\r\n", b" ", b"\t", b"\x0c", b"\xff"]), max_size=60))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_documents_of_a_txt_file_end_at_blank_lines_whatever_the_size_of_the_blocks_read(
    monkeypatch: pytest.MonkeyPatch, parts: list[bytes]
) -> None:
    """The independent truth splits the whole content into lines. A line of white space only counts as blank."""
    content = b"".join(parts)
    expected_documents = []
    lines_of_document: list[bytes] = []
    for line in [*content.split(b"\n"), b""]:
        if line.strip():
            lines_of_document.append(line)
        elif lines_of_document:
            expected_documents.append(b"\n".join(lines_of_document).strip())
            lines_of_document = []

    for block_bytes in (1, 3, 1 << 20):
        monkeypatch.setattr(text_readers, "READ_BYTES", block_bytes)
        documents = text_readers._read_txt(io.BytesIO(content))  # type: ignore[arg-type]
        assert [document.data for document in documents] == expected_documents


@pytest.mark.parametrize("column_type", [pyarrow.string(), pyarrow.large_string(), pyarrow.binary()])
def test_parquet_gives_the_documents_of_a_text_column_and_refuses_other_columns(
    tmp_path: Path, column_type: pyarrow.DataType
) -> None:
    """A null becomes a document without data, which is counted as skipped later."""
    path = tmp_path / "a.parquet"
    cells = [*(text.encode() for text in TEXTS), None]
    column = pyarrow.array(cells, pyarrow.binary()).cast(column_type)
    table = pyarrow.table({"id": range(5), "body": column})
    pyarrow.parquet.write_table(table, path, row_group_size=2)

    documents = list(DocumentStream(find_inputs([path]), "body"))

    *text_documents, null_document = documents
    assert [decode(document) for document in text_documents] == TEXTS
    assert (null_document.data, null_document.is_json) == (None, False)
    with pytest.raises(UserError, match=r"no column `text` of text; set --text-field to .*: id \(no text\), body$"):
        texts_of_file(path)
    with pytest.raises(UserError, match="no column `id` of text"):
        texts_of_file(path, "id")


@pytest.mark.parametrize("ending", [".gz", ".bz2", ".xz", ".zst"])
def test_all_compressed_streams_of_a_file_are_read(tmp_path: Path, ending: str) -> None:
    """Common Crawl and pigz write several streams one after another; one of them is empty in this test."""
    compress = COMPRESSORS[ending]
    path = tmp_path / f"a.jsonl{ending}"
    parts = [json_lines(TEXTS[:2]), b"", json_lines(TEXTS[2:])]
    streams = [compress(part) for part in parts]
    path.write_bytes(b"".join(streams))

    assert texts_of_file(path) == TEXTS


@pytest.mark.parametrize("ending", [".gz", ".bz2", ".xz", ".zst"])
@pytest.mark.parametrize("kept_share", [0.3, 0.95])
def test_a_truncated_compressed_file_is_an_error(tmp_path: Path, ending: str, kept_share: float) -> None:
    """A truncated file must never give a smaller corpus silently. The reader of zstandard would not notice it."""
    compress = COMPRESSORS[ending]
    data = compress(json_lines([str(number) * 50 for number in range(2000)]))
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes(data[: int(len(data) * kept_share)])

    with pytest.raises(UserError, match=r"a\.jsonl.*cannot be read to its end") as error:
        texts_of_file(path)

    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.txt.xz", "a.txt.zst", "a.parquet", "a.wet"])
def test_a_file_whose_content_is_not_of_its_format_is_an_error(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"This is no such file.\n" * 10)

    with pytest.raises(UserError, match="cannot be read to its end"):
        texts_of_file(path)


@pytest.mark.parametrize("missing_bytes", [6, 30, 60, 100])  # in the body and in each line of the headers
def test_a_truncated_wet_record_is_an_error(tmp_path: Path, missing_bytes: int) -> None:
    path = tmp_path / "a.wet"
    path.write_bytes(wet_file(["some words"])[:-missing_bytes])

    with pytest.raises(UserError, match="cut off"):
        texts_of_file(path)


@pytest.mark.parametrize(
    ("data", "is_json", "reason"),
    [
        (b"caf\xe9", False, "undecodable"),
        (b'{"text": "caf\xe9"}', True, "undecodable"),
        (b'{"text": "half \\ud83d"}', True, "undecodable"),
        (b"\xff\xfea\x00b\x00", False, "undecodable"),
        (b"\n", True, "empty"),
        (b" \t\xc2\xa0", False, "empty"),
        (b'{"text": " \\n"}', True, "empty"),
        (b'{"text": "cut o', True, "broken_json"),
        (b"[1]", True, "broken_json"),
        (b"12", True, "broken_json"),
        (b"[" * 100_000, True, "broken_json"),
        (b"{}", True, "no_text"),
        (b'{"text": null}', True, "no_text"),
        (b'{"text": ["a"]}', True, "no_text"),
        (None, False, "no_text"),
    ],
)
def test_an_unusable_document_is_skipped_with_the_reason(data: bytes | None, is_json: bool, reason: str) -> None:
    with pytest.raises(SkippedDocument) as skipped:
        decode(RawDocument(data, is_json))

    assert skipped.value.kind == reason


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_a_file_to_which_something_is_added_while_it_is_read_is_refused(tmp_path: Path, name: str) -> None:
    """Its name and size tell later what a corpus was built from."""
    path = tmp_path / name
    path.write_text('text\n{"text": "one"}\n')
    files = find_inputs([path])

    documents = iter(DocumentStream(files))
    next(documents)
    with path.open("a") as out:
        out.write('{"text": "two"}\n')

    with pytest.raises(UserError, match=rf"{name}: has 37 bytes, but had 21 when the inputs were listed; run the"):
        list(documents)


def test_a_byte_order_mark_at_the_start_of_a_document_is_dropped() -> None:
    assert decode(RawDocument(b"\xef\xbb\xbfabc", False)) == "abc"
    assert decode(RawDocument(b'\xef\xbb\xbf{"text": "abc"}', True)) == "abc"


def test_inputs_are_found_in_the_order_of_their_names_and_each_file_once(tmp_path: Path) -> None:
    """Hidden files, and files with an unknown ending, are left out of a folder, and counted."""
    folder = tmp_path / "in"
    content = b"12"
    for name in ["b.txt", "a/z.jsonl.gz", "a/b/c.parquet", ".hidden.txt", ".git/x.txt", "notes.html", "d.parquet.gz"]:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    files_of_folder = find_inputs([folder])
    files_of_list = find_inputs([folder / "b.txt", folder / "a", folder / "a/z.jsonl.gz"])

    assert [file.name for file in files_of_folder] == ["a/b/c.parquet", "a/z.jsonl.gz", "b.txt"]
    names_of_list = [file.name for file in files_of_list]
    assert names_of_list == ["b.txt", "b/c.parquet", "z.jsonl.gz"], "a file that is given twice is read once"
    assert {file.size for file in files_of_list} == {len(content)}


def test_inputs_that_cannot_be_read_are_refused_by_an_error_of_one_line_with_their_path(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("x")
    cases = [
        (tmp_path / "missing", "no such file or folder"),
        (tmp_path / "page.html", r"holds web pages, not text; extract the text with"),
        (tmp_path, "no file with a known ending"),
        ("unheard-of://bucket/x.txt", "unknown kind of storage"),
    ]

    for path, message in cases:
        with pytest.raises(UserError, match=message) as error:
            find_inputs([path])
        assert str(path) in str(error.value)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf16_text_with_a_byte_order_mark_gives_the_documents_of_the_same_text_in_utf8(
    tmp_path: Path, encoding: str
) -> None:
    text = "Z\u00fcrich \U0001d11e\n\nsecond \u4e2d"
    contents = {
        "a.txt": text,
        "b.md": text,
        "c.jsonl": '{"text": "\u4e2d"}\n{"text": "b"}\n',
        "d.json": '[{"text": "\u4e2d"}, {"text": "b"}]',
        "e.csv": 'text,n\n"one\u4e2d, two",1\n',
        "f.tsv": "text\tn\none\u4e2d\t1\n",
    }
    folders = {name: tmp_path / name for name in ("utf8", "utf16")}
    for folder in folders.values():
        folder.mkdir()
    for name, content in contents.items():
        (folders["utf8"] / name).write_bytes(content.encode())
        (folders["utf16"] / name).write_bytes(f"\ufeff{content}".encode(encoding))
    (folders["utf8"] / "g.txt.gz").write_bytes(gzip.compress(text.encode()))
    (folders["utf16"] / "g.txt.gz").write_bytes(gzip.compress(f"\ufeff{text}".encode(encoding)))
    for folder in folders.values():
        with zipfile.ZipFile(folder / "h.zip", "w") as archive:
            archive.write(folder / "a.txt", "a.txt")

    found = {name: [decode(document) for document in DocumentStream(find_inputs([folders[name]]))] for name in folders}

    assert found["utf16"] == found["utf8"]
    (folders["utf16"] / "a.txt").write_bytes("\ufefftext".encode(encoding)[:-1])
    with pytest.raises(UserError, match=r"a\.txt: cannot be read to its end \(the UTF-16 text is cut off"):
        list(DocumentStream(find_inputs([folders["utf16"] / "a.txt"])))
