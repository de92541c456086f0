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
_PARQUET_BATCH_ROWS = 1024
# Errors that the readers of the formats raise for a file that is damaged or cut off.
_DAMAGED_FILE_ERRORS = (
    EOFError,
    OSError,
    zlib.error,
    lzma.LZMAError,
    zstandard.ZstdError,
    pyarrow.ArrowException,
)
_BLANK_LINE = re.compile(rb"\n[ \t\r\v\f]*\n")


class InputFile(NamedTuple):
    """One input file of a corpus: its name below the input path, its path, its format and its size in bytes on disk.

    The name decides the order in which files are read. A corpus records names and sizes, not paths, so the files may
    be moved together.
    """

    name: str  # path below the input that was given; it decides the order, and the corpus records no more of the path
    path: Path
    format: str  # a value of FORMATS
    size: int  # bytes on disk


def find_inputs(paths: Sequence[str | Path]) -> list[InputFile]:
    """Return the files behind `paths`, in reading order: by name, then by path.

    The name of a file is its path below the given folder. A file that two paths lead to, for example through a link,
    is listed once, with the name from the first of them. Folders are searched recursively; files of unknown kinds and
    hidden files in them are ignored.

    Args:
        paths: files with a known ending, or folders.

    Raises:
        UserError: a path is missing, on S3 or a file of unknown kind, or no file was found.
    """
    file_of_real_path: dict[Path, InputFile] = {}
    for path in paths:
        for file in _files_of_input(str(path)):
            real_path = file.path.resolve()  # equal for two paths that lead to one file, for example through a link
            file_of_real_path.setdefault(real_path, file)
    if not file_of_real_path:
        all_paths = " ".join(str(path) for path in paths)
        raise UserError(
            f"--input {all_paths}: no file with a known ending; give files or folders with {_known_endings()}"
        )
    return sorted(file_of_real_path.values(), key=lambda file: (file.name, str(file.path)))


def _files_of_input(path: str) -> Iterator[InputFile]:
    """Yield the input file at `path`, or those below it if it is a folder.

    Args:
        path: what the user gave as --input.

    Raises:
        UserError: the path is missing, on S3 or a file of unknown kind.
    """
    root = Path(path)
    if path.startswith("s3://"):
        raise UserError(f"--input {path}: is on S3, but inputs are local files; copy the prefix to a disk first")
    if not root.exists():
        raise UserError(f"--input {path}: no such file or folder; correct the path")
    if root.is_dir():
        yield from _files_in_folder(root)
        return
    file_format = _format(root)
    if file_format is None:
        raise UserError(f"--input {path}: unknown kind of file; known: {_known_endings()}; convert or rename it")
    if root.is_file():  # not a pipe or device
        yield InputFile(name=root.name, path=root, format=file_format, size=root.stat().st_size)


def _files_in_folder(folder: Path) -> Iterator[InputFile]:
    """Yield the files of known formats below `folder`, sorted by path.

    Hidden files, and files in hidden folders, are left out.
    """
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        is_hidden = any(part.startswith(".") for part in relative.parts)
        file_format = _format(path)
        if file_format is not None and not is_hidden and path.is_file():
            yield InputFile(name=relative.as_posix(), path=path, format=file_format, size=path.stat().st_size)


