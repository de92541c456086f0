"""Read raw documents from files, in a fixed order and without losing a byte.

Guarantee: the same input files give the same documents in the same order, wherever the files are. Files are ordered
by their name below the input path. A damaged file (cut-off compression, broken parquet) ends the stream with an error
that names the file: a corpus is never silently smaller than its inputs. What is left out is counted (`Counts`).

How: a reader yields undecoded bytes (`RawDocument`); worker processes decode them (`text_decoding.py`).
`inputs/formats.py` reads the formats, `inputs/archives.py` tar and zip. A file on S3 is first downloaded to a
temporary file; its store repeats failed requests.

Limits: a document is held in memory as a whole. Text is UTF-8; encodings are not guessed. A file on S3 needs its size
on the local disk while it is read.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from electra_dist.corpus.counts import Counts
from electra_dist.corpus.inputs.archives import ARCHIVES, ArchiveReader
from electra_dist.corpus.inputs.decompression import decompressed
from electra_dist.corpus.inputs.file_kinds import kind_of
from electra_dist.corpus.inputs.find_inputs import InputFile
from electra_dist.corpus.inputs.formats import DAMAGED_FILE_ERRORS, read_format
from electra_dist.corpus.inputs.table_files import NoTextColumn
from electra_dist.corpus.inputs.text_decoding import RawDocument
from electra_dist.errors import UserError
from electra_dist.store.atomic_files import open_regular
from electra_dist.store.interface import Store
from electra_dist.store.open_store import open_store


class DocumentStream:
    """Iterable over the undecoded documents of input files, in order, which also counts what is read and left out.

    Iterate over an instance once, in one thread.
    """

    def __init__(
        self,
        files: Sequence[InputFile],
        text_field: str = "text",
        endpoint_url: str | None = None,
        *,
        first_file: int = 0,
        with_fields: bool = False,
    ) -> None:
        """Open no file yet. `text_field` names a table's column with the text; `with_fields` keeps other cells.

        `first_file` is the position of the first of these files among all inputs.
        """
        self.counts = Counts()  # complete when the stream has ended
        self._files = files
        self._text_field = text_field
        self._endpoint_url = endpoint_url
        self._first_file = first_file
        self._with_fields = with_fields

    def __iter__(self) -> Iterator[RawDocument]:
        """Yield the documents with their places in the inputs.

        Raises UserError if a file cannot be read to its end, or if the column of the text is missing in a parquet or
        Arrow file, or in a table that the user gave by its name.
        """
        for position, file in enumerate(self._files, self._first_file):
            try:
                for number, document in enumerate(self._documents_of_file(file)):
                    document.file = position
                    document.number = number
                    yield document
                if file.size == 0:
                    self.counts.skip_input("empty_file", file.name)
                else:
                    self.counts.add_file(file.name, file.source, file.size)
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
        with local_path(file, self._endpoint_url) as path, open_regular(path) as raw:
            stream = decompressed(raw, kind.compression)
            if kind.format in ARCHIVES:
                archive = ArchiveReader(file.name, self._text_field, self.counts, with_fields=self._with_fields)
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
        self.counts.skip_input("no_text_column", file.name)


@contextlib.contextmanager
def local_path(file: InputFile, endpoint_url: str | None) -> Iterator[Path]:
    """Provide a local path of an input file; a file on S3 is downloaded, and deleted again after the `with` block."""
    if not file.is_remote:
        yield Path(file.location)
        return
    with tempfile.TemporaryDirectory(prefix="electra-input-") as folder:
        path = Path(folder) / "input"
        store = _store_of_inputs(file.location.removesuffix(f"/{file.name}"), endpoint_url)
        store.fetch(file.name, path)
        yield path


@functools.lru_cache(maxsize=1)
def _store_of_inputs(url: str, endpoint_url: str | None) -> Store:
    """Open the store of an input file; the next file mostly has the same one."""
    return open_store(url, endpoint_url)
