"""Read and write corpus.json, the manifest that lists every shard of a corpus, and the vocabulary that it names.

A corpus is a folder or S3 prefix that holds the training rows (sequences of token ids of one length). The rows are
split into tar files, the shards.

Guarantee: the manifest is written atomically, after all files that it lists; a corpus without a manifest is
unfinished. The manifest's `fingerprint` (SHA-256 of the canonical JSON) changes when any row, the tokenizer or the
order of the shards changes, so a run notices that its corpus has been replaced.

Limits: the manifest states which bytes a corpus consists of; `shard_cache.py` verifies them.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import json
import os
import shlex
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from electra_dist.config import Positive, Section
from electra_dist.errors import ManifestMismatch, StoreMissing, UserError
from electra_dist.store.atomic_files import NamedDigest
from electra_dist.store.interface import Store, check_key
from electra_dist.store.json_file import canonical_json, find_document
from electra_dist.tokenizer import SPECIAL_TOKENS, VOCAB_FILE, Vocabulary

if TYPE_CHECKING:  # Commands that only read a manifest answer sooner.
    import numpy as np

MANIFEST_KEY = "corpus.json"
_BYTES_OF_ID = {"uint16": 2, "uint32": 4}
_HELDOUT = "heldout"  # folder of the held-out corpus, inside that of the training corpus
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class ShardEntry(Section):
    """Entry of one shard in corpus.json. A shard is a tar file with some of the corpus's rows (token id sequences)."""

    name: str = Field(description="Key of the shard's tar file, relative to corpus.json.")
    rows: Positive = Field(description="Number of rows in the shard.")
    tokens: Annotated[int, Field(ge=0)] = Field(description="Number of tokens in the shard, [PAD] not counted.")
    bytes: Positive = Field(description="Size of the tar file in bytes.")
    sha256: Sha256 = Field(description="SHA-256 of the tar file in hexadecimal.")

    @model_validator(mode="after")
    def _stays_inside(self) -> ShardEntry:
        """Raise StoreError if the shard's name leads out of the corpus's folder, as ../x.tar does."""
        check_key(self.name)
        return self


class TokenizerEntry(Section):
    """Entry in corpus.json about the tokenizer: which vocabulary the token ids in the shards belong to."""

    sha256: Sha256 = Field(description="SHA-256 of the vocabulary file in hexadecimal.")
    vocab_size: Positive = Field(description="Number of tokens in the vocabulary.")
    vocab_file: str = Field(default="vocab.txt", description="Key of the vocabulary file, relative to corpus.json.")
    lowercase: bool = Field(description="Whether the text was lower-cased and stripped of accents.")
    special: dict[str, int] = Field(description="Ids of [PAD], [UNK], [CLS], [SEP] and [MASK], by token.")

    @classmethod
    def of(cls, vocabulary: Vocabulary, lowercase: bool) -> TokenizerEntry:
        """Return the entry that describes a vocabulary. `lowercase` is recorded for WordPiece only."""
        return cls(
            sha256=vocabulary.sha256,
            vocab_size=vocabulary.size,
            vocab_file=VOCAB_FILE,
            lowercase=lowercase and vocabulary.kind == "wordpiece",
            special=vocabulary.special,
        )

    @model_validator(mode="after")
    def _special_tokens_exist(self) -> TokenizerEntry:
        """Refuse a missing special token, a special token outside the vocabulary, and a vocab_file like ../x."""
        missing = [token for token in SPECIAL_TOKENS if token not in self.special]
        if missing:
            raise ValueError(f"special lacks {', '.join(missing)}; it must hold the ids of all five special tokens")
        ids = range(self.vocab_size)
        outside = [f"{token} {token_id}" for token, token_id in self.special.items() if token_id not in ids]
        if outside:
            raise ValueError(
                f"special: ids of {', '.join(outside)} are outside the vocabulary; they must be at least 0 and below "
                f"vocab_size {self.vocab_size}"
            )
        check_key(self.vocab_file)
        return self