class DocumentStream:
    """Iterable over the undecoded documents of input files, in order, which also counts the bytes read.

    Iterate over an instance once, in one thread.
    """

    def __init__(self, files: Sequence[InputFile], text_field: str = "text") -> None:
        """Prepare to read `files`; none is opened yet.

        Args:
            files: input files in reading order, from `find_inputs`.
            text_field: name of the parquet column that holds the text. Other formats ignore it: a JSON line is yielded
                whole, and `text_decoding.decode` finds its text.
        """
        self._files = files
        self._text_field = text_field
        self._closed_bytes = 0  # size of the files that were read to their end
        self._open_file: BinaryIO | None = None

    @property
    def bytes_done(self) -> int:
        """Return the bytes of the input files read so far; of a compressed file the compressed bytes count."""
        if self._open_file is None:
            return self._closed_bytes
        return self._closed_bytes + self._open_file.tell()

    def __iter__(self) -> Iterator[RawDocument]:
        """Yield every document of every file, undecoded, in the order of the files.

        Raises:
            UserError: a file cannot be read to its end, or a parquet file has no column of text of the given name.
        """
        for file in self._files:
            try:
                with open(file.path, "rb") as raw:
                    self._open_file = raw  # `bytes_done` asks it for its position
                    yield from self._read(file, raw)
            except _DAMAGED_FILE_ERRORS as error:
                raise UserError(
                    f"{file.path}: cannot be read to its end ({error}); replace the file or leave it out"
                ) from None
            finally:
                self._open_file = None
            self._closed_bytes += file.size

    def _read(self, file: InputFile, raw: BinaryIO) -> Iterator[RawDocument]:
        """Yield the documents of one file, decompressed but not decoded.

        Args:
            file: the file; its format and its ending decide how it is read.
            raw: the same file, which the caller has opened to read bytes and closes afterwards.
        """
        if file.format == "parquet":
            yield from _read_parquet(file.path, raw, self._text_field)
            return
        stream = _decompressed(raw, file.path.suffix.lower())
        if file.format == "jsonl":
            for line in stream:
                yield RawDocument(line, is_json=True)
        elif file.format == "wet":
            yield from _read_wet(stream)
        else:
            yield from _read_txt(stream)


def _format(path: Path) -> str | None:
    """Return the format of a file by its endings, a value of `FORMATS`; None if it is unknown.

    `a.txt` and `a.txt.gz` are both "txt". `a.parquet.gz` is unknown, because parquet is compressed within the file.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]  # a.txt.gz: [".txt", ".gz"]
    is_compressed = bool(suffixes) and suffixes[-1] in COMPRESSIONS
    if is_compressed:
        suffixes.pop()
    if not suffixes:
        return None
    if is_compressed and suffixes[-1] == ".parquet":
        return None
    return FORMATS.get(suffixes[-1])


def _known_endings() -> str:
    """Return the file endings that can be read, as text for error messages: ".txt, .jsonl, ..."."""
    return f"{', '.join(FORMATS)}, each but .parquet also with {', '.join(COMPRESSIONS)}"


def _read_txt(stream: io.BufferedIOBase) -> Iterator[RawDocument]:
    """Yield the documents of a plain-text file: the blocks of text between blank lines, stripped of white space.

    The stream is read in large blocks of bytes. The text after the last blank line of a block is an unfinished
    document: it is joined to the next block and searched again. Each read is at least as large as that text, so that
    the time stays linear even for a huge document.
    """
    unfinished = b""
    while block := stream.read(max(_READ_BYTES, len(unfinished))):
        *documents, unfinished = _BLANK_LINE.split(unfinished + block)
        for document in documents:
            text = document.strip()
            if text:
                yield RawDocument(text, is_json=False)
    text = unfinished.strip()
    if text:
        yield RawDocument(text, is_json=False)


def _read_wet(stream: io.BufferedIOBase) -> Iterator[RawDocument]:
    """Yield the bodies of the `conversion` records of a WARC stream; these hold the plain text of web pages.

    Source: ISO 28500. A record is a version line such as `WARC/1.0`, headers, an empty line and a body of
    Content-Length bytes. Two empty lines follow it.

    Raises:
        EOFError: the last record is cut off.
        OSError: the stream is not WARC.
    """
    while version_line := stream.readline():
        if not version_line.strip():
            continue  # an empty line after the record before
        if not version_line.startswith(b"WARC/"):
            raise OSError(f"expected the line `WARC/...` at the start of a record, found {version_line[:40]!r}")
        headers = _read_warc_headers(stream)
        length_header = headers.get(b"content-length", b"")
        if not length_header.isdigit():
            raise OSError(f"a WARC record has Content-Length {length_header!r} where a number of bytes is expected")
        body_length = int(length_header)
        body = stream.read(body_length)
        if len(body) < body_length:
            raise EOFError(f"the last WARC record is cut off: it has {len(body)} of {body_length} bytes")
        if headers.get(b"warc-type") == b"conversion":
            yield RawDocument(body, is_json=False)


def _read_warc_headers(stream: io.BufferedIOBase) -> dict[bytes, bytes]:
    """Read the headers of a WARC record and the empty line after them; return the values by name in lower case.

    For example, {b"warc-type": b"conversion", b"content-length": b"1234"}.

    Raises:
        EOFError: the stream ends before the empty line.
    """
    headers: dict[bytes, bytes] = {}
    while line := stream.readline():
        if not line.strip():
            return headers
        name, _, value = line.partition(b":")
        headers[name.strip().lower()] = value.strip()
    raise EOFError("the last WARC record is cut off within its headers")


def _read_parquet(path: Path, raw: BinaryIO, text_field: str) -> Iterator[RawDocument]:
    """Yield the cells of one column of a parquet file, one document each; for a null cell the document's data is None.

    Args:
        path: the file, for error messages.
        raw: the same file, opened to read bytes.
        text_field: name of the column.

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
    for batch in table.iter_batches(batch_size=_PARQUET_BATCH_ROWS, columns=[text_field]):
        cells = batch.column(0).cast(pyarrow.large_binary())  # strings become their UTF-8 bytes
        for cell in cells:
            yield RawDocument(cell.as_py(), is_json=False)


