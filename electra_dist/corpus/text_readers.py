"""Read raw documents from files, in a fixed order and without losing a byte.

Guarantee: the same input files give the same documents in the same order, wherever the files are. Files are ordered
by their name below the input path. A damaged file (cut-off compression, broken parquet) ends the stream with an error
that names the file: a corpus is never silently smaller than its inputs. What is left out is counted (`StreamCounts`).

How: a reader yields undecoded bytes (`RawDocument`); worker processes decode them (`text_decoding.py`).
`inputs/formats.py` reads the formats, `inputs/archives.py` tar and zip. A file on S3 is first downloaded to a
temporary file; its store repeats failed requests.

Limits: a document is held in memory as a whole. Text is UTF-8; encodings are not guessed. A file on S3 needs its size
on the local disk while it is read.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from electra_dist.corpus.inputs.archives import ARCHIVES, ArchiveReader
from electra_dist.corpus.inputs.decompression import decompressed
from electra_dist.corpus.inputs.file_kinds import ending_of, kind_of
from electra_dist.corpus.inputs.find_inputs import InputFile, find_inputs, search_inputs
from electra_dist.corpus.inputs.formats import DAMAGED_FILE_ERRORS, read_format
from electra_dist.corpus.inputs.skipped_inputs import SkippedInputs
from electra_dist.corpus.inputs.table_files import NoTextColumn
from electra_dist.corpus.text_decoding import RawDocument
from electra_dist.errors import UserError
from electra_dist.store.regular_files import open_regular

# Builders of corpora import the search for inputs from this module, too.
__all__ = ["DocumentStream", "InputFile", "StreamCounts", "find_inputs", "search_inputs"]


class StreamCounts:
    """Counts of what a `DocumentStream` has read and left out; complete when the stream has ended."""

    def __init__(self) -> None:
        self.files: Counter[str] = Counter()  # files read, by ending
        self.file_bytes: Counter[str] = Counter()  # their bytes on disk, by ending
        self.source_files: Counter[str] = Counter()  # files read, by source
        self.source_bytes: Counter[str] = Counter()  # their bytes on disk, by source
        self.members: Counter[str] = Counter()  # members of archives that were read, by ending
        self.skipped = SkippedInputs()  # members of archives, empty files, tables without the column of the text

    def add_file(self, file: InputFile) -> None:
        """Add a file that was read to its end to the counts of its kind of file and of its source."""
        ending = ending_of(file.name)
        self.files[ending] += 1
        self.file_bytes[ending] += file.size
        self.source_files[file.source] += 1
        self.source_bytes[file.source] += file.size


class DocumentStream:
    """Iterable over the undecoded documents of input files, in order, which also counts what is read and left out.

    Iterate over an instance once, in one thread.
    """

    def __init__(self, files: Sequence[InputFile], text_field: str = "text", *, with_fields: bool = False) -> None:
        """Open no file yet. `text_field` names a table's column with the text; `with_fields` keeps other cells."""
        self.counts = StreamCounts()
        self._files = files
        self._text_field = text_field
        self._with_fields = with_fields

    def __iter__(self) -> Iterator[RawDocument]:
        for _, _, document in self.numbered():
            yield document

    def numbered(self) -> Iterator[tuple[int, int, RawDocument]]:
        """Yield (position of the file in `files`, position of the document in its file, document), both from 0.

        Raises UserError if a file cannot be read to its end, or if the column of the text is missing in a parquet or
        Arrow file, or in a table that the user gave by its name.
        """
        for position, file in enumerate(self._files):
            try:
                for number, document in enumerate(self._documents_of_file(file)):
                    yield position, number, document._replace(source=file.source)
                if file.size == 0:
                    self.counts.skipped.add("empty_file", file.name)
                else:
                    self.counts.add_file(file)
            except NoTextColumn as error:
                self._skip_table(file, error)
            except DAMAGED_FILE_ERRORS as error:
                raise UserError(
                    f"{file.location}: cannot be read to its end ({error}); replace the file or leave it out"
                ) from None

    def _documents_of_file(self, file: InputFile) -> Iterator[RawDocument]:
        """Yield the documents of one file, decompressed but not decoded."""
        kind = kind_of(file.name)
        assert kind is not None
        with local_path(file) as path, open_regular(path) as raw:
            stream = decompressed(raw, kind.compression)
            if kind.format in ARCHIVES:
                archive = ArchiveReader(
                    file.name,
                    self._text_field,
                    self.counts.members,
                    self.counts.skipped,
                    with_fields=self._with_fields,
                )
                yield from archive.documents(stream, kind.format)
            else:
                yield from read_format(kind.format, stream, self._text_field, with_fields=self._with_fields)

    def _skip_table(self, file: InputFile, error: NoTextColumn) -> None:
        """Count a table without the text's column as left out, or raise UserError if it was meant to be read.

        A CSV or TSV table in an input folder is counted, because it may only describe the texts in the folder. A
        parquet or Arrow file, or a table that the user gave by its name, is an error.
        """
        if file.is_given or file.format in ("parquet", "arrow"):
            raise UserError(f"{file.location}: {error}") from None
        self.counts.skipped.add("no_text_column", file.name)


@contextlib.contextmanager
def local_path(file: InputFile) -> Iterator[Path]:
    """Provide a local path of an input file; a file on S3 is downloaded, and deleted again after the `with` block."""
    if file.store is None:
        yield file.path
        return
    with tempfile.TemporaryDirectory(prefix="electra-input-") as folder:
        path = Path(folder) / "input"
        file.store.fetch(file.name, path, must_exist=True)
        yield path
