"""Write and read the origin files of a corpus, which name the documents from which each row was made.

Each shard has one parquet file in the folder origins/ beside the shards:

| column | content |
| --- | --- |
| `row` | number of the row in the shard, from 0 |
| `start` | position of the example's first token, [CLS], in the row, from 0 |
| `file`, `number` | name of the input file, and number of the document in it, from 0 |
| `source` | source of the file, a key of `sources` in build.json |
| `id` | id of the document (JSON field or table column `id`); null if it has no id |
| `record_source` | field `metadata.source` of the document's record, which `corpus prepare` writes; null if missing |

There is a line for each training example, in the order of the rows. An example ends where the next example of its row
begins, at the first [PAD], or at the end of the row.

Guarantee: the origin files are a function of the inputs and the settings of the build, as the shards are; equal
examples give equal bytes with equal versions of pyarrow. origins.json lists the origin files with their digests and
holds the fingerprint of the corpus. An origin file is used only if its bytes match the digest, and the corpus the
fingerprint. The corpus itself does not depend on its origin files.

How: a search first marks lines of an origin file (`lines_of_source`, `lines_of_document`) and then looks up their rows
(`rows_of_lines`); these are exactly the rows with an example of the document or of the source.

Limits: a corpus has no origin files if it was indexed, or built with `corpus.origins: false`; origins.json is then
missing.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal, NamedTuple

import numpy as np
import pyarrow
import pyarrow.compute
import pyarrow.parquet
from numpy.typing import NDArray
from pydantic import Field

from electra_dist.config import Section
from electra_dist.corpus.inputs.file_kinds import encodable
from electra_dist.corpus.inputs.text_decoding import DocumentNames
from electra_dist.data.manifest import CorpusManifest, Sha256
from electra_dist.errors import ManifestMismatch
from electra_dist.store.interface import Store
from electra_dist.store.json_file import find_document

SCHEMA = pyarrow.schema(
    [
        pyarrow.field("row", pyarrow.int32(), nullable=False),
        pyarrow.field("start", pyarrow.int32(), nullable=False),
        pyarrow.field("file", pyarrow.string(), nullable=False),
        pyarrow.field("number", pyarrow.int64(), nullable=False),
        pyarrow.field("source", pyarrow.string(), nullable=False),
        pyarrow.field("id", pyarrow.string()),
        pyarrow.field("record_source", pyarrow.string()),
    ]
)
_COMPRESSION_LEVEL = 9  # of zstd; a shard's table takes milliseconds at any level
ORIGINS_KEY = "origins.json"
ORIGINS_FOLDER = "origins/"
_NEXT_STEP = "restore it, or delete origins.json, which no run needs"
Mask = NDArray[np.bool_]  # [lines of an origin file]: whether the line belongs to what is searched for


class Origin(NamedTuple):
    """Where a document of a corpus comes from: its input file, its number there, its source, and its own names."""

    file: str  # name of the document's input file
    number: int  # number of the document in the file, from 0
    source: str  # source of the file, a key of `sources` in build.json
    names: DocumentNames  # id and source that the document's own record has


def table_of_examples(places: np.ndarray, origins: Sequence[Origin]) -> pyarrow.Table:
    """Make a shard's table of origins: one line for each training example, with the document that it was made from.

    `places` is int64 [examples, 3], sorted by row: the row, the position of the example's first token in the row, and
    the index of its document in `origins`.
    """
    documents = [origins[index] for index in places[:, 2].tolist()]
    columns = [
        places[:, 0],
        places[:, 1],
        [document.file for document in documents],
        [document.number for document in documents],
        [document.source for document in documents],
        [document.names.id for document in documents],
        [document.names.source for document in documents],
    ]
    arrays = [pyarrow.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)]
    return pyarrow.Table.from_arrays(arrays, schema=SCHEMA)


def join_tables(parts: Iterable[tuple[pyarrow.Table, int]]) -> pyarrow.Table:
    """Concatenate the tables of origins of consecutive blocks of rows, and renumber the rows from 0.

    `parts` has (table, number of rows) for each block; a table names the document of each training example of its
    rows.
    """
    tables = [SCHEMA.empty_table()]
    first_row = 0
    for table, num_rows in parts:
        tables.append(_shifted(table, first_row))
        first_row += num_rows
    return pyarrow.concat_tables(tables)


def rows_of_table(table: pyarrow.Table, first_row: int, num_rows: int) -> pyarrow.Table:
    """Return the lines of a table of origins for `num_rows` rows from `first_row` on; these rows become 0, 1, ...

    `table` has a line for each training example and is sorted by row.
    """
    start, end = np.searchsorted(table.column("row").to_numpy(), [first_row, first_row + num_rows])
    return _shifted(table.slice(int(start), int(end - start)), -first_row)


def _shifted(table: pyarrow.Table, offset: int) -> pyarrow.Table:
    """Add `offset` to all row numbers of a table."""
    rows = pyarrow.array(table.column("row").to_numpy() + offset, pyarrow.int32())
    return table.set_column(0, SCHEMA.field("row"), rows)


def table_to_bytes(table: pyarrow.Table) -> bytes:
    """Return a table as the bytes of a zstd-compressed parquet file; equal tables give equal bytes."""
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(
        table.combine_chunks(),
        buffer,
        compression="zstd",
        compression_level=_COMPRESSION_LEVEL,
        use_dictionary=["file", "source", "id", "record_source"],
        column_encoding={"row": "DELTA_BINARY_PACKED", "start": "PLAIN", "number": "DELTA_BINARY_PACKED"},
        write_statistics=False,
        store_schema=False,
    )
    return buffer.getvalue()


def table_from_bytes(data: bytes) -> pyarrow.Table:
    """Return the table that `table_to_bytes` has written; raise ValueError if the bytes are no such table."""
    try:
        # Without threads of Arrow's: one that still held `data` when the interpreter ends would abort the process.
        file = pyarrow.parquet.ParquetFile(pyarrow.BufferReader(data), pre_buffer=False)
        return file.read(use_threads=False).select(SCHEMA.names).cast(SCHEMA)
    except (pyarrow.ArrowException, KeyError, OSError, ValueError) as error:
        raise ValueError(str(error)) from None


class OriginFile(Section):
    """Entry of origins.json for the origin file of one shard, which names the documents of each row."""

    shard: str = Field(description="name of the shard")
    name: str = Field(description="key of the origin file, relative to corpus.json")
    examples: Annotated[int, Field(ge=0)] = Field(
        description="lines of the origin file: one for each example of the shard"
    )
    bytes: Annotated[int, Field(ge=0)] = Field(description="size of the origin file in bytes")
    sha256: Sha256 = Field(description="SHA-256 of the origin file in hexadecimal")


class OriginsManifest(Section):
    """Content of origins.json: lists the files that say for each shard from which inputs its texts came."""

    format: Literal[1] = Field(default=1, description="version of the file's format")
    corpus: Sha256 = Field(description="fingerprint of the corpus to which the origin files belong")
    files: tuple[OriginFile, ...] = Field(description="entries of the origin files, in the order of the shards")


def put_origins(store: Store, shard: str, table: pyarrow.Table) -> OriginFile:
    """Write the origin file of a shard, which names the documents of its rows; return its entry for origins.json.

    `shard` is the name of the shard, such as shard-000007.tar; the rows in `table` are numbered from 0.
    """
    name = f"{ORIGINS_FOLDER}{shard.removesuffix('.tar')}.parquet"
    data = table_to_bytes(table)
    store.write(name, data)
    return OriginFile(
        shard=shard, name=name, examples=len(table), bytes=len(data), sha256=hashlib.sha256(data).hexdigest()
    )


def write_origins(store: Store, manifest: CorpusManifest, files: list[OriginFile]) -> None:
    """Write origins.json, the list of a corpus's origin files. The caller must have written these files before."""
    origins = OriginsManifest(corpus=manifest.fingerprint, files=tuple(files))
    store.write(ORIGINS_KEY, (json.dumps(origins.model_dump(mode="json"), indent=1) + "\n").encode())


