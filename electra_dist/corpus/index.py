"""corpus.json for shards that somebody else's WebDataset writer made from rows.

Guarantee: what is indexed can be trained on: every row begins with [CLS], has [PAD] only at its end and no id outside
the vocabulary; all shards have one length and type. Anything else is an error that names the shard.

Cost: reads every shard once (from S3 through a temporary file), about 1 GB/s from memory. It stops at the top folder:
shards in sub-folders (a held-out corpus, say) belong to another corpus.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from electra_dist.corpus.request import tokenizer_entry
from electra_dist.data.manifest import MANIFEST_KEY, CorpusManifest, ShardEntry, write_manifest
from electra_dist.data.shard import MEMBER_SUFFIX, Shard
from electra_dist.errors import ManifestMismatch, UserError
from electra_dist.store.interface import Store
from electra_dist.tokenizer import VOCAB_FILE, Vocabulary


def index_corpus(store: Store, vocabulary: Vocabulary, lowercase: bool) -> CorpusManifest:
    """Reads all `*.tar` of the folder, in name order; writes vocab.txt and corpus.json.

    Raises:
        UserError: a finished corpus is there, or no shard is.
        ManifestMismatch: a shard that is no tar of rows, or whose rows are not of this vocabulary.
    """
    if store.exists(MANIFEST_KEY):
        raise UserError(f"{store.url}: has a corpus.json; delete it to index the shards anew")
    names = [key for key in store.list() if key.endswith(".tar") and "/" not in key]
    if not names:
        raise UserError(f"{store.url}: no *.tar to index; check the path")
    entries = []
    shape: tuple[int, np.dtype[Any]] | None = None
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            path = store.local_path(name)
            if path is None:
                path = Path(folder) / "shard.tar"
                store.fetch(name, path)
            shape = shape or _row_shape(path, name)
            entries.append(_index_shard(path, name, *shape, vocabulary))
    assert shape is not None
    manifest = CorpusManifest(
        seq_len=shape[0],
        dtype="uint16" if shape[1] == np.uint16 else "uint32",
        tokenizer=tokenizer_entry(vocabulary, lowercase),
        builder={"indexed": True},
        totals={"rows": sum(entry.rows for entry in entries), "tokens": sum(entry.tokens for entry in entries)},
        shards=tuple(entries),
    )
    store.write(VOCAB_FILE, vocabulary.text.encode())
    write_manifest(store, manifest)
    return manifest


def _row_shape(path: Path, name: str) -> tuple[int, np.dtype[Any]]:
    """Row length and type of the first block of a shard."""
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                stream = tar.extractfile(member) if member.name.endswith(MEMBER_SUFFIX) else None
                if stream is not None:
                    block = np.load(io.BytesIO(stream.read()), allow_pickle=False)
                    if block.ndim == 2 and block.dtype in (np.uint16, np.uint32):
                        return block.shape[1], block.dtype
                    found = f"{member.name} holds {block.dtype} {block.shape}"
                    raise ManifestMismatch(f"{name}: {found}; rows are [n, seq_len] uint16 or uint32")
    except (tarfile.TarError, ValueError) as error:
        raise ManifestMismatch(f"{name}: not a tar of *{MEMBER_SUFFIX} blocks ({error})") from None
    raise ManifestMismatch(f"{name}: has no *{MEMBER_SUFFIX} member")


def _index_shard(path: Path, name: str, seq_len: int, dtype: np.dtype[Any], vocabulary: Vocabulary) -> ShardEntry:
    shard = Shard(path, seq_len, dtype)
    try:
        rows = shard.rows(np.arange(shard.num_rows))
    finally:
        shard.close()
    is_pad = rows == vocabulary.special["[PAD]"]
    fault = None
    if not len(rows):
        fault = "has no rows"
    elif rows.max() >= vocabulary.size:
        fault = f"holds id {rows.max()}, but the vocabulary has {vocabulary.size} entries"
    elif (rows[:, 0] != vocabulary.special["[CLS]"]).any():
        fault = "has a row that does not begin with [CLS]"
    elif (is_pad[:, :-1] & ~is_pad[:, 1:]).any():
        fault = "has a row with [PAD] before its end"
    if fault:
        raise ManifestMismatch(f"{name}: {fault}; another vocabulary, or not made of rows?")
    return ShardEntry(
        name=name,
        rows=len(rows),
        tokens=int(np.count_nonzero(~is_pad)),
        bytes=path.stat().st_size,
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
    )
