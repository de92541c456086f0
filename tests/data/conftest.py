"""Fixtures of small corpora with known rows, and of a real S3 server behind a fault proxy."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pytest
from support.s3_fixtures import bucket, proxy, s3

from electra_dist.data.corpora import Corpora
from electra_dist.data.manifest import CorpusManifest, ShardEntry, TokenizerEntry, write_manifest
from electra_dist.data.shard import write_shard
from electra_dist.store.interface import Store
from electra_dist.store.open_store import open_store

__all__ = ["bucket", "build_corpus", "corpus", "proxy", "s3"]

SEQ_LEN = 16
SPECIAL = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4}


class Corpus(NamedTuple):
    """A corpus and all its rows in corpus order."""

    store: Store
    manifest: CorpusManifest
    rows: np.ndarray

    @property
    def corpora(self) -> Corpora:
        """The corpus as the only one of a run."""
        return Corpora.of(self.store, self.manifest)


def build(store: Store, rows_per_shard: Sequence[int], block_rows: int = 7) -> Corpus:
    """Write a corpus of rows of random ids to `store`; equal arguments give equal rows."""
    rng = np.random.default_rng(len(rows_per_shard))
    entries, blocks = [], []
    for number, num_rows in enumerate(rows_per_shard):
        rows = rng.integers(5, 60_000, (num_rows, SEQ_LEN)).astype(np.uint16)
        file = io.BytesIO()
        write_shard(file, rows, block_rows)
        name = f"part-{number % 2}/shard-{number:06d}.tar"
        store.write(name, file.getvalue())
        digest = hashlib.sha256(file.getvalue()).hexdigest()
        entries.append(
            ShardEntry(name=name, rows=num_rows, tokens=rows.size, bytes=len(file.getvalue()), sha256=digest)
        )
        blocks.append(rows)
    tokenizer = TokenizerEntry(sha256="0" * 64, vocab_size=60_000, lowercase=True, special=SPECIAL)
    manifest = CorpusManifest(seq_len=SEQ_LEN, dtype="uint16", tokenizer=tokenizer, shards=tuple(entries))
    write_manifest(store, manifest)
    return Corpus(store, manifest, np.concatenate(blocks))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """A corpus of seven shards of different sizes in a local folder."""
    return build(open_store(str(tmp_path_factory.mktemp("corpus"))), [21, 5, 33, 1, 14, 40, 9])


@pytest.fixture
def build_corpus() -> Callable[..., Corpus]:
    """The function `build(store, rows_per_shard)`."""
    return build
