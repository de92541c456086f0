"""Corpora of random token ids, for the benchmarks of the loader, the shard cache and the restart.

Thousands of shard names are hard links to a few shards. Each is opened, hashed and mapped like any other shard, and
the 66 GB of a full corpus need not be written.
"""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path

import numpy as np

from electra_dist.data.manifest import CorpusManifest, ShardEntry, TokenizerEntry, write_manifest
from electra_dist.data.shard import write_shard
from electra_dist.store.interface import Store
from electra_dist.store.open_store import open_store


def write_corpus(
    folder: Path,
    num_shards: int,
    rows_per_shard: int,
    num_distinct: int,
    *,
    seq_len: int = 512,
    vocab_size: int = 30_522,
) -> Store:
    """Write a corpus to a folder and return its open store.

    `num_distinct` shards are written, and the others are links to them. The first five ids are the special tokens,
    which do not occur.
    """
    store = open_store(str(folder))
    rng = np.random.default_rng(0)
    entries: list[ShardEntry] = []
    for number in range(num_shards):
        name = f"shard-{number:06d}.tar"
        if number >= num_distinct:
            original = entries[number % num_distinct]
            os.link(folder / original.name, folder / name)
            entries.append(original.model_copy(update={"name": name}))
            continue
        file = io.BytesIO()
        write_shard(file, rng.integers(5, vocab_size, (rows_per_shard, seq_len), dtype=np.uint16), 1024)
        data = file.getvalue()
        store.write(name, data)
        digest = hashlib.sha256(data).hexdigest()
        tokens = rows_per_shard * seq_len
        entries.append(ShardEntry(name=name, rows=rows_per_shard, tokens=tokens, bytes=len(data), sha256=digest))
    special = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4}
    vocab = "".join(f"{token}\n" for token in [*special, *range(5, vocab_size)]).encode()
    store.write("vocab.txt", vocab)
    digest = hashlib.sha256(vocab).hexdigest()
    tokenizer = TokenizerEntry(sha256=digest, vocab_size=vocab_size, lowercase=True, special=special)
    write_manifest(store, CorpusManifest(seq_len=seq_len, dtype="uint16", tokenizer=tokenizer, shards=tuple(entries)))
    return store
