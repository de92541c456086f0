"""Read raw documents from files, in a fixed order and without losing a byte.

Guarantee: the same input files give the same documents in the same order, wherever the files are. Files are ordered
by their name below the input path. A damaged file (cut-off compression, broken parquet) ends the stream with an error
that names the file: a corpus is never silently smaller than its inputs.

How: a reader yields undecoded bytes (`RawDocument`); worker processes decode them (`text_decoding.py`). Formats:
`.txt` (a blank line ends a document), `.jsonl` and `.ndjson` (one object per line), `.parquet` (one column), `.wet`
(Common Crawl text, conversion records). All but parquet may also end in `.gz`, `.zst` or `.xz`.

Cost: one core reads 150 (.gz, .zst) to 400 MB of text a second, or 250,000 small documents; that feeds 40 cores.

Limits: local files only. A document is held in memory as a whole. Text is UTF-8; encodings are not guessed.
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

from electra_dist.corpus.text_decoding import RawDocument
from electra_dist.errors import UserError

FORMATS = {".txt": "txt", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".wet": "wet"}
COMPRESSIONS = (".gz", ".zst", ".xz")
_READ_BYTES = 1 << 20
_BLANK_LINE = re.compile(rb"\n[ \t\r\v\f]*\n")


class InputFile(NamedTuple):
    """One input file of a corpus: its name below the input path, its path, its format and its size."""

    name: str  # path below the input that was given; it decides the order, and the corpus records no more of the path
    path: Path
    format: str  # a value of FORMATS
    size: int  # bytes on disk


def find_inputs(paths: Sequence[str | Path]) -> list[InputFile]:
    """Return the files behind `paths`, in reading order: by name, then by path.

    A file that two paths lead to is listed once, under its first name. Folders are searched recursively; files of
    unknown kinds and hidden files in them are ignored.

    Args:
        paths: files with a known ending, or folders.

    Raises:
        UserError: a path is missing, on S3 or a file of unknown kind, or no file was found.
    """
    inputs: dict[Path, InputFile] = {}
    for path in map(str, paths):
        for file in _files_of_input(path):
            inputs.setdefault(file.path.resolve(), file)
    if not inputs:
        raise UserError(
            f"--input {' '.join(map(str, paths))}: no file with a known ending; give files or folders with "
            f"{_known_endings()}"
        )
    return sorted(inputs.values(), key=lambda file: (file.name, str(file.path)))


def _files_of_input(path: str) -> Iterator[InputFile]:
    """Yield the file at `path`, or the files of known formats below it, sorted.

    Raises:
        UserError: the path is missing, on S3 or a file of unknown kind.
    """
    root = Path(path)
    if path.startswith("s3://"):
        raise UserError(f"--input {path}: inputs are local files; copy the prefix to a disk first")
    if not root.exists():
        raise UserError(f"--input {path}: no such file or folder; correct the path")
    if not root.is_dir():
        file_format = _format(root)
        if file_format is None:
            raise UserError(f"--input {path}: unknown kind of file; known: {_known_endings()}; convert or rename it")
        if root.is_file():
            yield InputFile(root.name, root, file_format, root.stat().st_size)
        return
    for file in sorted(root.rglob("*")):
        relative = file.relative_to(root)
        is_hidden = any(part.startswith(".") for part in relative.parts)
        file_format = _format(file)
        if file_format is not None and not is_hidden and file.is_file():
            yield InputFile(relative.as_posix(), file, file_format, file.stat().st_size)


class DocumentStream:
    """Iterable over the documents of input files, in order. Iterate over an instance once, in one thread."""

    def __init__(self, files: Sequence[InputFile], text_field: str = "text") -> None:
        """Prepare to read `files`; none is opened yet.

        Args:
            files: input files in reading order, from `find_inputs`.
            text_field: name of the parquet column that holds the text. Other formats ignore it: a JSON line is yielded
                whole, and `documents.decode` finds its text.
        """
        self._files = files
        self._text_field = text_field
        self._bytes_before = 0
        self._open_file: BinaryIO | None = None

    @property
    def bytes_done(self) -> int:
        """Return the bytes of the input files read so far; compressed files count with their size on disk."""
        return self._bytes_before + (self._open_file.tell() if self._open_file else 0)

    def __iter__(self) -> Iterator[RawDocument]:
        """Yield every document of every file.

        Raises:
            UserError: a file cannot be read to its end, or a parquet file has no column of text of the given name.
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
                raise UserError(
                    f"{file.path}: cannot be read to its end ({error}); replace the file or leave it out"
                ) from None
            finally:
                self._open_file = None
            self._bytes_before += file.size

    def _read(self, file: InputFile, raw: BinaryIO) -> Iterator[RawDocument]:
        """Yield the documents of one file, which the caller has opened as `raw` to read bytes."""
        if file.format == "parquet":
            yield from _read_parquet(file.path, raw, self._text_field)
            return
        stream = _decompressed(raw, file.path.suffix.lower())
        if file.format == "jsonl":
            yield from (RawDocument(line, True) for line in stream)
        elif file.format == "wet":
            yield from _read_wet(stream)
        else:
            yield from _read_txt(stream)


