"""Recognize the format and the compression of an input file by the endings of its name, and decompress it.

The content is not looked at: `a.txt` and `a.txt.gz` are both text, and a file without a known ending is of no known
kind. Other parts of a name do not matter, so `c4-train.00000-of-01024.json.gz` is JSON in gzip.

Guarantee: a compressed file that was cut off is an error, never a shorter file. Several compressed streams one after
another in one file, as Common Crawl and pigz write them, are all read. A file that decompresses to far more than it
holds costs bounded memory: it is decompressed piece by piece, and a line or a document of more than 256 MiB is an
error.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import re
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any, BinaryIO, NamedTuple, cast

import zstandard
from typing_extensions import override

FORMATS = {
    ".txt": "txt",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".wet": "wet",
    ".md": "md",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".tar": "tar",
    ".zip": "zip",
}
PAGES = {".warc": "warc", ".html": "html", ".htm": "html"}  # contain HTML, which only `corpus prepare` can read
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
NO_ENDING = "(none)"  # stands for the ending of a name that has none, in counts by ending
_COMPRESSED_WITHIN = (".parquet", ".arrow", ".zip")  # a compressed file of these kinds is of no known kind
_SHORT_ENDINGS = {".tgz": ".tar.gz", ".tbz2": ".tar.bz2", ".txz": ".tar.xz", ".tzst": ".tar.zst"}
_FOLDERS_WITHOUT_DATA = ("_temporary", "_delta_log")  # what Spark has not finished, and its log of a table
_USUAL_ENDING = re.compile(r"\.(?!\d+$)\w{1,10}", re.ASCII)  # not digits only: numbers differ from file to file
READ_BYTES = 1 << 20
# Of one document, decompressed; a few bytes of a compressed file can stand for terabytes.
MOST_DOCUMENT_BYTES = 1 << 28
_PIECE_BYTES = 1 << 10  # of a zstd file: a block of 4 bytes may stand for 128 KiB, and so a piece for 32 MiB


class FileKind(NamedTuple):
    """Format and compression of an input file, as the endings of its name tell them."""

    format: str  # a value of FORMATS or PAGES
    compression: str  # one of COMPRESSIONS; "" if the file is not compressed


def kind_of(name: str, *, with_pages: bool = False) -> FileKind | None:
    """Return format and compression of a file by the endings of its name, in any letter case; None if unknown.

    `a.parquet.gz` is unknown, because parquet is compressed within the file. `with_pages` also accepts HTML and WARC
    files.
    """
    endings = _endings(name)
    compression = ""
    if endings and endings[-1] in COMPRESSIONS:
        compression = endings.pop()
    if not endings:
        return None
    known = FORMATS | PAGES if with_pages else FORMATS
    file_format = known.get(endings[-1])
    if file_format is None or (compression and endings[-1] in _COMPRESSED_WITHIN):
        return None
    return FileKind(file_format, compression)


def is_page(name: str) -> bool:
    """Return whether a file's name is one of HTML or WARC, which `corpus prepare` reads, not a corpus build."""
    return kind_of(name) is None and kind_of(name, with_pages=True) is not None


def is_no_data(name: str) -> bool:
    """Return whether a file is left out by its name, as Spark, pandas and pyarrow do, because it holds no data.

    These are parquet files whose name, or a folder in it, begins with an underscore and is no partition
    (`_year=2024`), and all files in Spark's folders `_temporary` and `_delta_log`. Other files, such as `_posts/a.md`,
    are read.
    """
    parts = PurePosixPath(name).parts
    if any(part in _FOLDERS_WITHOUT_DATA for part in parts[:-1]):
        return True
    return name.lower().endswith(".parquet") and any(part.startswith("_") and "=" not in part for part in parts)


def ending_of(name: str) -> str:
    """Return the ending under which reports count a file: ".txt", ".json.gz", or `NO_ENDING` for a name without one.

    An ending counts only if it consists of one to ten letters, digits or `_`, and not of digits alone.
    """
    endings = _endings(name)
    num_parts = 2 if endings and endings[-1] in COMPRESSIONS else 1
    usual_endings = [ending for ending in endings[-num_parts:] if _USUAL_ENDING.fullmatch(ending)]
    return "".join(usual_endings) or NO_ENDING