class Origins:
    """Reader of a corpus's origin files, which name the documents of each row; `open_origins` makes one."""

    def __init__(self, store: Store, entries: dict[str, OriginFile]) -> None:
        self._store = store
        self._entries = entries

    @property
    def files(self) -> list[OriginFile]:
        """Return the entries of all origin files, in the order of the shards."""
        return list(self._entries.values())

    def table(self, shard: str) -> pyarrow.Table:
        """Return the documents from which the rows of a shard were made, as a table with the columns of `SCHEMA`.
        Raises ManifestMismatch if the file is damaged.
        """
        entry = self._entries[shard]
        return self._store.verified(entry.name, lambda: self._read(entry))

    def _read(self, entry: OriginFile) -> pyarrow.Table:
        data = self._store.read(entry.name)
        if hashlib.sha256(data).hexdigest() != entry.sha256:
            raise ManifestMismatch(
                f"{self._store.url}/{entry.name}: damaged: its SHA-256 is not that of {ORIGINS_KEY}; {_NEXT_STEP}"
            )
        try:
            return table_from_bytes(data)
        except ValueError as error:
            raise ManifestMismatch(
                f"{self._store.url}/{entry.name}: not an origin file: {error}; {_NEXT_STEP}"
            ) from None


def open_origins(store: Store, manifest: CorpusManifest) -> Origins | None:
    """Return the reader of a corpus's origin files (the documents of each row); None if it has no origins.json.

    Raises ManifestMismatch if origins.json is damaged or belongs to another corpus.
    """
    origins = find_document((store, ORIGINS_KEY), OriginsManifest, _NEXT_STEP, ManifestMismatch)
    if origins is None:
        return None
    entries = {file.shard: file for file in origins.files}
    if origins.corpus != manifest.fingerprint or entries.keys() != {shard.name for shard in manifest.shards}:
        url = f"{store.url}/{ORIGINS_KEY}"
        raise ManifestMismatch(f"{url}: belongs to another corpus (fingerprint {origins.corpus}); {_NEXT_STEP}")
    return Origins(store, entries)