def _format(path: Path) -> str | None:
    """Return the format of a file by its endings, a value of `FORMATS`; None if it is unknown.

    A compressed parquet file is unknown: parquet is compressed within.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
        if suffixes and suffixes[-1] == ".parquet":
            return None
    return FORMATS.get(suffixes[-1]) if suffixes else None


def _known_endings() -> str:
    """Return the file endings that can be read, as text for error messages."""
    return f"{', '.join(FORMATS)}, each but .parquet also with {', '.join(COMPRESSIONS)}"


def _read_txt(stream: io.BufferedIOBase) -> Iterator[RawDocument]:
    """Yield the blocks of text between blank lines.

    Each read is at least as large as the text since the last blank line, so that a huge document is searched in linear
    time.
    """
    rest = b""
    while block := stream.read(max(_READ_BYTES, len(rest))):
        *documents, rest = _BLANK_LINE.split(rest + block)
        for document in documents:
            text = document.strip()
            if text:
                yield RawDocument(text, False)
    text = rest.strip()
    if text:
        yield RawDocument(text, False)


def _read_wet(stream: io.BufferedIOBase) -> Iterator[RawDocument]:
    """Yield the bodies of the `conversion` records of a WARC stream.

    Source: ISO 28500. A record is a version line, headers, an empty line and a body of Content-Length bytes.

    Raises:
        EOFError: the last record is cut off.
        OSError: the stream is not WARC.
    """
    while line := stream.readline():
        if not line.strip():
            continue
        if not line.startswith(b"WARC/"):
            raise OSError(f"expected a WARC record, found {line[:40]!r}")
        headers = _read_warc_headers(stream)
        length = headers.get(b"content-length", b"")
        if not length.isdigit():
            raise OSError("a WARC record has no Content-Length header")
        body = stream.read(int(length))
        if len(body) < int(length):
            raise EOFError("the last WARC record is cut off")
        if headers.get(b"warc-type") == b"conversion":
            yield RawDocument(body, False)


def _read_warc_headers(stream: io.BufferedIOBase) -> dict[bytes, bytes]:
    """Read the headers of a WARC record and the empty line after them; return them by name in lower case.

    Raises:
        EOFError: the stream ends before the empty line.
    """
    headers: dict[bytes, bytes] = {}
    while line := stream.readline():
        if not line.strip():
            return headers
        name, _, value = line.partition(b":")
        headers[name.strip().lower()] = value.strip()
    raise EOFError("the last WARC record is cut off")


def _read_parquet(path: Path, raw: BinaryIO, text_field: str) -> Iterator[RawDocument]:
    """Yield the cells of the column `text_field` of a parquet file; a null cell has no data.

    Raises:
        UserError: there is no column of that name with strings or bytes.
    """
    table = pyarrow.parquet.ParquetFile(raw)
    schema = table.schema_arrow
    if text_field not in schema.names or not _is_text(schema.field(text_field).type):
        raise UserError(
            f"{path}: no column `{text_field}` of text; set --text-field to the column that holds it: "
            f"{', '.join(schema.names)}"
        )
    for batch in table.iter_batches(batch_size=1024, columns=[text_field]):
        for cell in batch.column(0).cast(pyarrow.large_binary()):
            yield RawDocument(cell.as_py(), False)


def _is_text(column_type: pyarrow.DataType) -> bool:
    """Return whether a parquet column holds strings or bytes."""
    return (
        pyarrow.types.is_string(column_type)
        or pyarrow.types.is_large_string(column_type)
        or pyarrow.types.is_binary(column_type)
        or pyarrow.types.is_large_binary(column_type)
    )


def _decompressed(raw: BinaryIO, suffix: str) -> io.BufferedIOBase:
    """Return a stream of the decompressed bytes of `raw`; for a suffix other than .gz, .xz, .zst `raw` itself."""
    if suffix == ".gz":
        return io.BufferedReader(gzip.GzipFile(fileobj=raw), _READ_BYTES)
    if suffix == ".xz":
        return io.BufferedReader(lzma.LZMAFile(raw), _READ_BYTES)
    if suffix == ".zst":
        return io.BufferedReader(_ZstdFile(raw), _READ_BYTES)
    return cast(io.BufferedReader, raw)


class _ZstdFile(io.RawIOBase):
    """Decompressed bytes of a zstd file, which may consist of several frames.

    The reader of the zstandard package is not used because it accepts a file that is cut off as complete.
    """

    def __init__(self, raw: BinaryIO) -> None:
        """Start at the beginning of a frame; `raw` stays open when this object is closed."""
        self._raw = raw
        self._frame = self._new_frame()
        self._inside_frame = False  # bytes of an unfinished frame were read
        self._ready = b""  # decompressed bytes that were not handed out yet

    def readable(self) -> bool:
        """Return True, because `io.BufferedReader` accepts readable streams only."""
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        """Fill `buffer` with decompressed bytes and return their number; 0 at the end of the file.

        Raises:
            EOFError: the file ends within a frame.
            zstandard.ZstdError: the bytes are not zstd.
        """
        while not self._ready:
            data = self._raw.read(_READ_BYTES)
            if not data:
                if self._inside_frame:
                    raise EOFError("the compressed data is cut off")
                return 0
            self._ready = self._decompress(data)
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _decompress(self, data: bytes) -> bytes:
        """Return the decompressed form of `data`, the next bytes of the zstd file.

        `data` may end in the middle of a frame, and may hold several frames; each frame gets a new decompressor.
        """
        parts = []
        while data:
            parts.append(self._frame.decompress(data))
            if self._frame.eof:
                data = self._frame.unused_data
                self._frame = self._new_frame()
                self._inside_frame = False
            else:
                data = b""
                self._inside_frame = True
        return b"".join(parts)

    @staticmethod
    def _new_frame() -> zstandard.ZstdDecompressionObj:
        """Return a decompressor of one frame that accepts windows of up to 2 GiB (zstd --long=31)."""
        return zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()
