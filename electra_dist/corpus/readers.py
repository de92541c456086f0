"""Raw documents from files, in one order, with every byte accounted for.

Guarantee: the same input files give the same documents in the same order, wherever they lie. Files are ordered by the
name that they have below the path that was given. A damaged file (cut-off compression, broken parquet) ends the
stream with an error that names it: a corpus is never silently smaller than its inputs.

How: a reader yields undecoded bytes (`RawDocument`); decoding, JSON and cleaning are the work of `decode`, in worker
processes. Formats: `.txt` (a blank line ends a document), `.jsonl`/`.ndjson` (one object a line), `.parquet`
(one column), `.wet` (Common Crawl text, conversion records); all but parquet also with `.gz`, `.zst` or `.xz`.

Cost: one core reads 150 (.gz, .zst) to 400 MB of text a second, or 250,000 small documents; that feeds 40 cores.

Where it stops: local files only. A document is held in memory whole. Text is UTF-8; nothing guesses encodings.
"""

from __future__ import annotations

import gzip
import io
import lzma
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

import pyarrow
import pyarrow.parquet
import zstandard

from electra_dist.corpus.documents import RawDocument
from electra_dist.errors import UserError

FORMATS = {".txt": "txt", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".wet": "wet"}
COMPRESSIONS = (".gz", ".zst", ".xz")
_READ_BYTES = 1 << 20
_BLANK_LINE = re.compile(rb"\n[ \t\r\v\f]*\n")
_READ_ERRORS = (EOFError, OSError, zlib.error, lzma.LZMAError, zstandard.ZstdError, pyarrow.ArrowException)


class InputFile(NamedTuple):
    """One file to read. `name` is its path below the input that was given: all that a corpus remembers of it."""

    name: str
    path: Path
    format: str
    size: int


def find_inputs(paths: Sequence[str | Path]) -> list[InputFile]:
    """The files behind `paths` (files, or folders searched to the bottom), in reading order.

    A file that is named must have a known ending; in a folder, files of other kinds and hidden ones are passed over.

    Raises:
        UserError: a path that is missing or of unknown kind, or no file at all.
    """
    found: dict[Path, InputFile] = {}
    for given in map(str, paths):
        root = Path(given)
        if given.startswith("s3://"):
            raise UserError(f"--input {given}: inputs are local files; copy the prefix to a disk first")
        if not root.exists():
            raise UserError(f"--input {given}: no such file or folder")
        inside = sorted(root.rglob("*")) if root.is_dir() else [root]
        for path in inside:
            hidden = path is not root and any(part.startswith(".") for part in path.relative_to(root).parts)
            kind = _format(path)
            if path is root and kind is None:
                raise UserError(f"--input {given}: unknown kind of file; known: {_known_endings()}")
            if kind is None or hidden or not path.is_file():
                continue
            name = path.name if path is root else path.relative_to(root).as_posix()
            found.setdefault(path.resolve(), InputFile(name, path, kind, path.stat().st_size))
    if not found:
        raise UserError(f"--input {' '.join(map(str, paths))}: no file with a known ending ({_known_endings()})")
    return sorted(found.values(), key=lambda file: (file.name, str(file.path)))


class DocumentStream:
    """Iterates over the documents of `files`; `bytes_done` (of the files' own bytes) tells how far it is."""

    def __init__(self, files: Sequence[InputFile], text_field: str = "text") -> None:
        self._files = files
        self._text_field = text_field
        self._bytes_before = 0
        self._open_file: BinaryIO | None = None

    @property
    def bytes_done(self) -> int:
        """Input bytes read so far, compressed ones as they lie on disk."""
        return self._bytes_before + (self._open_file.tell() if self._open_file else 0)

    def __iter__(self) -> Iterator[RawDocument]:
        """Every document of every file.

        Raises:
            UserError: a file that cannot be read to its end.
        """
        for file in self._files:
            try:
                with open(file.path, "rb") as self._open_file:
                    yield from self._read(file, self._open_file)
            except (
                EOFError,
                OSError,
                zlib.error,
                lzma.LZMAError,
                zstandard.ZstdError,
                pyarrow.ArrowException,
            ) as error:
                raise UserError(f"{file.path}: cannot be read to its end ({error}); mend it or leave it out") from None
            finally:
                self._open_file = None
            self._bytes_before += file.size

    def _read(self, file: InputFile, raw: BinaryIO) -> Iterator[RawDocument]:
        if file.format == "parquet":
            yield from _read_parquet(file.path, raw, self._text_field)
            return
        stream = _decompressed(raw, file.path.suffix.lower())
        if file.format == "jsonl":
            yield from (RawDocument(line, True) for line in stream)
        elif file.format == "wet":
            yield from _read_wet(file.path, stream)
        else:
            yield from _read_txt(stream)