class CorpusManifest(Section):
    """Content of corpus.json: the format of the rows, the tokenizer, the parameters of the build and the shards."""

    format: Literal[1] = Field(default=1, description="Version of the file's format.")
    seq_len: Positive = Field(description="Number of tokens in each row.")
    dtype: Literal["uint16", "uint32"] = Field(description="Integer type of the token ids in the shards.")
    tokenizer: TokenizerEntry
    builder: dict[str, Any] = Field(default_factory=dict, description="Parameters and inputs of the build.")
    totals: dict[str, Any] = Field(default_factory=dict, description="Counts of the build, such as documents read.")
    shards: tuple[ShardEntry, ...] = Field(
        description="Shards of the corpus. Their order numbers the rows and is the input of the shuffle."
    )

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> CorpusManifest:
        """Refuse a manifest whose shards, rows and build parameters contradict one another."""
        # The rows of a shard that is listed twice would count twice in every epoch.
        count_by_name = Counter(shard.name for shard in self.shards)
        repeated = [name for name, count in count_by_name.items() if count > 1]
        if repeated:
            raise ValueError(f"shard {repeated[0]} is listed twice; each shard must be listed once")
        row_bytes = self.seq_len * _BYTES_OF_ID[self.dtype]
        for shard in self.shards:
            if shard.rows * row_bytes > shard.bytes:
                raise ValueError(
                    f"shard {shard.name} cannot have {shard.rows} rows of {row_bytes} bytes in its "
                    f"{shard.bytes} bytes; restore corpus.json or build the corpus again"
                )
            if shard.tokens > shard.rows * self.seq_len:
                raise ValueError(
                    f"shard {shard.name} cannot have {shard.tokens} tokens in {shard.rows} rows of {self.seq_len}"
                )
        if self.builder.get("seq_len", self.seq_len) != self.seq_len:
            raise ValueError(f"seq_len is {self.seq_len}, but builder.seq_len is {self.builder['seq_len']}")
        # A corpus of a tokenizer.json is never lower-cased, whatever the builder's parameter says; only the vocabulary
        # shows which kind it has (`train/check_inputs.py`).
        if self.tokenizer.lowercase and not self.builder.get("lowercase", True):
            raise ValueError("tokenizer.lowercase is true, but builder.lowercase is false")
        return self

    @property
    def num_rows(self) -> int:
        """Return the number of rows in all shards; an epoch uses each of them once."""
        return sum(shard.rows for shard in self.shards)

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens in all shards, [PAD] not counted."""
        return sum(shard.tokens for shard in self.shards)

    def row_name(self, row_id: int) -> str:
        """Return the name of a row for messages: its shard and its number there, as in "shard-000001.tar row 17".

        `row_id` is in [0, num_rows). Ids count the rows of all shards, one shard after another, from 0.
        """
        shard, row = place_of(row_id, [shard.rows for shard in self.shards])
        return f"{self.shards[shard].name} row {row}"

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """Return the NumPy type of the token ids in the shards, uint16 or uint32."""
        import numpy as np

        return np.dtype(self.dtype)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Return the SHA-256 of the manifest's canonical JSON in hexadecimal, which identifies the corpus."""
        return hashlib.sha256(canonical_json(self.model_dump(mode="json")).encode()).hexdigest()


def place_of(number: int, counts: Sequence[int]) -> tuple[int, int]:
    """Return in which of several parts an element is, and its number in that part, both from 0.

    The elements of all parts are numbered one part after another; `counts` has the number of elements of each part.
    """
    ends = list(itertools.accumulate(counts))
    part = bisect.bisect_right(ends, number)
    return part, number - ends[part] + counts[part]


def heldout_of(location: str) -> str:
    """Return where a build puts the held-out corpus of the corpus in the folder or prefix `location`."""
    return f"{location.rstrip('/')}/{_HELDOUT}"


