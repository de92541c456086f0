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
    """Format and compression of an input file."""

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
    """Return whether a file holds HTML, which `corpus prepare` reads and a corpus build does not."""
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
        return io.BufferedReader(_ZstdFile(raw), READ_BYTES)
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


class _ZstdFile(io.RawIOBase):
    """Readable stream of the decompressed bytes of a zstd file, which may consist of several frames.

    The reader of the zstandard package is not used, because it treats a file that was cut off as complete.
    """

    def __init__(self, raw: BinaryIO) -> None:
        """Begin at the current position of `raw`, which stays open when this object is closed."""
        self._raw = raw
        self._frame = self._new_frame()
        self._inside_frame = False  # bytes of an unfinished frame were read
        self._ready = memoryview(b"")  # decompressed bytes that were not handed out yet

    @override
    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        """Write decompressed bytes to `buffer`; return their number, 0 at the end; EOFError for a cut-off frame."""
        while not self._ready:  # a block of compressed bytes may give no output
            compressed = self._raw.read(_PIECE_BYTES)
            if not compressed and self._inside_frame:
                raise EOFError("the compressed data is cut off within a zstd frame")
            if not compressed:
                return 0
            self._ready = memoryview(self._decompress(compressed))
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _decompress(self, compressed: bytes) -> bytes:
        """Decompress the next bytes of the file; they may hold several frames and end within a frame.

        Each frame gets a new decompressor, because a decompressor of zstandard stops at the end of its frame.
        """
        decompressed = []
        rest = compressed
        while rest:
            decompressed.append(self._frame.decompress(rest))
            self._inside_frame = not self._frame.eof
            if self._inside_frame:
                break  # the frame continues in the next bytes of the file
            rest = self._frame.unused_data
            self._frame = self._new_frame()
        return b"".join(decompressed)

    @staticmethod
    def _new_frame() -> zstandard.ZstdDecompressionObj:
        """Return a decompressor for one frame; its window may be 2 GiB, the size that `zstd --long=31` uses."""
        return zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()
