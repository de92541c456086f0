"""Count how often each token occurs in the corpus, for the generator that draws tokens by their frequency (unigram).

Guarantee: exact counts of every id in every row, [PAD] included, the same on all ranks; they depend on the corpus
alone.

How: each rank counts its share of the shards. The sum is kept in the run folder, in a file named after the corpus's
fingerprint. The file ends with the SHA-256 of its content, which a later start checks.

Cost: one pass over the corpus before the first step, 66 GB for 33 B tokens, through the cache that training uses; 3 ns
per token on each rank.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from electra_dist.collectives import from_rank_0
from electra_dist.data.corpora import Corpora
from electra_dist.data.shard import parse_array
from electra_dist.data.shard_cache import ShardCache
from electra_dist.engine.process_group import local_device
from electra_dist.errors import UserError
from electra_dist.run.folder import token_counts_file
from electra_dist.store.atomic_files import read_regular, readable, replacing
from electra_dist.store.patience import Patience, patient

_DIGEST_BYTES = hashlib.sha256().digest_size


def unigram_counts(
    corpora: Corpora,
    vocab_size: int,
    run_dir: Path,
    open_cache: Callable[[], ShardCache],
) -> np.ndarray:
    """Return how often each token id occurs in the corpus, int64 [V]. Collective.

    If an earlier start has stored the counts in `run_dir`, they are read. Otherwise they are counted through
    `open_cache` and stored.
    """
    file = token_counts_file(run_dir, corpora.fingerprint)
    counts_of_earlier_start = from_rank_0(lambda: read_counts(file, vocab_size).tolist() if file.exists() else None)
    if counts_of_earlier_start is not None:
        return np.array(counts_of_earlier_start, np.int64)
    # Every rank counts its own shards: rank 0 of 4 counts the shards 0, 4, 8, ...
    shards_of_rank = range(dist.get_rank(), len(corpora.shards), dist.get_world_size())
    with contextlib.closing(open_cache()) as cache:
        counts_of_rank = cache.count_tokens(shards_of_rank)
    total_V = torch.from_numpy(counts_of_rank).to(local_device())
    dist.all_reduce(total_V)
    count_V: np.ndarray = total_V.cpu().numpy()
    if dist.get_rank() == 0:
        write_counts(file, count_V, patience=corpora.patience)
    return count_V


def read_counts(file: Path, vocab_size: int) -> np.ndarray:
    """Read the counts that `write_counts` has written, int64 [vocab_size]; raise UserError if they are damaged."""
    next_step = "delete it, and the next start counts again"
    with readable(file):
        data = read_regular(file)
    content, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    if hashlib.sha256(content).digest() != digest:
        raise UserError(f"{file}: damaged, because it does not end with the SHA-256 of its content; {next_step}")
    try:
        counts_V = parse_array(content)
    except ValueError as error:
        raise UserError(f"{file}: damaged, because {error}; {next_step}") from None
    if counts_V.shape != (vocab_size,) or counts_V.dtype != np.int64:
        raise UserError(f"{file}: damaged, because it does not hold {vocab_size} counts; {next_step}")
    return counts_V.copy()  # `parse_array` returns a view that cannot be written to


@patient
def write_counts(file: Path, count_V: np.ndarray, *, patience: Patience | None = None) -> None:
    """Write the counts of all tokens to `file`, from which later starts read them.

    If the disk is full or does not respond, wait for it as long as `patience` says; None: not at all.
    """
    content = io.BytesIO()
    np.save(content, count_V)
    with replacing(file) as out:
        out.write(content.getvalue() + hashlib.sha256(content.getvalue()).digest())
