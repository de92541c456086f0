"""Every format and compression gives the same documents; damage is named; dirt is counted."""

from __future__ import annotations

import gzip
import io
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from electra_dist.corpus import text_readers
from electra_dist.corpus.text_decoding import RawDocument, SkippedDocument, decode
from electra_dist.corpus.text_readers import DocumentStream, find_inputs
from electra_dist.errors import UserError

TEXTS = ["One line.", "Two lines,\nthe second one.", "na\u00efve \u4e2d\u6587 \U0001f600", "x " * 70_000]
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


def read(path: Path, text_field: str = "text") -> list[str]:
    return [decode(document, text_field) for document in DocumentStream(find_inputs([path]), text_field)]


def json_lines(texts: list[str], field: str = "text") -> bytes:
    return b"".join(json.dumps({"id": 1, field: text}).encode() + b"\n" for text in texts)


def wet(texts: list[str]) -> bytes:
    records = []
    for kind, text in [("warcinfo", "about"), *(("conversion", text) for text in texts), ("metadata", "more")]:
        body = text.encode()
        head = f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Target-URI: http://x/\r\nContent-Length: {len(body)}\r\n\r\n"
        records.append(head.encode() + body + b"\r\n\r\n")
    return b"".join(records)


@pytest.mark.parametrize("ending", COMPRESS)
def test_all_kinds_of_file_give_the_same_documents(tmp_path: Path, ending: str) -> None:
    contents = {
        "a.jsonl": json_lines(TEXTS),
        "b.ndjson": json_lines(TEXTS).rstrip(b"\n"),
        "c.txt": ("\n\n" + " \n\t\n".join(text + "\n" for text in TEXTS)).encode(),
        "d.TXT": "\r\n\r\n".join(text.replace("\n", "\r\n") for text in TEXTS).encode(),
        "e.warc.wet": wet(TEXTS),
    }
    for name, content in contents.items():
        path = tmp_path / (name + ending)
        path.write_bytes(COMPRESS[ending](content))
        assert [text.split() for text in read(path)] == [text.split() for text in TEXTS], name


@given(st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\n", b"\r\n", b" ", b"\t", b"\x0c", b"\xff"]), max_size=60))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_txt_documents_end_at_blank_lines(monkeypatch: pytest.MonkeyPatch, parts: list[bytes]) -> None:
    """However the file is cut into blocks; against a reading line by line."""
    content = b"".join(parts)
    expected, lines = [], []
    for line in [*content.split(b"\n"), b""]:
        if line.strip():
            lines.append(line)
        elif lines:
            expected.append(b"\n".join(lines).strip())
            lines = []
    for size in (1, 3, 1 << 20):
        monkeypatch.setattr(text_readers, "_READ_BYTES", size)
        found = text_readers._read_txt(io.BytesIO(content))  # type: ignore[arg-type]
        assert [document.data for document in found] == expected


@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.large_string(), pyarrow.binary()])
def test_parquet(tmp_path: Path, kind: pyarrow.DataType) -> None:
    cells = [*(text.encode() for text in TEXTS), None]
    table = pyarrow.table({"id": range(5), "body": pyarrow.array(cells, pyarrow.binary()).cast(kind)})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    documents = list(DocumentStream(find_inputs([tmp_path / "a.parquet"]), "body"))
    assert [decode(document) for document in documents[:-1]] == TEXTS
    assert documents[-1] == RawDocument(None, False)
    with pytest.raises(UserError, match=r"no column `text` of text; set --text-field to .*: id, body"):
        read(tmp_path / "a.parquet")
    with pytest.raises(UserError, match="no column `id` of text"):
        read(tmp_path / "a.parquet", "id")


@pytest.mark.parametrize("ending", [".gz", ".xz", ".zst"])
def test_several_compressed_streams_in_one_file(tmp_path: Path, ending: str) -> None:
    """Common Crawl and pigz write one after another."""
    parts = [json_lines(TEXTS[:2]), b"", json_lines(TEXTS[2:])]
    (tmp_path / f"a.jsonl{ending}").write_bytes(b"".join(map(COMPRESS[ending], parts)))
    assert read(tmp_path / f"a.jsonl{ending}") == TEXTS


@pytest.mark.parametrize("ending", [".gz", ".xz", ".zst"])
@pytest.mark.parametrize("keep", [0.3, 0.95])
def test_a_file_that_is_cut_off_is_an_error(tmp_path: Path, ending: str, keep: float) -> None:
    """Never a smaller corpus in silence. zstandard's own reader would not notice."""
    data = COMPRESS[ending](json_lines([str(number) * 50 for number in range(2000)]))
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(UserError, match=r"a\.jsonl.*cannot be read to its end") as error:
        read(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.txt.xz", "a.txt.zst", "a.parquet", "a.wet"])
def test_a_file_of_noise_is_an_error(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"This is no such file.\n" * 10)
    with pytest.raises(UserError, match="cannot be read to its end"):
        read(tmp_path / name)


@pytest.mark.parametrize("missing", [6, 30, 60, 100])  # in the body and in each line of the headers
def test_a_cut_off_wet_record_is_an_error(tmp_path: Path, missing: int) -> None:
    (tmp_path / "a.wet").write_bytes(wet(["some words"])[:-missing])
    with pytest.raises(UserError, match="cut off"):
        read(tmp_path / "a.wet")


@pytest.mark.parametrize(
    ("data", "is_json", "kind"),
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
def test_dirty_documents_are_skipped_by_rule(data: bytes | None, is_json: bool, kind: str) -> None:
    with pytest.raises(SkippedDocument) as skipped:
        decode(RawDocument(data, is_json))
    assert skipped.value.kind == kind


def test_a_byte_order_mark_is_no_text() -> None:
    assert decode(RawDocument(b"\xef\xbb\xbfabc", False)) == "abc"
    assert decode(RawDocument(b'\xef\xbb\xbf{"text": "abc"}', True)) == "abc"


def test_inputs_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ["b.txt", "a/z.jsonl.gz", "a/b/c.parquet", ".hidden.txt", ".git/x.txt", "notes.md", "d.parquet.gz"]:
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"12")
    names = [file.name for file in find_inputs([tmp_path / "in"])]
    assert names == ["a/b/c.parquet", "a/z.jsonl.gz", "b.txt"]
    again = find_inputs([tmp_path / "in/b.txt", tmp_path / "in/a", tmp_path / "in/a/z.jsonl.gz"])
    assert [file.name for file in again] == ["b.txt", "b/c.parquet", "z.jsonl.gz"], (
        "a file that is given twice is read once"
    )
    assert {file.size for file in again} == {2}


def test_inputs_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("x")
    for path, message in [
        (tmp_path / "missing", "no such file or folder"),
        (tmp_path / "page.html", r"unknown kind of file; known: \.txt, \.jsonl"),
        (tmp_path, "no file with a known ending"),
        ("s3://bucket/x.txt", "inputs are local"),
    ]:
        with pytest.raises(UserError, match=message) as error:
            find_inputs([path])
        assert str(path) in str(error.value)
        assert "\n" not in str(error.value)


def test_progress_counts_bytes_of_the_files(tmp_path: Path) -> None:
    for name in ("a.jsonl.gz", "b.jsonl"):
        (tmp_path / name).write_bytes(COMPRESS[name[7:]](json_lines([str(n) for n in range(3000)])))
    files = find_inputs([tmp_path])
    stream = DocumentStream(files)
    seen = [stream.bytes_done for _ in stream]
    assert seen == sorted(seen)
    assert stream.bytes_done == sum(file.size for file in files)