def _is_text(column_type: pyarrow.DataType) -> bool:
    """Return whether a parquet column holds strings or bytes, with 32-bit or 64-bit ("large") offsets."""
    return (
        pyarrow.types.is_string(column_type)
        or pyarrow.types.is_large_string(column_type)
        or pyarrow.types.is_binary(column_type)
        or pyarrow.types.is_large_binary(column_type)
    )


def _decompressed(raw: BinaryIO, suffix: str) -> io.BufferedIOBase:
    """Return a stream of the decompressed bytes of a file.

    Args:
        raw: the file as it is on disk, opened to read bytes.
        suffix: last ending of its name, in lower case; for other endings than .gz, .xz and .zst the result is `raw`.
    """
    if suffix == ".gz":
        return io.BufferedReader(gzip.GzipFile(fileobj=raw), _READ_BYTES)
    if suffix == ".xz":
        return io.BufferedReader(lzma.LZMAFile(raw), _READ_BYTES)
    if suffix == ".zst":
        return io.BufferedReader(_ZstdFile(raw), _READ_BYTES)
    return cast(io.BufferedReader, raw)


class _ZstdFile(io.RawIOBase):
    """Readable stream of the decompressed bytes of a zstd file, which may consist of several frames.

    The reader of the zstandard package is not used: it treats a file that was cut off as complete.
    """

    def __init__(self, raw: BinaryIO) -> None:
        """Prepare to decompress from the current position of `raw`, which must be the beginning of a frame.

        `raw` stays open when this object is closed.
        """
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
        while not self._ready:  # a block of compressed bytes may give no output
            compressed = self._raw.read(_READ_BYTES)
            if not compressed and self._inside_frame:
                raise EOFError("the compressed data is cut off within a zstd frame")
            if not compressed:
                return 0
            self._ready = self._decompress(compressed)
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _decompress(self, compressed: bytes) -> bytes:
        """Return the decompressed form of `compressed`, the next bytes of the zstd file; it may be empty.

        These bytes may end in the middle of a frame, and may hold several frames. Each frame gets a new decompressor,
        because a decompressor of zstandard stops at the end of its frame.
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
        """Return a decompressor for one frame.

        It accepts frames with a compression window of up to 2 GiB, as `zstd --long=31` writes them.
        """
        return zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()
