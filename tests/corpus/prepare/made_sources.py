"""Sources for a preparation, in every format, with planted duplicates, boilerplate, other languages and bad pages."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import zstandard
from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter

_ENGLISH_TEXT = """
time people water house light river number history music figure country school animal machine garden winter
summer letter market silver forest island captain teacher window morning evening village mountain weather
bridge kitchen doctor soldier painter journey harbour station engine valley castle student shoulder promise
question answer measure distance pattern colour picture corner paper metal stone glass bread coffee sugar
pepper butter
"""
ENGLISH = _ENGLISH_TEXT.split()
_GERMAN_TEXT = """
der die das und nicht wir haben ein eine Haus Wasser Berg Fluss Stadt Strasse Fenster Morgen Abend Winter
Sommer Schule Lehrer Kinder Garten schreiben lesen kommen gehen immer wieder zwischen unter hinter gegen
durch
"""
GERMAN = _GERMAN_TEXT.split()
SENTENCES = [
    "The {} of {} was near that {} and a {}, {} or {}.",
    "Nobody had to be with {} {} before our {} came to {} {} {}.",
    "They have {} {} under my {}, and {} is {} {}.",
    "In this {} we saw {} that {} with {} {} and {}.",
    "A {} and its {} went to {} of {} {} {}.",
    "Later {} would be {} if {} had {} {} {}.",
    "Who knows {} {} that {} and {} will have {} {}?",
    "Some {} {} is {} to the {} with {} {}.",
]
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.compress,
}
BAD_WORD = "xylofungus"
EMAIL = "jane.doe@mail.invalid"


def english(seed: int, num_sentences: int = 14) -> str:
    """Return a document that passes all quality filters; every seed gives another one."""
    draw = random.Random(seed)
    sentences = []
    for _ in range(num_sentences):
        nouns = [draw.choice(ENGLISH) for _ in range(6)]
        sentences.append(draw.choice(SENTENCES).format(*nouns))
    return " ".join(sentences)


def german(seed: int) -> str:
    """Return a document of German words."""
    draw = random.Random(seed)
    return " ".join(" ".join(draw.choice(GERMAN) for _ in range(9)).capitalize() + "." for _ in range(12))


def near_duplicate(text: str) -> str:
    """Return a text in which one word of a hundred differs."""
    words = text.split()
    words[50] = "otherwise"
    return " ".join(words)


def page(text: str) -> bytes:
    """Return an HTML page with a text between a menu and a footer."""
    paragraphs = "".join(f"<p>{sentence}.</p>" for sentence in text.split(".") if sentence.strip())
    menu = "<nav><ul><li>MENUENTRY</li><li>Login</li></ul></nav>"
    footer = "<footer>FOOTERTEXT privacy</footer>"
    title = f"<title>{text[:20]}</title>"
    return f"<html><head>{title}</head><body>{menu}<article>{paragraphs}</article>{footer}</body></html>".encode()


def warc(path: Path, responses: list[tuple[str, bytes, str, str]]) -> None:
    """Write a WARC file of requests and responses, each (url, body, content type, status)."""
    with path.open("wb") as out:
        writer = WARCWriter(out, gzip=path.suffix == ".gz")
        for url, body, content_type, status in responses:
            request = StatusAndHeaders("GET / HTTP/1.0", [("Host", "x")], is_http_request=True)
            writer.write_record(writer.create_warc_record(url, "request", http_headers=request))
            headers = StatusAndHeaders(status, [("Content-Type", content_type)], protocol="HTTP/1.0")
            record = writer.create_warc_record(url, "response", payload=io.BytesIO(body), http_headers=headers)
            writer.write_record(record)


def wet(path: Path, texts: list[tuple[str, str]]) -> None:
    """Write a WET file of (url, text)."""
    with path.open("wb") as out:
        writer = WARCWriter(out, gzip=path.suffix == ".gz")
        for url, text in texts:
            record = writer.create_warc_record(
                url, "conversion", payload=io.BytesIO(text.encode()), warc_content_type="text/plain"
            )
            writer.write_record(record)


def lines(texts: list[str]) -> bytes:
    """Return texts as JSON lines."""
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def write_language_model(path: Path) -> None:
    """Write a fastText model file (version 12) in which each word votes for the language that has it."""
    words = [("en", word) for word in [*ENGLISH, "the", "and", "have", "with", "text", "words", "cookies."]]
    words += [("de", word) for word in GERMAN]
    labels = ["en", "de"]
    softmax, supervised, word_type, label_type = 3, 3, 0, 1
    # dim, ws, epoch, minCount, neg, wordNgrams, loss, model, bucket, minn, maxn, lrUpdateRate; t
    header = struct.pack("<2i", 793712314, 12)
    header += struct.pack("<12id", len(labels), 5, 5, 1, 5, 1, softmax, supervised, 0, 0, 0, 100, 1e-4)
    header += struct.pack("<3i2q", len(words) + len(labels), len(words), len(labels), 10_000, -1)
    entries = [(word, word_type) for _, word in words] + [(f"__label__{label}", label_type) for label in labels]
    dictionary = b"".join(name.encode() + b"\0" + struct.pack("<qb", 100, kind) for name, kind in entries)
    votes = np.array([[label == language for label in labels] for language, _ in words], dtype="<f4")
    weights = 10 * np.eye(len(labels), dtype="<f4")
    matrices = [b"\0" + struct.pack("<2q", *matrix.shape) + matrix.tobytes() for matrix in (votes, weights)]
    path.write_bytes(header + dictionary + b"".join(matrices))


def make_sources(folder: Path) -> None:
    """Write the sources `crawl`, `lines` and `tables` as folders; the seeds of good documents are 0 to 99."""
    for name in ("crawl", "lines", "tables"):
        (folder / name).mkdir(parents=True)
    good = [english(seed) for seed in range(100)]
    html = "text/html; charset=utf-8"
    responses = [(f"http://site{seed}.example.com/page", page(good[seed]), html, "200 OK") for seed in range(10)]
    responses += [
        ("http://site.example.com/picture", b"\x89PNG", "image/png", "200 OK"),
        ("http://site.example.com/gone", page(good[10]), html, "404 Not Found"),
        ("http://casino.example.org/page", page(english(1000)), html, "200 OK"),
        ("http://site.example.com/nothing", b"<html><body></body></html>", html, "200 OK"),
    ]
    warc(folder / "crawl" / "a.warc.gz", responses)
    texts = [(f"http://wet.example.com/{seed}", good[seed]) for seed in range(10, 20)]
    wet(folder / "crawl" / "b.wet.gz", [*texts, ("http://wet.example.com/de", german(1))])
    (folder / "crawl" / "c.html").write_bytes(page(good[20]))
    planted = [
        good[30],  # once more
        near_duplicate(good[31]),
        german(2),
        english(1003, 3),  # too short
        "We use cookies. Accept all cookies.\n" * 40,
        f"{english(1001)} {BAD_WORD} .",
        f"{english(1002)} {{ code }}.",
        " ",
    ]
    for number, (ending, compress) in enumerate(COMPRESS.items()):
        documents = good[30 + 5 * number : 35 + 5 * number]
        if ending == ".zst":
            documents += planted
        (folder / "lines" / f"part-{number}.jsonl{ending}").write_bytes(compress(lines(documents)))
    with zipfile.ZipFile(folder / "lines" / "part-5.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("part.jsonl", lines(good[55:60]) + b"{broken\n")
    table = pa.table({"text": [*good[60:70], f"Write to {EMAIL}. {good[70]}", None]})
    pa.parquet.write_table(table, folder / "tables" / "a.parquet")
    with pa.ipc.new_stream(folder / "tables" / "b.arrow", table.schema) as stream:
        stream.write_table(pa.table({"text": [*good[71:80], good[60]]}))
    with pa.ipc.new_file(folder / "tables" / "c.arrow", table.schema) as file:
        file.write_table(pa.table({"text": good[80:85]}))


GOOD_SEEDS = {*range(10), *range(10, 21), *range(30, 85)}  # page 10 is read from the WET file, not from the 404
# source -> documents read, and step -> reason -> source -> documents dropped.
DOCUMENTS_IN = {"crawl": 14 + 11 + 1, "lines": 30 + 8 + 1, "tables": 12 + 10 + 5}
