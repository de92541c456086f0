"""Record which steps of a corpus build are finished, so that a build can be killed, resumed and divided into parts.

Guarantee: a step is finished if its record exists. A record is written after everything that it names, so it never
names a file that is missing. Records and files depend on the parameters and the inputs alone: parts of a build that
do the same step at once write the same bytes. A folder with an unfinished build of other parameters refuses the build,
so that a corpus is never a mixture of two builds.

| file in progress/ | what it records |
| --- | --- |
| build.json | the parameters of the build |
| notes.json | settings that do not affect the shards: whether origin files are written, and licences |
| groups/NNNNNN.json, spills/NNNNNN-NNNNNN | an input group was read: its counts, and its documents |
| order.json | all groups were read: the number of buckets, and how often each source is used |
| buckets/NNNNNN.json, buckets/NNNNNN.heldout.npy | a bucket's shards were written: counts, held-out rows |
| buckets/NNNNNN.heldout.parquet | the documents of the held-out rows |
| parts/I-of-N | part I of N has written its buckets |

Each record is a line of JSON with a line of its SHA-256 after it, because its numbers decide what the corpus holds.
The files of the table are deleted after corpus.json has been written.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import numpy as np
import pyarrow
from pydantic import Field, TypeAdapter

from electra_dist.config import Section
from electra_dist.corpus.build_report import SourceNotes
from electra_dist.corpus.builder.shuffle import NUM_CELLS
from electra_dist.corpus.counts import Counts
from electra_dist.corpus.origins import ORIGINS_FOLDER, OriginFile, table_from_bytes, table_to_bytes
from electra_dist.data.manifest import (
    MANIFEST_KEY,
    CorpusManifest,
    ShardEntry,
    read_corpus_vocabulary,
    read_manifest,
    read_named_vocabulary,
    write_corpus_vocabulary,
)
from electra_dist.errors import ManifestMismatch, UserError
from electra_dist.store.atomic_files import NamedDigest
from electra_dist.store.interface import Store, in_parallel
from electra_dist.store.json_file import (
    DamagedJson,
    canonical_json,
    damaged_file,
    first_difference,
    parse_json_object,
    validate_json,
)
from electra_dist.tokenizer import VOCAB_FILE, Vocabulary

_SHARDS = "shard-"  # beginning of the shards' names
_FOLDER = "progress/"
_BUILD_KEY = _FOLDER + "build.json"
_NOTES_KEY = _FOLDER + "notes.json"
_ORDER_KEY = _FOLDER + "order.json"
_GROUPS = _FOLDER + "groups/"
_BUCKETS = _FOLDER + "buckets/"
_PARTS = _FOLDER + "parts/"
_RECORD_NAME = re.compile(r"[0-9]{6,}\.json")
# The files of a build in progress/ that `clear` deletes before build.json and notes.json.
_OWN_NAME = re.compile(
    r"order\.json|groups/[0-9]{6,}\.json|spills/[0-9]{6,}-[0-9]{6,}|parts/[0-9]+-of-[0-9]+"
    r"|buckets/[0-9]{6,}\.(json|heldout\.npy|heldout\.parquet)"
)
_PART_NAME = re.compile(r"[0-9]+-of-[0-9]+")
_Record = TypeVar("_Record", bound=Section)
_Content = TypeVar("_Content")


class ReadGroup(Section):
    """Record that a worker has read some consecutive input files and written their documents to spill files."""

    number: int = Field(description="position of the group, from 0")
    files_digest: str = Field(description="SHA-256 of the names, sizes and sources of its files, in hexadecimal")
    modified: str = Field(description="SHA-256 of the times of modification of its local files, in hexadecimal")
    documents_digest: str = Field(description="BLAKE2b digest of its documents, undecoded, in hexadecimal")
    spills: list[str] = Field(description="keys of its spill files")
    counts: Counts = Field(description="files and documents read, and inputs left out")


class BuildOrder(Section):
    """Content of order.json: the number of ranges of the shuffled documents, and how often each source is used."""

    num_inputs: int = Field(description="number of input files")
    inputs_sha256: str = Field(description="SHA-256 of their names and sizes, in hexadecimal")
    num_groups: int = Field(description="number of input groups")
    num_buckets: int = Field(
        ge=1, le=NUM_CELLS, description="number of buckets, in each of which a worker makes shards"
    )
    shards_per_bucket: int = Field(description="shards among which the rows of a bucket are divided")
    epochs: dict[str, float] = Field(description="how often the documents of each source are used, on average")
    search: Counts = Field(description="what the search for input files left out, for build.json")


class BuildNotes(Section):
    """Content of notes.json: settings of a build that affect neither the shards nor corpus.json."""

    with_origins: bool = Field(default=False, description="whether the build writes origin files (corpus.origins)")
    wrote_vocabulary: bool = Field(
        default=False, description="whether the build wrote vocab.txt, rather than found it in its output"
    )
    input_sources: list[str] = Field(
        default=[], description="sources of the input files, in the order of their first files"
    )
    sources: SourceNotes = Field(
        default=SourceNotes(), description="licences of the sources and counts of `corpus prepare`, for build.json"
    )
    max_unk_rate: float = Field(default=1.0, description="largest share of [UNK] in a source (corpus.max_unk_rate)")


class FinishedBucket(Section):
    """Record that the shards of a bucket, a range of the shuffled documents, are written."""

    number: int = Field(description="position of the bucket in the corpus, from 0")
    entries: list[ShardEntry] = Field(description="entries of its shards for corpus.json, in order")
    counts: Counts = Field(description="its documents, by source, and its rows")
    origins: list[OriginFile] = Field(
        default=[], description="entries of the origin files of the shards; empty without origin files"
    )
    heldout_sha256: str | None = Field(
        default=None,
        description="SHA-256 of buckets/NNNNNN.heldout.npy in hexadecimal; null: there is no such file",
    )
    heldout_origins_sha256: str | None = Field(
        default=None,
        description="SHA-256 of buckets/NNNNNN.heldout.parquet in hexadecimal; null: there is no such file",
    )

    @property
    def heldout_rows(self) -> int:
        """Return the number of rows in buckets/NNNNNN.heldout.npy; 0: the file does not exist."""
        return self.counts.rows["heldout"]["rows"] if "heldout" in self.counts.rows else 0


class BuildRecords:
    """Reader and writer of the records of a build's finished steps, in the folder progress/ of its output."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def take_finished_corpus(self, parameters: dict[str, Any], inputs: dict[str, Any]) -> CorpusManifest | None:
        """Return the manifest of a finished corpus, and delete what is left in progress/; None if it is not finished.

        `parameters` (`BuildRequest.parameters`) and `inputs` (`BuildRequest.inputs_identity`) identify the corpus.
        Raises ManifestMismatch if the store holds a finished corpus of other parameters or inputs.
        """
        if not self._store.exists(MANIFEST_KEY):
            return None
        manifest = read_manifest(self._store)
        stored = {**manifest.builder, "tokenizer": manifest.tokenizer.sha256}
        self._refuse_other_parameters(stored, parameters, "a finished corpus")
        same_inputs = all(stored.get(key) == value for key, value in inputs.items())
        if not same_inputs:
            raise ManifestMismatch(
                f"{self._store.url}: holds a finished corpus that was built from other inputs ({MANIFEST_KEY} records "
                "other names or sizes of files); delete that corpus or choose another --output"
            )
        self.clear()
        return manifest

    def begin(self, parameters: dict[str, Any], vocabulary_text: str, notes: BuildNotes) -> bool:
        """Begin or resume a build; return whether it writes origin files, which name the documents of each row.

        The first call records the parameters and writes vocab.txt. Later calls with other parameters are refused
        (ManifestMismatch). The first call also decides whether there are origin files, so that all shards have them or
        none. All other notes are those of the newest call. Raises UserError if the store holds another vocab.txt, or
        shards without records or corpus.json.
        """
        if self._store.exists(_BUILD_KEY):
            self._refuse_other_parameters(self.parameters(), parameters, "a half-built corpus")
            earlier = self.notes()
            notes = notes.model_copy(
                update={"with_origins": earlier.with_origins, "wrote_vocabulary": earlier.wrote_vocabulary}
            )
            self._write(_NOTES_KEY, notes)
            return notes.with_origins
        self._refuse_foreign_shards()
        wrote_vocabulary = write_corpus_vocabulary(self._store, vocabulary_text)
        self._write(_NOTES_KEY, notes.model_copy(update={"wrote_vocabulary": wrote_vocabulary}))
        self._store.write(_BUILD_KEY, _with_digest(canonical_json(parameters)))
        return notes.with_origins

    def is_begun(self) -> bool:
        """Return whether the store holds an unfinished build; `begin` then refuses other parameters."""
        return self._store.exists(_BUILD_KEY)

    def give_up(self) -> None:
        """Delete all records of the build, and vocab.txt if the build wrote it; any other build may then begin."""
        wrote_vocabulary = self.notes().wrote_vocabulary
        self.clear()
        if wrote_vocabulary:
            self._store.delete(VOCAB_FILE)

    def parameters(self) -> dict[str, Any]:
        """Return the parameters of the unfinished build in the store; raise UserError if there is none."""
        if not self._store.exists(_BUILD_KEY):
            raise UserError(
                f"{self._store.url}: holds no unfinished build; give the --output of `corpus build --part`"
            )
        return self._store.read_verified(_BUILD_KEY, self._parse_parameters)

    def _parse_parameters(self, data: bytes) -> dict[str, Any]:
        try:
            parameters = parse_json_object(_without_digest(data))
            if not isinstance(parameters.get("tokenizer"), str):
                raise DamagedJson("it names no tokenizer")
        except DamagedJson as error:
            raise self.damaged_parameters(error) from None
        return parameters

    def notes(self) -> BuildNotes:
        """Return the notes of the build: the settings that affect neither the shards nor corpus.json."""
        return self._read(_NOTES_KEY, BuildNotes)

    def damaged_parameters(self, error: DamagedJson) -> UserError:
        """Return, not raise, the error that the recorded parameters (progress/build.json) are damaged."""
        return damaged_file(
            f"{self._store.url}/{_BUILD_KEY}", error, f"delete {_FOLDER} and the shards beside it, and build again"
        )

    def record_group(self, group: ReadGroup) -> None:
        """Record that a group of input files was read. The caller has written its documents to spill files before."""
        self._write(_group_key(group.number), group)

    def groups(self, known: Collection[int] = ()) -> dict[int, ReadGroup]:
        """Return the records of the groups of input files that were read, by number, without those in `known`."""
        keys = [_group_key(number) for number in self.group_numbers() if number not in known]
        groups = in_parallel(lambda key: self._read(key, ReadGroup), keys)
        return {group.number: group for group in groups}

    def group_numbers(self) -> list[int]:
        """Return the numbers of the groups of input files that any part has read, ascending, from one listing."""
        return [int(key.removeprefix(_GROUPS).removesuffix(".json")) for key in self._record_keys(_GROUPS)]

    def has_group(self, number: int) -> bool:
        """Return whether this process or another part of the build has read a group of input files."""
        return self._store.exists(_group_key(number))

    def record_order(self, order: BuildOrder) -> None:
        """Write order.json, after all input groups were read. Several parts may write it, with the same bytes."""
        self._write(_ORDER_KEY, order)

    def order(self) -> BuildOrder | None:
        """Return the number of buckets and the use of each source; None as long as not all input files are read."""
        return self._read(_ORDER_KEY, BuildOrder) if self._store.exists(_ORDER_KEY) else None

    def record_bucket(
        self, bucket: FinishedBucket, heldout_rows: np.ndarray, heldout_origins: pyarrow.Table | None = None
    ) -> None:
        """Record that the shards of a bucket (a range of the documents) are written, and write its held-out rows.

        `bucket.counts` must count `heldout_rows`, [rows, seq_len], of which there may be none. `heldout_origins` names
        the documents of these rows; None if the build writes no origin files.
        """
        if len(heldout_rows) and heldout_origins is not None:
            data = table_to_bytes(heldout_origins)
            self._store.write(_heldout_key(bucket.number, "parquet"), data)
            bucket = bucket.model_copy(update={"heldout_origins_sha256": hashlib.sha256(data).hexdigest()})
        if len(heldout_rows):
            buffer = io.BytesIO()
            np.save(buffer, heldout_rows, allow_pickle=False)
            self._store.write(_heldout_key(bucket.number, "npy"), buffer.getvalue())
            digest = hashlib.sha256(buffer.getvalue()).hexdigest()
            bucket = bucket.model_copy(update={"heldout_sha256": digest})
        # The record is written last: its existence marks the shards and the held-out rows as finished.
        self._write(f"{_BUCKETS}{bucket.number:06d}.json", bucket)

    def buckets(self) -> dict[int, FinishedBucket]:
        """Return the records of the buckets (ranges of documents) whose shards are finished: number -> record.

        A bucket is left out if a shard or origin file is missing or does not have the recorded size; the bucket must
        then be written again.
        """
        buckets = in_parallel(lambda key: self._read(key, FinishedBucket), self._record_keys(_BUCKETS))
        sizes = {**self._store.sizes(_SHARDS), **self._store.sizes(ORIGINS_FOLDER)} if buckets else {}
        return {bucket.number: bucket for bucket in buckets if _has_files(bucket, sizes)}

    def heldout_rows(self, bucket: FinishedBucket) -> np.ndarray:
        """Return the held-out rows of a bucket, [rows, seq_len] uint16 or uint32; its record must count some."""
        from electra_dist.data.shard import parse_array  # loads torch, which `corpus merge` needs later than a path

        return self._read_named(_heldout_key(bucket.number, "npy"), bucket.heldout_sha256, parse_array)

    def heldout_origins(self, bucket: FinishedBucket) -> pyarrow.Table:
        """Return the table of the documents of a bucket's held-out rows; the build must write origin files."""
        key = _heldout_key(bucket.number, "parquet")
        return self._read_named(key, bucket.heldout_origins_sha256, table_from_bytes)

    def _read_named(self, key: str, sha256: str | None, parse: Callable[[bytes], _Content]) -> _Content:
        """Read a file whose digest a record names, and return what `parse` makes of it.

        Raises ManifestMismatch if the digest differs or `parse` raises ValueError.
        """

        def parse_verified(data: bytes) -> _Content:
            try:
                if hashlib.sha256(data).hexdigest() != sha256:
                    raise ValueError("its SHA-256 is not the recorded one")
                return parse(data)
            except ValueError as error:
                raise ManifestMismatch(
                    f"{self._store.url}/{key}: damaged, because {error}; delete progress/ in this folder and start "
                    f"the build again"
                ) from None

        return self._store.read_verified(key, parse_verified)

    def record_part(self, label: str) -> None:
        """Record that a part of the build, named by a label such as "2/4", has written all of its shards."""
        self._store.write(_PARTS + label.replace("/", "-of-"), b"")

    def parts(self) -> list[str]:
        """Return the labels, such as "2/4", of the parts of the build that have written all of their shards."""
        names = [key.removeprefix(_PARTS) for key in self._store.list(_PARTS)]
        return [name.replace("-of-", "/") for name in names if _PART_NAME.fullmatch(name)]

    def clear(self) -> None:
        """Delete the files of the build in progress/; shards, vocab.txt, corpus.json and files of the user stay.

        build.json, which holds the parameters, is deleted after the records of all steps, so that no steps of an
        earlier build are ever left without it. A notes.json that remains is overwritten by the next build.
        """
        keys = self._store.list(_FOLDER)
        self._store.delete_all([key for key in keys if _OWN_NAME.fullmatch(key.removeprefix(_FOLDER))])
        self._store.delete(_BUILD_KEY)
        self._store.delete(_NOTES_KEY)

    def _record_keys(self, folder: str) -> list[str]:
        """Return the keys of the records in groups/ or buckets/; files with other names are passed over."""
        keys = self._store.list(folder)
        return [key for key in keys if _RECORD_NAME.fullmatch(key.removeprefix(folder))]

    def _write(self, key: str, record: Section) -> None:
        self._store.write(key, _with_digest(record.model_dump_json()))

    def _read(self, key: str, kind: type[_Record]) -> _Record:
        """Return the record in the object `key`; raise ManifestMismatch if it is damaged or of another version."""

        def parse(data: bytes) -> _Record:
            try:
                return validate_json(TypeAdapter(kind), parse_json_object(_without_digest(data)))
            except DamagedJson as error:
                raise ManifestMismatch(
                    f"{self._store.url}/{key}: not a record of this version's builds, because {error}; delete "
                    f"{_FOLDER} in this folder and start the build again"
                ) from None

        return self._store.read_verified(key, parse)

    def _refuse_foreign_shards(self) -> None:
        """Raise UserError if another program wrote shards here, which a build would overwrite."""
        if any(key.endswith(".tar") for key in self._store.list(_SHARDS)):
            raise UserError(
                f"{self._store.url}: holds shards but no corpus.json; run `electra-dist corpus index` to write one, "
                "or choose another --output"
            )

    def _refuse_other_parameters(self, stored: dict[str, Any], given: dict[str, Any], description: str) -> None:
        """Raise ManifestMismatch if a given parameter differs from the stored one, or is not stored."""
        values = json.loads(canonical_json(given))
        # Only a user who has set nothing else sees chunk_bytes, which follows from corpus.shard_size_mb.
        names = sorted(given, key=lambda name: name == "chunk_bytes")
        difference = first_difference(
            {name: stored.get(name) for name in names}, {name: values[name] for name in names}
        )
        if difference is not None:
            key, stored_value, value = difference
            raise ManifestMismatch(
                f"{self._store.url}: holds {description} with {key} = {stored_value}, but this build has "
                f"{key} = {value}; delete that corpus or choose another --output"
            )


