"""Writes raw text in every format and compression that `electra-dist corpus build` reads, for tests of whole ways."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow
import pyarrow.parquet
import webdataset
import zstandard

Texts = Sequence[str]


def _txt(texts: Texts) -> bytes:
    return "\n\n".join(texts).encode()


def _json_lines(texts: Texts) -> bytes:
    return "".join(json.dumps({"id": number, "text": text}) + "\n" for number, text in enumerate(texts)).encode()


def _json_array(texts: Texts) -> bytes:
    return json.dumps([{"text": text, "tags": ["x"]} for text in texts], indent=2).encode()


def _table(texts: Texts, delimiter: str) -> bytes:
    data = io.StringIO(newline="")
    writer = csv.writer(data, delimiter=delimiter)
    writer.writerow(["label", "text"])
    writer.writerows((number, text) for number, text in enumerate(texts))
    return data.getvalue().encode()


def _tsv(texts: Texts) -> bytes:
    """Return a TSV file, whose cells have no line ends: a text becomes one line."""
    return _table([text.replace("\n", " ") for text in texts], "\t")


def _wet(texts: Texts) -> bytes:
    records = []
    for text in texts:
        body = text.encode()
        header = f"WARC/1.0\r\nWARC-Type: conversion\r\nContent-Length: {len(body)}\r\n\r\n"
        records.append(header.encode() + body + b"\r\n\r\n")
    return b"".join(records)


def _parquet(texts: Texts) -> bytes:
    data = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": list(texts)}), data)
    return data.getvalue()


def _tar(texts: Texts) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for number, text in enumerate(texts):
            info = tarfile.TarInfo(f"texts/{number:04d}.txt")
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))
    return data.getvalue()


def _webdataset(texts: Texts) -> bytes:
    data = io.BytesIO()
    with webdataset.TarWriter(data) as sink:
        for number, text in enumerate(texts):
            sink.write({"__key__": f"{number:06d}", "json": {"text": text}, "cls": number})
    return data.getvalue()


def _zip(texts: Texts) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for number, text in enumerate(texts):
            archive.writestr(f"books/{number:04d}.txt", text)
    return data.getvalue()


RAW_FORMATS: dict[str, Callable[[Texts], bytes]] = {  # name of a file -> its content for some texts
    "a/plain.txt": _txt,
    "a/plain.txt.gz": lambda texts: gzip.compress(_txt(texts)),
    "a/plain.txt.bz2": lambda texts: bz2.compress(_txt(texts)),
    "a/article.md": lambda texts: "\n\n".join(texts).encode(),
    "b/records.json": _json_array,
    "b/c4-train.00000-of-01024.json.gz": lambda texts: gzip.compress(_json_lines(texts)),
    "b/records.jsonl": _json_lines,
    "b/records.jsonl.zst": lambda texts: zstandard.ZstdCompressor().compress(_json_lines(texts)),
    "b/records.ndjson.xz": lambda texts: lzma.compress(_json_lines(texts)),
    "c/table.csv": lambda texts: _table(texts, ","),
    "c/table.tsv": _tsv,
    "c/table.parquet": _parquet,
    "d/crawl.warc.wet.gz": lambda texts: gzip.compress(_wet(texts)),
    "d/shard-000000.tar": _webdataset,
    "d/texts.tar": _tar,
    "d/texts.tgz": lambda texts: gzip.compress(_tar(texts)),
    "d/texts.zip": _zip,
}


def write_raw_inputs(folder: Path, texts: Texts) -> None:
    """Write the texts in turn to a file of each of `RAW_FORMATS` below `folder`.

    The texts must have no quotes and no blank lines: TSV has no quotes, and a blank line ends a document of a .txt
    file.
    There must be at least as many texts as formats.
    """
    num_formats = len(RAW_FORMATS)
    assert len(texts) >= num_formats
    for index, (name, write) in enumerate(RAW_FORMATS.items()):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(write(texts[index::num_formats]))