def _format(path: Path) -> str | None:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
        if suffixes and suffixes[-1] == ".parquet":
            return None
    return FORMATS.get(suffixes[-1]) if suffixes else None


def _known_endings() -> str:
    return f"{', '.join(FORMATS)}, each but .parquet also with {', '.join(COMPRESSIONS)}"


def _read_txt(stream: io.BufferedIOBase) -> Iterator[RawDocument]:
    """Blocks between blank lines. Reads twice as much while there is none: a huge document costs linear time."""
    rest = b""
    while block := stream.read(max(_READ_BYTES, len(rest))):
        *documents, rest = _BLANK_LINE.split(rest + block)
        yield from (RawDocument(text, False) for document in documents if (text := document.strip()))
    if text := rest.strip():
        yield RawDocument(text, False)


def _read_wet(path: Path, stream: io.BufferedIOBase) -> Iterator[RawDocument]:
    """Bodies of the `conversion` records of a WARC stream (ISO 28500: headers, empty line, body of known length)."""
    while line := stream.readline():
        if not line.strip():
            continue
        if not line.startswith(b"WARC/"):
            raise OSError(f"expected a WARC record, found {line[:40]!r}")
        headers: dict[bytes, bytes] = {}
        while (line := stream.readline()).strip():
            key, _, value = line.partition(b":")
            headers[key.strip().lower()] = value.strip()
        length = headers.get(b"content-length", b"")
        if line and not length.isdigit():
            raise OSError("a WARC record without Content-Length")
        body = stream.read(int(length)) if line else b""
        if not line or len(body) < int(length):
            raise EOFError("the last WARC record is cut off")
        if headers.get(b"warc-type") == b"conversion":
            yield RawDocument(body, False)


def _read_parquet(path: Path, raw: BinaryIO, text_field: str) -> Iterator[RawDocument]:
    table = pyarrow.parquet.ParquetFile(raw)
    schema = table.schema_arrow
    kind = schema.field(text_field).type if text_field in schema.names else None
    is_text = kind is not None and any(
        test(kind)
        for test in (
            pyarrow.types.is_string,
            pyarrow.types.is_large_string,
            pyarrow.types.is_binary,
            pyarrow.types.is_large_binary,
        )
    )
    if not is_text:
        raise UserError(f"{path}: no column `{text_field}` of text; columns: {', '.join(schema.names)} (--text-field)")
    for batch in table.iter_batches(batch_size=1024, columns=[text_field]):
        for cell in batch.column(0).cast(pyarrow.large_binary()):
            yield RawDocument(cell.as_py(), False)


def _decompressed(raw: BinaryIO, suffix: str) -> io.BufferedIOBase:
    if suffix == ".gz":
        return io.BufferedReader(gzip.GzipFile(fileobj=raw), _READ_BYTES)
    if suffix == ".xz":
        return io.BufferedReader(lzma.LZMAFile(raw), _READ_BYTES)
    if suffix == ".zst":
        return io.BufferedReader(_ZstdFile(raw), _READ_BYTES)
    return cast(io.BufferedReader, raw)


class _ZstdFile(io.RawIOBase):
    """Frames of a zstd file one after another. zstandard's own reader takes a file that is cut off for a whole one."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._frame = self._new_frame()
        self._inside_frame = False
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        while not self._ready:
            data = self._raw.read(_READ_BYTES)
            if not data:
                if self._inside_frame:
                    raise EOFError("compressed data is cut off")
                return 0
            self._ready = self._feed(data)
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def _feed(self, data: bytes) -> bytes:
        parts = []
        while data:
            parts.append(self._frame.decompress(data))
            self._inside_frame = not self._frame.eof
            data = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame = self._new_frame()
        return b"".join(parts)

    @staticmethod
    def _new_frame() -> zstandard.ZstdDecompressionObj:
        return zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()