def read_output_vocabulary(store: Store) -> Vocabulary:
    """Return the vocabulary in the output of a build; its digest must be the one that the build has recorded.

    A finished corpus records the digest in corpus.json, a half-built one in progress/build.json. Without either file,
    no build wrote the vocabulary, and only its form is checked.
    """
    if store.exists(MANIFEST_KEY):
        return read_corpus_vocabulary(store, read_manifest(store).tokenizer)
    expected = None
    if store.exists(_BUILD_KEY):
        expected = NamedDigest(
            sha256=str(BuildRecords(store).parameters()["tokenizer"]),
            named_by=f"{store.url}/{_BUILD_KEY}",
            next_step="restore the file or give it with --vocab, because the finished shards need it",
        )
    return read_named_vocabulary(store, VOCAB_FILE, expected)


def _has_files(bucket: FinishedBucket, sizes: Mapping[str, int]) -> bool:
    """Return whether all shards and origin files of a bucket have the recorded sizes; digests are not checked.

    `sizes` maps the keys of the store to the bytes of their objects.
    """
    recorded = [(file.name, file.bytes) for file in bucket.entries]
    recorded += [(file.name, file.bytes) for file in bucket.origins]
    return all(sizes.get(name) == num_bytes for name, num_bytes in recorded)


def _with_digest(line: str) -> bytes:
    return f"{line}\n{hashlib.sha256(line.encode()).hexdigest()}\n".encode()


def _without_digest(data: bytes) -> bytes:
    line, _, digest = data.partition(b"\n")
    if digest.rstrip(b"\n") != hashlib.sha256(line).hexdigest().encode():
        raise DamagedJson("its SHA-256 is not the one in its second line")
    return line


def _group_key(number: int) -> str:
    return f"{_GROUPS}{number:06d}.json"


def _heldout_key(number: int, ending: str) -> str:
    return f"{_BUCKETS}{number:06d}.heldout.{ending}"
