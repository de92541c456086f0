"""Record which shards of a corpus build are finished, so that a killed build can resume.

Guarantee: a shard is finished if its record `progress/NNNNNN.json` exists. The record is written after the shard and
its held-out rows, so it never names a file that is missing. `progress/build.json` holds the parameters of the build.
If a folder holds an unfinished build with other parameters, text or vocabulary, the new build is refused, so that a
corpus is never a mixture of two builds.

How: the inputs are read in groups of consecutive documents, called chunks. A record holds the number of the chunk
after which the shard ends, and the digest of all documents up to that point. A build that resumes reads the inputs
again up to that point and compares the digest. Input after that point may have changed, so a damaged file can be
replaced and the build resumed. The records are deleted after corpus.json has been written.
"""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
from pydantic import Field, ValidationError

from electra_dist.config import Section, canonical_json
from electra_dist.data.corpus_manifest import MANIFEST_KEY, CorpusManifest, ShardEntry, read_manifest
from electra_dist.data.stored_arrays import parse_array
from electra_dist.errors import ManifestMismatch, UserError
from electra_dist.store.interface import Store
from electra_dist.store.json_file import DamagedJson, first_fault, parse_json_object

_FOLDER = "progress/"
_BUILD_KEY = _FOLDER + "build.json"


class FinishedShard(Section):
    """Record of one finished shard of a corpus build, stored as progress/NNNNNN.json until the corpus is complete.

    A build that was killed resumes after the last shard with a record. The digest in it shows whether the inputs up to
    the end of the shard are still the same.
    """

    number: int = Field(description="position of the shard in the corpus, from 0")
    entry: ShardEntry | None = Field(
        description="entry of the shard for corpus.json; null if its documents gave no training row"
    )
    end_chunk: int = Field(description="number of the first chunk of documents after this shard")
    stream_digest: str = Field(description="BLAKE2b digest of all documents before end_chunk, in hexadecimal")
    heldout_rows: int = Field(description="rows in progress/NNNNNN.heldout.npy; 0: the file does not exist")
    documents: dict[str, int] = Field(
        description="documents read (in), used, held out (heldout), and skipped, by kind"
    )
    train: dict[str, int] = Field(description="counts of the shard: text_bytes, text_tokens, examples, rows, tokens")
    heldout: dict[str, int] = Field(description="the same counts of the held-out rows")
    sources: dict[str, dict[str, int]] | None = Field(
        default=None,
        description="counts of the documents of each source for build.json (document_counts.py); null in a record of "
        "an earlier version",
    )


