"""Write corpus.json for shards of token rows that another WebDataset writer made, so that a run can train on them.

Guarantee: an indexed corpus can be trained on. Every row begins with [CLS], has [PAD] only at its end and holds no id
outside the vocabulary; all shards have rows of one length and type. Anything different is an error that names the
shard.

Limits: only the top folder is indexed; shards in sub-folders, for example of a held-out corpus, are ignored. Every
shard is read once, from S3 through a temporary file.
"""

from __future__ import annotations

import io
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from electra_dist.data.manifest import (
    MANIFEST_KEY,
    CorpusManifest,
    ShardEntry,
    TokenizerEntry,
    write_corpus_vocabulary,
    write_manifest,
)
from electra_dist.data.shard import MAX_HEADER_BYTES, MEMBER_SUFFIX, CheckedTarInfo, Shard, read_array_header
from electra_dist.errors import ManifestMismatch, UserError
from electra_dist.store.atomic_files import file_sha256, open_regular
from electra_dist.store.interface import Store
from electra_dist.tokenizer import Vocabulary


def index_corpus(store: Store, vocabulary: Vocabulary, lowercase: bool) -> CorpusManifest:
    """Check all shards (`*.tar`) in the top folder of `store`, and write vocab.txt and corpus.json for them.

    The shards are listed in the order of their names. `lowercase` (whether the text was lower-cased and stripped of
    accents) is recorded, not checked. Raises ManifestMismatch, before anything is written, if a shard is not a tar of
    rows or its rows do not fit the vocabulary or the other shards. Raises UserError if there is no shard, or if there
    is a corpus.json already.
    """
    if store.exists(MANIFEST_KEY):
        raise UserError(f"{store.url}: already has a corpus.json; delete corpus.json to index the shards again")
    names = [key for key in store.list() if key.endswith(".tar") and "/" not in key]
    if not names:
        raise UserError(f"{store.url}: has no *.tar to index; give the folder or s3:// prefix that holds the shards")
    entries: list[ShardEntry] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            path = _local_shard(store, name, Path(folder))
            if not entries:  # the first shard decides the length and the type of all rows
                seq_len, dtype = _row_shape(path, name)
            entries.append(_index_shard(path, name, seq_len, dtype, vocabulary))
    manifest = CorpusManifest(
        seq_len=seq_len,
        dtype="uint16" if dtype == np.uint16 else "uint32",
        tokenizer=TokenizerEntry.of(vocabulary, lowercase),
        builder={"indexed": True},
        totals={"rows": sum(entry.rows for entry in entries), "tokens": sum(entry.tokens for entry in entries)},
        shards=tuple(entries),
    )
    write_corpus_vocabulary(store, vocabulary.text)
    write_manifest(store, manifest)
    return manifest


def _local_shard(store: Store, name: str, folder: Path) -> Path:
    """Return a local path of a shard. One on S3 is downloaded to `folder`, where it replaces the previous download."""
    path = store.local_path(name)
    if path is None:
        path = folder / "shard.tar"
        store.fetch(name, path)
    return path


def _row_shape(path: Path, name: str) -> tuple[int, np.dtype[Any]]:
    """Return the length of a shard's rows in tokens and the type of their ids, uint16 or uint32.

    Both come from the first .npy member. Raises ManifestMismatch if the file `path`, the shard `name`, has no such
    rows.
    """
    try:
        first_block = _first_block(path)
    except (tarfile.TarError, ValueError) as error:
        raise ManifestMismatch(
            f"{name}: not a tar of *{MEMBER_SUFFIX} blocks ({error}); remove the file or write it again"
        ) from None
    if first_block is None:
        raise ManifestMismatch(f"{name}: has no *{MEMBER_SUFFIX} member; remove the file or write it again")
    member_name, shape, dtype = first_block
    if len(shape) != 2 or dtype not in (np.uint16, np.uint32):
        raise ManifestMismatch(
            f"{name}: {member_name} holds {dtype} {shape}; write rows as [n, seq_len] uint16 or uint32"
        )
    _, seq_len = shape
    return seq_len, dtype


def _first_block(path: Path) -> tuple[str, tuple[int, ...], np.dtype[Any]] | None:
    """Read name, shape and type of the first .npy member of a tar from its header; None if there is no such member."""
    with open_regular(path) as file, tarfile.open(fileobj=file, mode="r:", tarinfo=CheckedTarInfo) as tar:
        for member in tar:
            if not member.name.endswith(MEMBER_SUFFIX):
                continue
            stream = tar.extractfile(member)
            if stream is not None:  # None for a member that is not a file
                shape, _, dtype = read_array_header(io.BytesIO(stream.read(MAX_HEADER_BYTES)))
                return member.name, shape, dtype
    return None


def _index_shard(path: Path, name: str, seq_len: int, dtype: np.dtype[Any], vocabulary: Vocabulary) -> ShardEntry:
    """Check all rows of a shard, and return its entry for corpus.json; raise ManifestMismatch if a row is unusable."""
    shard = Shard(path, seq_len, dtype)
    try:
        rows = shard.rows(np.arange(shard.num_rows))
    finally:
        shard.close()
    is_pad = rows == vocabulary.special["[PAD]"]
    fault = _fault_of_rows(rows, is_pad, vocabulary)
    if fault is not None:
        raise ManifestMismatch(
            f"{name}: {fault}; set --vocab to the vocabulary that made its ids, or write the shard again"
        )
    return ShardEntry(
        name=name,
        rows=len(rows),
        tokens=int(np.count_nonzero(~is_pad)),
        bytes=path.stat().st_size,
        sha256=file_sha256(path),
    )


def _fault_of_rows(rows: np.ndarray, is_pad: np.ndarray, vocabulary: Vocabulary) -> str | None:
    """Return why a run could not train on a shard's rows, such as "has no rows"; None if it could.

    `is_pad`, [rows, seq_len], marks where `rows` has [PAD].
    """
    if len(rows) == 0:
        return "has no rows"
    largest_id = rows.max()
    if largest_id >= vocabulary.size:
        return f"holds id {largest_id}, but the vocabulary has {vocabulary.size} entries"
    if (rows[:, 0] != vocabulary.special["[CLS]"]).any():
        return "has a row that does not begin with [CLS]"
    pad_before_token = is_pad[:, :-1] & ~is_pad[:, 1:]  # a [PAD] whose right neighbour is another token
    if pad_before_token.any():
        return "has a row with [PAD] before its end"
    return None
