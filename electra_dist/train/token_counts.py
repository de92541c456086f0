"""How often each token is in the corpus, for the unigram generator.

Guarantee: exact counts of every id in every row, the same on all ranks; they depend on the corpus alone. They are the
manifest's (`totals.token_counts`) where the builder left them; else the ranks share the shards, read each once, and
keep the sum in the run folder under the corpus's fingerprint.

Cost: without the builder's counts one pass over the corpus before the first step, 66 GB for 33 B tokens, through the
cache that training uses; 3 ns a token on each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from electra_dist.collectives import from_rank_0
from electra_dist.data.cache import ShardCache
from electra_dist.engine.distributed import local_device
from electra_dist.run.folder import token_counts_file
from electra_dist.store.files import replacing
from electra_dist.train.inputs import OpenCorpus


def unigram_counts(
    corpus: OpenCorpus, vocab_size: int, run_dir: Path, open_cache: Callable[[], ShardCache]
) -> np.ndarray:
    """Return how often each id is in the corpus, int64 [V]. Collective; the run folder must exist.

    Args:
        open_cache: opens this node's cache of the corpus; called only where the rows must be counted.
    """
    given = corpus.manifest.totals.get("token_counts")
    if given is not None:
        return np.asarray(given, np.int64)
    file = token_counts_file(run_dir, corpus.manifest.fingerprint)
    kept = from_rank_0(lambda: np.load(file) if file.exists() else None)
    if kept is not None:
        return kept
    cache = open_cache()
    mine = range(dist.get_rank(), len(corpus.manifest.shards), dist.get_world_size())
    total = torch.from_numpy(count_tokens(cache, mine, vocab_size)).to(local_device())
    cache.close()
    dist.all_reduce(total)
    count_V: np.ndarray = total.cpu().numpy()
    if dist.get_rank() == 0:
        with replacing(file) as out:
            np.save(out, count_V)
    return count_V


def count_tokens(cache: ShardCache, shards: Iterable[int], vocab_size: int) -> np.ndarray:
    """[V] int64 over all rows of some shards, [PAD] included."""
    count_V = np.zeros(vocab_size, np.int64)
    for number in shards:
        rows = cache.open(number).rows(np.arange(cache.manifest.shards[number].rows))
        count_V += np.bincount(rows.reshape(-1), minlength=vocab_size)
        cache.keep_only([])
    return count_V