def encodable(name: str) -> str:
    r"""Return a file's name with escapes such as `\udcff` for bytes that are not UTF-8, so that JSON can hold it."""
    return name.encode("utf-8", "backslashreplace").decode()


def known_endings(*, with_pages: bool = False) -> str:
    """Return the file endings that can be read, as text for error messages: ".txt, .jsonl, ..."."""
    known = FORMATS | PAGES if with_pages else FORMATS
    return f"{', '.join(known)}, each but {', '.join(_COMPRESSED_WITHIN)} also with {', '.join(COMPRESSIONS)}"


def _endings(name: str) -> list[str]:
    """Return the endings of a file's name in lower case: [".tar", ".gz"] for a.TAR.GZ and for a.tgz."""
    lower_case_name = PurePosixPath(name).name.lower()
    for short_ending, long_ending in _SHORT_ENDINGS.items():
        if lower_case_name.endswith(short_ending):
            lower_case_name = lower_case_name.removesuffix(short_ending) + long_ending
    return PurePosixPath(lower_case_name).suffixes


def decompressed(raw: BinaryIO, compression: str) -> io.BufferedIOBase:
    """Return a stream of a file's decompressed bytes; nothing is read yet. The caller opens and closes `raw`.

    `compression` is ".gz", ".bz2", ".xz", ".zst" or "", for which `raw` itself is returned. A damaged file raises one
    of `DAMAGED_FILE_ERRORS` (`text_readers.py`) when the stream is read.
    """
    if compression == ".gz":
        return io.BufferedReader(gzip.GzipFile(fileobj=raw), READ_BYTES)
    if compression == ".bz2":
        return io.BufferedReader(bz2.BZ2File(raw), READ_BYTES)
    if compression == ".xz":
        return io.BufferedReader(lzma.LZMAFile(raw), READ_BYTES)
    if compression == ".zst":
        return stream_of(_zstd_pieces(raw))
    return cast(io.BufferedReader, raw)


def lines_of(stream: io.BufferedIOBase | io.TextIOWrapper[Any]) -> Iterator[Any]:
    """Yield the lines of a stream with their line ends; raise OSError for a line of more than 256 MiB."""
    while line := stream.readline(MOST_DOCUMENT_BYTES + 1):
        if len(line) > MOST_DOCUMENT_BYTES:
            raise OSError(f"a line of more than {MOST_DOCUMENT_BYTES >> 20} MiB")
        yield line


def read_whole(stream: BinaryIO | io.BufferedIOBase) -> bytes:
    """Return the rest of a file; raise OSError if it is more than 256 MiB."""
    data = stream.read(MOST_DOCUMENT_BYTES + 1)
    if len(data) > MOST_DOCUMENT_BYTES:
        raise OSError(f"a document of more than {MOST_DOCUMENT_BYTES >> 20} MiB")
    return data


def stream_of(pieces: Iterator[bytes]) -> io.BufferedReader:
    """Make a readable stream of bytes that come in pieces of any size.

    An exception that `pieces` raises is raised by the stream's `read`.
    """
    return io.BufferedReader(_PieceStream(pieces), READ_BYTES)


class _PieceStream(io.RawIOBase):
    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._ready = memoryview(b"")  # bytes that were not handed out yet

    @override
    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        while not self._ready:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._ready = memoryview(piece)
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count


def _zstd_pieces(raw: BinaryIO) -> Iterator[bytes]:
    """Yield the decompressed bytes of a zstd file of one frame or several; raise EOFError for a frame that is cut off.

    The reader of the zstandard package is not used, because it treats a file that was cut off as complete.
    """
    # The window of a frame may be 2 GiB, the size that `zstd --long=31` uses.
    decompressor = zstandard.ZstdDecompressor(max_window_size=2**31)
    frame = decompressor.decompressobj()
    is_inside_frame = False
    while data := raw.read(_PIECE_BYTES):
        while data:
            yield frame.decompress(data)
            is_inside_frame = not frame.eof
            if is_inside_frame:
                break  # the frame continues in the next bytes of the file
            data = frame.unused_data
            frame = decompressor.decompressobj()
    if is_inside_frame:
        raise EOFError("the compressed data is cut off within a zstd frame")