class BuildProgress:
    """Reader and writer of the folder progress/ in the output of a corpus build, from which a killed build resumes.

    The folder holds the build's parameters and, for each finished shard, a record (`FinishedShard`) and the held-out
    rows of the shard's documents. One build at a time may write to a store.
    """

    def __init__(
        self, store: Store, parameters: dict[str, Any], inputs: dict[str, Any], left_out: dict[str, Any]
    ) -> None:
        """Prepare to read and write the records of a build; the store is not touched yet.

        Args:
            store: output of the build.
            parameters: JSON values that, with the text, determine the corpus. If the store holds a build or a corpus
                of other parameters, the methods that read it raise ManifestMismatch.
            inputs: JSON values that identify the inputs of a finished corpus without reading them: their number, and a
                digest of their names and sizes.
            left_out: values of the parameters that a build does not record at these values.
        """
        self._store = store
        self._parameters = json.loads(canonical_json(parameters))
        self._inputs = json.loads(canonical_json(inputs))
        self._left_out = left_out

    def finished_corpus(self) -> CorpusManifest | None:
        """Return the manifest of the corpus if it is finished, otherwise None.

        If it is finished, all files in progress/ are deleted: a build may have been killed after it wrote corpus.json
        and before it deleted them.

        Raises:
            ManifestMismatch: the store holds a finished corpus of other parameters or inputs.
        """
        if not self._store.exists(MANIFEST_KEY):
            return None
        manifest = read_manifest(self._store)
        stored = {**manifest.builder, "tokenizer": manifest.tokenizer.sha256}
        self._refuse_other_parameters(stored, "a finished corpus")
        same_inputs = all(stored.get(key) == value for key, value in self._inputs.items())
        if not same_inputs:
            raise ManifestMismatch(
                f"{self._store.url}: holds a finished corpus that was built from other inputs ({MANIFEST_KEY} records "
                "other names or sizes of files; versions without build.json read fewer kinds of files); delete that "
                "corpus or choose another --output"
            )
        self.clear()
        return manifest

    def finished_shards(self) -> list[FinishedShard]:
        """Return the records of the finished shards, in order from shard 0; an empty list for a new build.

        The list ends before the first shard that has no record, whose file is missing, or whose file has another size
        than its record: the build continues with that shard. A record of an earlier version lacks the counts for
        build.json; its shard is built again, with the same bytes.

        Raises:
            ManifestMismatch: the store holds an unfinished build with other parameters.
            UserError: the store holds shards, but neither records of a build nor a corpus.json.
        """
        if not self._store.exists(_BUILD_KEY):
            self._refuse_foreign_shards()
            return []
        stored_parameters = self._read_object(_BUILD_KEY)
        self._refuse_other_parameters(stored_parameters, "a half-built corpus")
        finished: list[FinishedShard] = []
        while True:
            key = _record_key(len(finished))
            if not self._store.exists(key):
                return finished
            try:
                shard = FinishedShard.model_validate(self._read_object(key))
            except ValidationError as error:
                raise self._damaged(key, first_fault(error)) from None
            if shard.sources is None:
                return finished
            if shard.entry is not None and not self._has_shard(shard.entry):
                return finished
            finished.append(shard)

    def begin(self) -> None:
        """Write the build's parameters to progress/build.json; a later build with other parameters is then refused."""
        self._store.write(_BUILD_KEY, (canonical_json(self._parameters) + "\n").encode())

    def record(self, note: FinishedShard, heldout_rows: np.ndarray) -> None:
        """Record that a shard is finished. The caller must have written the shard to the store before.

        Args:
            note: the record of the shard; its `heldout_rows` must be the number of rows in `heldout_rows`.
            heldout_rows: rows of the shard's held-out documents, [rows, seq_len]; may be empty.
        """
        if len(heldout_rows):
            buffer = io.BytesIO()
            np.save(buffer, heldout_rows, allow_pickle=False)
            self._store.write(_heldout_key(note.number), buffer.getvalue())
        # The record is written last: its existence marks the shard and its held-out rows as finished.
        self._store.write(_record_key(note.number), (note.model_dump_json() + "\n").encode())

    def heldout_rows(self, note: FinishedShard) -> np.ndarray:
        """Return the held-out rows of the documents of a finished shard, [rows, seq_len] uint16 or uint32.

        Args:
            note: the record of the shard; its `heldout_rows` must not be 0, because no file exists for an empty array.

        Raises:
            StoreError: the file progress/NNNNNN.heldout.npy is missing or cannot be read.
        """
        data = self._store.read(_heldout_key(note.number))
        try:
            return parse_array(data)
        except ValueError as error:
            raise self._damaged(_heldout_key(note.number), str(error)) from None

    def _read_object(self, key: str) -> dict[str, Any]:
        """Return the JSON object in a file of the unfinished build.

        Raises:
            StoreError: the file is missing or cannot be read.
            UserError: the file is damaged.
        """
        try:
            return parse_json_object(self._store.read(key))
        except DamagedJson as error:
            raise self._damaged(key, str(error)) from None

    def _damaged(self, key: str, reason: str) -> UserError:
        """Return the error for a damaged file of the unfinished build, to be raised by the caller."""
        return UserError(
            f"{self._store.url}/{key}: damaged, because {reason}; delete the folder {_FOLDER} and the shards beside "
            f"it, and build again"
        )

    def clear(self) -> None:
        """Delete all files in progress/; shards and corpus.json stay.

        The files are the build's parameters, the records of finished shards, and the held-out rows of these shards.
        """
        for key in self._store.list(_FOLDER):
            self._store.delete(key)

    def _has_shard(self, entry: ShardEntry) -> bool:
        """Return whether the store has the file of a shard, with the recorded size; its digest is not checked.

        Args:
            entry: the entry of the shard for corpus.json, with its name and its size in bytes.
        """
        return self._store.exists(entry.name) and self._store.size(entry.name) == entry.bytes

    def _refuse_foreign_shards(self) -> None:
        """Raise UserError if the store holds shards, although no build has written its parameters to it.

        Another program then wrote the shards, and a build would overwrite them.
        """
        if any(key.endswith(".tar") for key in self._store.list("shard-")):
            raise UserError(
                f"{self._store.url}: holds shards but no corpus.json; run `electra-dist corpus index` to write one, "
                "or choose another --output"
            )

    def _refuse_other_parameters(self, stored: dict[str, Any], description: str) -> None:
        """Raise an error if the parameters in the store differ from those of this build.

        A parameter of `left_out` that is not given counts with its value there. Other parameters that only the store
        has are ignored.

        Args:
            stored: parameters in the store.
            description: what the store holds, for the error: "a finished corpus" or "a half-built corpus".

        Raises:
            ManifestMismatch: a parameter differs; the message names the first one.
        """
        all_stored = {**self._left_out, **stored}
        for key, value in {**self._left_out, **self._parameters}.items():
            stored_value = all_stored.get(key)
            if stored_value != value:
                raise ManifestMismatch(
                    f"{self._store.url}: holds {description} with {key} = {stored_value}, but this build has "
                    f"{key} = {value}; delete that corpus or choose another --output"
                )


def _record_key(number: int) -> str:
    """Return the key of the file that records a shard as finished: progress/000007.json for shard 7."""
    return f"{_FOLDER}{number:06d}.json"


def _heldout_key(number: int) -> str:
    """Return the key of the file with the held-out rows of a shard: progress/000007.heldout.npy for shard 7."""
    return f"{_FOLDER}{number:06d}.heldout.npy"