class RowDocument(NamedTuple):
    """Document from which one training example of a row was made, and where the example begins."""

    start: int  # position of the example's first token in the row, from 0
    source: str  # source that the document's record names; without one, the source of its input file
    document: str  # id of the document; without one, FILE#NUMBER as in `place`
    place: str  # FILE#NUMBER: name of the input file, and number of the document in this file, from 0


def lines_of_source(table: pyarrow.Table, source: str) -> Mask:
    """Mark the training examples whose document is from a source, such as "wiki" or "texts/wiki".

    `table` has a line for each example. `source` is a name in build.json or in the documents' `metadata.source`; the
    last folders of a name are enough.
    """
    name = encodable(source)  # as a build writes the name of a folder that is not UTF-8
    return _is_source(table.column("source"), name) | _is_source(table.column("record_source"), name)


def _is_source(names: pyarrow.ChunkedArray, source: str) -> Mask:
    """Return for each name whether it equals `source`, or ends with "/" and `source`; False for null."""
    is_equal = pyarrow.compute.equal(names, source)
    ends_so = pyarrow.compute.ends_with(names, pattern="/" + source)
    return _without_nulls(pyarrow.compute.or_(is_equal, ends_so))


def lines_of_document(table: pyarrow.Table, document: str) -> Mask:
    """Mark the training examples, the lines of `table`, that were made from a document.

    `document` is the id in its record, or FILE#NUMBER with its number in the input file, from 0.
    """
    name = encodable(document)  # as a build writes the name of a file that is not UTF-8
    is_document = _without_nulls(pyarrow.compute.equal(table.column("id"), name))
    file, _, number = name.rpartition("#")
    if number.isdecimal():
        is_file = _without_nulls(pyarrow.compute.equal(table.column("file"), file))
        is_document |= is_file & (table.column("number").to_numpy() == int(number))
    return is_document


def _without_nulls(values: pyarrow.ChunkedArray) -> Mask:
    return np.array(pyarrow.compute.fill_null(values, False), bool)


def rows_of_lines(table: pyarrow.Table, lines: Mask) -> NDArray[np.int64]:
    """Return the rows that hold a marked training example: their numbers in the shard, ascending, each once."""
    return np.unique(table.column("row").to_numpy()[lines]).astype(np.int64)


def documents_of_rows(
    table: pyarrow.Table, rows: NDArray[np.integer], lines: Mask | None = None
) -> dict[int, list[RowDocument]]:
    """Return the documents of the given rows of a shard: row -> its documents from left to right.

    `table` has a line for each training example, so a document with several examples in a row occurs several times.
    `lines` marks the examples that count (None: all); a row without a marked one has no entry.
    """
    wanted = np.isin(table.column("row").to_numpy(), rows)
    if lines is not None:
        wanted &= lines
    documents: dict[int, list[RowDocument]] = {}
    for line in table.filter(pyarrow.array(wanted)).to_pylist():
        place = f"{line['file']}#{line['number']}"
        source = line["record_source"] or line["source"]
        document = RowDocument(line["start"], source, line["id"] or place, place)
        documents.setdefault(line["row"], []).append(document)
    return documents


def sources_of_table(table: pyarrow.Table) -> set[str]:
    """Return the names of all sources in `table`: those of input files, and those that documents' own records name."""
    names: set[str] = set()
    for column in ("source", "record_source"):
        names.update(table.column(column).unique().to_pylist())
    return {name for name in names if name is not None}
