"""What is finished of a corpus that is being built: small files beside its shards, so that a killed build goes on.

Guarantee: a shard is finished when its note `progress/NNNNNN.json` exists; the note is written after the shard and its
held-out rows, so it never promises what is not there. `progress/build.json` holds the parameters: a folder that is
half built from other parameters, text or vocabulary is refused, never mixed.

How: a note says after which chunk the shard ends and the digest of all documents up to there. A build that goes on
reads the inputs again (it must, to find the place) and compares; what comes later may have changed, so a damaged file
can be mended on the way. When corpus.json is written, the notes are deleted.
"""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
from pydantic import Field

from electra_dist.config import Section, canonical_json
from electra_dist.data.manifest import MANIFEST_KEY, CorpusManifest, ShardEntry, read_manifest
from electra_dist.errors import ManifestMismatch, UserError
from electra_dist.store.interface import Store

_FOLDER = "progress/"
_BUILD_KEY = _FOLDER + "build.json"


class FinishedShard(Section):
    """The note about one shard."""

    number: int = Field(description="position of the shard, from 0")
    entry: ShardEntry | None = Field(description="the shard; none if the last documents gave no training row")
    end_chunk: int = Field(description="first chunk that is not in it")
    stream_digest: str = Field(description="digest of all documents before end_chunk")
    heldout_rows: int = Field(description="rows in progress/NNNNNN.heldout.npy")
    documents: dict[str, int] = Field(description="documents in, used, held out, and each kind of skipped")
    train: dict[str, int] = Field(description="counts of the shard")
    heldout: dict[str, int] = Field(description="counts of the held-out rows")


class BuildProgress:
    """The notes of one build in one store."""

    def __init__(self, store: Store, parameters: dict[str, Any], inputs: dict[str, Any]) -> None:
        """`parameters` with the text define the corpus; by `inputs` a finished one knows its text. Both are JSON."""
        self._store = store
        self._parameters = json.loads(canonical_json(parameters))
        self._inputs = json.loads(canonical_json(inputs))

    def finished_corpus(self) -> CorpusManifest | None:
        """The corpus, if it is already there, built from these parameters.

        Raises:
            ManifestMismatch: another corpus is there.
        """
        if not self._store.exists(MANIFEST_KEY):
            return None
        manifest = read_manifest(self._store)
        there = {**manifest.builder, "tokenizer": manifest.tokenizer.sha256}
        self._refuse_other(there, "a finished corpus")
        if any(there.get(key) != value for key, value in self._inputs.items()):
            raise ManifestMismatch(
                f"{self._store.url}: holds a finished corpus of other inputs; delete it or choose another --output"
            )
        self.clear()
        return manifest

    def finished_shards(self) -> list[FinishedShard]:
        """Notes of shards 0, 1, ... up to the first that is missing.

        Raises:
            ManifestMismatch: they belong to another corpus.
            UserError: shards of unknown origin lie there.
        """
        if not self._store.exists(_BUILD_KEY):
            if any(key.endswith(".tar") for key in self._store.list("shard-")):
                raise UserError(
                    f"{self._store.url}: holds shards but no corpus.json; `electra-dist corpus index` writes one, "
                    "or choose another --output"
                )
            return []
        self._refuse_other(json.loads(self._store.read(_BUILD_KEY)), "a half-built corpus")
        notes: list[FinishedShard] = []
        while self._store.exists(key := _note_key(len(notes))):
            note = FinishedShard.model_validate_json(self._store.read(key))
            if note.entry and not self._has(note.entry):
                break
            notes.append(note)
        return notes

    def begin(self) -> None:
        """Claims the folder for these parameters."""
        self._store.write(_BUILD_KEY, (canonical_json(self._parameters) + "\n").encode())

    def record(self, note: FinishedShard, heldout_rows: np.ndarray) -> None:
        """Note a shard that is in the store, with the held-out rows of its documents."""
        if len(heldout_rows):
            buffer = io.BytesIO()
            np.save(buffer, heldout_rows, allow_pickle=False)
            self._store.write(_heldout_key(note.number), buffer.getvalue())
        self._store.write(_note_key(note.number), (note.model_dump_json() + "\n").encode())

    def heldout_rows(self, note: FinishedShard) -> np.ndarray:
        """The held-out rows that were recorded with `note`, which must have some."""
        return np.load(io.BytesIO(self._store.read(_heldout_key(note.number))), allow_pickle=False)

    def clear(self) -> None:
        """Delete all notes."""
        for key in self._store.list(_FOLDER):
            self._store.delete(key)

    def _has(self, entry: ShardEntry) -> bool:
        return self._store.exists(entry.name) and self._store.size(entry.name) == entry.bytes

    def _refuse_other(self, there: dict[str, Any], what: str) -> None:
        keys = [key for key, value in self._parameters.items() if there.get(key) != value]
        if keys:
            difference = f"{keys[0]} = {there.get(keys[0])}, not {self._parameters[keys[0]]}"
            raise ManifestMismatch(
                f"{self._store.url}: holds {what} with {difference}; delete it or choose another --output"
            )


def _note_key(number: int) -> str:
    return f"{_FOLDER}{number:06d}.json"


def _heldout_key(number: int) -> str:
    return f"{_FOLDER}{number:06d}.heldout.npy"