def read_manifest(store: Store, key: str = "data.corpus") -> CorpusManifest:
    """Read and validate corpus.json in the store of a corpus. On S3, a damaged file is read again a few times.

    Error messages name the corpus by its config key `key`. Raises StoreMissing if `store` has no finished corpus.
    """
    url = f"{store.url}/{MANIFEST_KEY}"
    next_step = "restore corpus.json or build the corpus again"
    manifest = find_document((store, MANIFEST_KEY), CorpusManifest, next_step, ManifestMismatch)
    if manifest is None:
        corpus, _, folder = store.url.rpartition("/")
        if folder == _HELDOUT:  # a build into this folder would put the rows of the training corpus there
            raise StoreMissing(
                f"{url}: no held-out corpus; restore {store.url} from a copy, or delete the corpus {corpus} and build "
                "it again, which makes both (the same text and settings give the same rows), or name another corpus"
            )
        is_relative = "://" not in url and not os.path.isabs(url)
        place = f" (relative to the current folder, {os.getcwd()})" if is_relative else ""
        raise StoreMissing(
            f"{url}: no finished corpus; build it with `electra-dist corpus build --input TEXT --config CONFIG "
            f"--output {shlex.quote(store.url)}`, or correct {key}{place}"
        )
    if not manifest.shards:
        raise UserError(f"{url}: the corpus has no shards; build it again from more text")
    return manifest


def check_files(store: Store, manifest: CorpusManifest) -> None:
    """Raise ManifestMismatch if a shard is missing or has another size than corpus.json lists; no shard is read."""
    sizes = store.sizes()
    bad = [shard.name for shard in manifest.shards if sizes.get(shard.name) != shard.bytes]
    if bad:
        raise ManifestMismatch(
            f"{store.url}: {len(bad)} of {len(manifest.shards)} shards are missing or have another size than "
            f"{MANIFEST_KEY} lists, such as {bad[0]}; restore them from a copy, or delete the corpus and build it "
            "again (the same text and settings give the same rows)"
        )


def write_manifest(store: Store, manifest: CorpusManifest) -> None:
    """Write corpus.json. Call this last: readers take a corpus for complete as soon as it has this file."""
    text = json.dumps(manifest.model_dump(mode="json"), indent=1, sort_keys=True) + "\n"
    store.write(MANIFEST_KEY, text.encode())


def read_corpus_vocabulary(store: Store, tokenizer: TokenizerEntry) -> Vocabulary:
    """Return the vocabulary of a corpus, verified against `tokenizer`, its entry in corpus.json.

    Raises ManifestMismatch if the SHA-256, the size or the ids of the special tokens differ from the entry.
    """
    url = f"{store.url}/{MANIFEST_KEY}"
    next_step = "restore the file from a backup or from a run on this corpus (RUN/vocab.txt)"
    expected = NamedDigest(sha256=tokenizer.sha256, named_by=url, next_step=next_step)
    try:
        vocabulary = read_named_vocabulary(store, tokenizer.vocab_file, expected)
    except StoreMissing:
        raise StoreMissing(f"{store.url}/{tokenizer.vocab_file}: no such file; {next_step}") from None
    faults = []
    if tokenizer.vocab_size != vocabulary.size:
        faults.append(f"vocab_size is {tokenizer.vocab_size}, but {tokenizer.vocab_file} has {vocabulary.size} tokens")
    for token, token_id in vocabulary.special.items():
        named_id = tokenizer.special[token]
        if named_id != token_id:
            faults.append(f"special {token} is {named_id}, but its id in {tokenizer.vocab_file} is {token_id}")
    if faults:
        raise ManifestMismatch(f"{url}: {faults[0]}; restore corpus.json or build the corpus again")
    return vocabulary


def write_corpus_vocabulary(store: Store, text: str) -> bool:
    """Write the vocab.txt of a new corpus unless the store has it already; return whether it was written.

    Raises UserError if the store's vocab.txt holds another vocabulary, or is not a vocabulary.
    """
    if not store.exists(VOCAB_FILE):
        store.write(VOCAB_FILE, text.encode())
        return True
    wanted = NamedDigest(
        sha256=Vocabulary(text, VOCAB_FILE).sha256,
        named_by="--vocab",
        next_step="move the file away, give it as the vocabulary, or choose another --output",
    )
    read_named_vocabulary(store, VOCAB_FILE, wanted)  # compares the digests
    return False


def read_named_vocabulary(store: Store, key: str, expected: NamedDigest | None) -> Vocabulary:
    """Read the vocabulary file `key` of a store, and check its digest if `expected` is given.

    Wrong content from S3 is read again a few times.
    """
    return store.read_verified(key, lambda data: Vocabulary.parse(data, f"{store.url}/{key}", expected))
