"""What a corpus is to be made of, and which of it is part of the corpus's identity."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from electra_kernels.keyed_random import Purpose, derive_seed

from electra_dist.config import CorpusConfig, canonical_json
from electra_dist.corpus.chunks import Rules
from electra_dist.corpus.readers import InputFile
from electra_dist.data.manifest import TokenizerEntry
from electra_dist.tokenizer import VOCAB_FILE, Vocabulary

BUILDER_VERSION = 1  # raise it when the same input begins to give other rows
_CHUNK_BYTES = (1 << 16, 1 << 22)


@dataclass(frozen=True, kw_only=True)
class BuildRequest:
    """What to build. Everything but `num_workers`, `output` and `endpoint_url` decides the bytes of the corpus."""

    inputs: Sequence[InputFile]
    vocabulary: Vocabulary
    output: str
    seq_len: int
    seed: int
    corpus: CorpusConfig
    text_field: str = "text"
    num_workers: int = 1
    endpoint_url: str | None = None

    @property
    def shard_bytes(self) -> int:
        """Bytes of rows after which a shard is full."""
        return int(self.corpus.shard_size_mb * 1e6)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of documents in a chunk: about an eighth of a shard's text."""
        low, high = _CHUNK_BYTES
        return min(max(self.shard_bytes // 4, low), high)

    def parameters(self) -> dict[str, Any]:
        """What makes a corpus of some text the corpus that it is, but for the vocabulary."""
        return {
            "version": BUILDER_VERSION,
            "seq_len": self.seq_len,
            "seed": self.seed,
            "text_field": self.text_field,
            "chunk_bytes": self.chunk_bytes,
            **self.corpus.model_dump(mode="json"),
        }

    def input_names(self) -> dict[str, Any]:
        """What a finished corpus remembers of its inputs: names below the given folders, and sizes, as a digest."""
        names = canonical_json([[file.name, file.size] for file in self.inputs])
        return {"num_inputs": len(self.inputs), "inputs_sha256": hashlib.sha256(names.encode()).hexdigest()}

    def rules(self) -> Rules:
        """What a worker needs to know."""
        return Rules(
            vocabulary_text=self.vocabulary.text,
            lowercase=self.corpus.lowercase,
            seq_len=self.seq_len,
            packing=self.corpus.packing,
            single_segment_prob=self.corpus.single_segment_prob,
            short_target_prob=self.corpus.short_target_prob,
            heldout_fraction=self.corpus.heldout_fraction,
            heldout_key=derive_seed(self.seed, Purpose.HELDOUT),
            text_field=self.text_field,
        )


def tokenizer_entry(vocabulary: Vocabulary, lowercase: bool) -> TokenizerEntry:
    """What corpus.json says of the vocabulary beside it."""
    return TokenizerEntry(
        sha256=vocabulary.sha256,
        vocab_size=vocabulary.size,
        vocab_file=VOCAB_FILE,
        lowercase=lowercase,
        special=vocabulary.special,
    )
