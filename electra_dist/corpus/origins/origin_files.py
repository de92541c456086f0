"""Write and read the origin files of a corpus, which name the documents from which each row was made.

Guarantee: the origin files are a function of the inputs and the settings of the build, as the shards are. origins.json
lists the origin files with their digests and holds the fingerprint of the corpus. An origin file is used only if its
bytes match the digest, and the corpus the fingerprint. The corpus itself does not depend on its origin files.

How: each shard has one parquet file (`origin_table.py`) in the folder origins/ beside the shards.

Limits: a corpus has no origin files if it was indexed, built by an earlier version, or built with
`corpus.origins: false`; origins.json is then missing.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Literal

import pyarrow
from pydantic import Field, ValidationError

from electra_dist.config import Section
from electra_dist.corpus.origins.origin_table import table_from_bytes, table_to_bytes
from electra_dist.data.manifest import CorpusManifest, Sha256
from electra_dist.data.verified_read import read_verified, reread
from electra_dist.errors import ManifestMismatch
from electra_dist.store.interface import Store
from electra_dist.store.json_file import DamagedJson, first_fault, parse_json

ORIGINS_KEY = "origins.json"
ORIGINS_FOLDER = "origins/"
_NEXT_STEP = "restore it, or delete origins.json, which no run needs"


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
    """Content of origins.json, the list of a corpus's origin files."""

    format: Literal[1] = Field(default=1, description="version of the file's format")
    corpus: Sha256 = Field(description="fingerprint of the corpus to which the origin files belong")
    files: tuple[OriginFile, ...] = Field(description="entries of the origin files, in the order of the shards")


def put_origins(store: Store, shard: str, table: pyarrow.Table) -> OriginFile:
    """Write the origin file of a shard, such as shard-000007.tar, whose rows count from 0; return its entry."""
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
    """Reader of a corpus's origin files (the documents of each row), which verifies them; `open_origins` makes one."""

    def __init__(self, store: Store, entries: dict[str, OriginFile]) -> None:
        self._store = store
        self._entries = entries

    @property
    def files(self) -> list[OriginFile]:
        """Return the entries of all origin files, in the order of the shards."""
        return list(self._entries.values())

    def table(self, shard: str) -> pyarrow.Table:
        """Return the table in a shard's origin file (`origin_table.SCHEMA`); ManifestMismatch if it is damaged."""
        entry = self._entries[shard]
        return reread(self._store, entry.name, lambda: self._read(entry))

    def _read(self, entry: OriginFile) -> pyarrow.Table:
        data = self._store.read(entry.name, must_exist=True)
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
    """Return the reader of a corpus's origin files; None if the corpus has no origins.json.

    Raises ManifestMismatch if origins.json is damaged or belongs to another corpus.
    """
    if not store.exists(ORIGINS_KEY):
        return None
    url = f"{store.url}/{ORIGINS_KEY}"

    def parse(data: bytes) -> OriginsManifest:
        try:
            return OriginsManifest.model_validate(parse_json(data))
        except (DamagedJson, ValidationError) as error:
            reason = first_fault(error) if isinstance(error, ValidationError) else str(error)
            raise ManifestMismatch(f"{url}: damaged ({reason}); {_NEXT_STEP}") from None

    origins = read_verified(store, ORIGINS_KEY, parse)
    entries = {file.shard: file for file in origins.files}
    if origins.corpus != manifest.fingerprint or entries.keys() != {shard.name for shard in manifest.shards}:
        raise ManifestMismatch(f"{url}: belongs to another corpus (fingerprint {origins.corpus}); {_NEXT_STEP}")
    return Origins(store, entries)
