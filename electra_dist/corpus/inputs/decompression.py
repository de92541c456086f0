"""Decompress an input file while it is read; a file that was cut off is an error, never a shorter file.

Several compressed streams one after another in one file, as Common Crawl and pigz write them, are all read. A file
that decompresses to far more than it holds costs bounded memory: it is decompressed piece by piece, and a line or a
document of more than 256 MiB is an error.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

import zstandard
from typing_extensions import override

READ_BYTES = 1 << 20
MOST_DOCUMENT_BYTES = (
    1 << 28
)  # of one document, decompressed; a few bytes of a compressed file can stand for terabytes
_PIECE_BYTES = 1 << 10  # of a zstd file: a block of 4 bytes may stand for 128 KiB, and so a piece for 32 MiB


def decompressed(raw: BinaryIO, compression: str) -> io.BufferedIOBase:
    """Return a stream of a file's decompressed bytes; nothing is read yet. The caller opens and closes `raw`.

    `compression` is ".gz", ".bz2", ".xz", ".zst" or "", for which `raw` itself is returned. A damaged file raises one
    of `DAMAGED_FILE_ERRORS` (`formats.py`) when the stream is read.
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
