"""corpus.json: what a corpus consists of, down to the digest of every shard.

Guarantee: the manifest is written after everything it names, atomically; a corpus without one is unfinished. Its
`fingerprint` (sha256 of the canonical JSON) changes when any row, the tokenizer or the order of the shards does, so a
run can tell whether it still reads the corpus that it began with.

Cost: about 150 bytes a shard; 4,000 shards (66 GB, 64 M rows of 512) read and validate in some 20 ms.

Where it stops: it says which bytes belong to the corpus; `cache.py` checks that they are those.
"""

from __future__ import annotations

import functools
import hashlib
import json
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, ValidationError, model_validator

from electra_dist.config import Positive, Section, canonical_json
from electra_dist.errors import ManifestMismatch, StoreMissing, UserError
from electra_dist.store.interface import Store, check_key

MANIFEST_KEY = "corpus.json"
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


class ShardEntry(Section):
    """One shard."""

    name: str = Field(description="key of the tar file, relative to corpus.json")
    rows: Positive = Field(description="rows in it")
    tokens: Annotated[int, Field(ge=0)] = Field(description="tokens in it that are not [PAD]")
    bytes: Positive = Field(description="size of the tar file")
    sha256: Sha256 = Field(description="digest of the tar file")

    @model_validator(mode="after")
    def _stays_inside(self) -> ShardEntry:
        check_key(self.name)
        return self


class TokenizerEntry(Section):
    """The vocabulary that the ids mean."""

    sha256: Sha256 = Field(description="digest of the vocabulary file")
    vocab_size: Positive = Field(description="entries of the vocabulary")
    vocab_file: str = Field(default="vocab.txt", description="key of the vocabulary, relative to corpus.json")
    lowercase: bool = Field(description="whether text was lower-cased and stripped of accents")
    special: dict[str, int] = Field(description="ids of [PAD], [UNK], [CLS], [SEP] and [MASK]")

    @model_validator(mode="after")
    def _special_tokens_exist(self) -> TokenizerEntry:
        missing = [token for token in SPECIAL_TOKENS if token not in self.special]
        if missing:
            raise ValueError(f"special lacks {', '.join(missing)}")
        outside = [token for token, number in self.special.items() if not 0 <= number < self.vocab_size]
        if outside:
            raise ValueError(f"ids of {', '.join(outside)} are outside the vocabulary of {self.vocab_size}")
        check_key(self.vocab_file)
        return self


class CorpusManifest(Section):
    """The whole of corpus.json."""

    format: Literal[1] = 1
    seq_len: Positive = Field(description="tokens per row")
    dtype: Literal["uint16", "uint32"] = Field(description="type of the ids in the shards")
    tokenizer: TokenizerEntry
    builder: dict[str, Any] = Field(default_factory=dict, description="parameters of the build")
    totals: dict[str, Any] = Field(default_factory=dict, description="counts of the build")
    shards: tuple[ShardEntry, ...] = Field(description="shards in the order that the shuffle permutes")

    @model_validator(mode="after")
    def _shards_are_distinct(self) -> CorpusManifest:
        names = [shard.name for shard in self.shards]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"shard {twice} is listed twice")
        return self

    @property
    def num_rows(self) -> int:
        """Rows of an epoch."""
        return sum(shard.rows for shard in self.shards)

    @property
    def num_tokens(self) -> int:
        """Tokens of an epoch, [PAD] not counted."""
        return sum(shard.tokens for shard in self.shards)

    def row_name(self, row_id: int) -> str:
        """Shard and index of a row, given its place in the corpus."""
        ends = np.cumsum([shard.rows for shard in self.shards])
        shard = int(np.searchsorted(ends, row_id, side="right"))
        return f"{self.shards[shard].name} row {row_id - int(ends[shard]) + self.shards[shard].rows}"

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """Type of the ids in memory."""
        return np.dtype(self.dtype)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Sha256 of the canonical JSON: equal for equal corpora only."""
        return hashlib.sha256(canonical_json(self.model_dump(mode="json")).encode()).hexdigest()


def read_manifest(store: Store) -> CorpusManifest:
    """The manifest of the corpus in `store`.

    Raises:
        UserError: no corpus there, an unfinished or damaged one, or one without shards.
    """
    where = f"{store.url}/{MANIFEST_KEY}"
    try:
        text = store.read(MANIFEST_KEY)
    except StoreMissing:
        raise StoreMissing(
            f"{where}: no corpus here (or an unfinished one); build it with `electra-dist corpus build --output "
            f"{store.url}`, or mend data.corpus"
        ) from None
    try:
        manifest = CorpusManifest.model_validate(json.loads(text))
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise ManifestMismatch(f"{where}: not JSON; build the corpus again or restore the file") from None
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(str(part) for part in fault["loc"])
        reason = fault["msg"].removeprefix("Value error, ")
        raise ManifestMismatch(f"{where}: `{key}`: {reason}; made by another version? build it again") from None
    if not manifest.shards:
        raise UserError(f"{where}: the corpus has no shards; build it again from more text")
    return manifest


def write_manifest(store: Store, manifest: CorpusManifest) -> None:
    """Commit a corpus: call it last, when all shards and the vocabulary are in place."""
    text = json.dumps(manifest.model_dump(mode="json"), indent=1, sort_keys=True) + "\n"
    store.write(MANIFEST_KEY, text.encode())
