"""Our step on packed rows and on rows of one example each, otherwise the same: real tokens a second.

The rows come from two corpora of one text, or are synthetic: examples of random ids, of which `FULL_SHARE` are full
and the rest are of any length, as the ends of documents are.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import numpy as np
import torch
from measure import Json, ResultLine, alternate, finish, print_table, ratio, summary, told
from step_parts.ways import BATCH, SPECIAL, ours, synthetic_rows, take_step

from electra_dist.config import Config
from electra_dist.data.manifest import read_manifest
from electra_dist.data.shard import Shard
from electra_dist.model.rows import SpecialIds
from electra_dist.store.open import open_store

FULL_SHARE = 0.7


def corpus_rows(url: str, num_rows: int) -> tuple[torch.Tensor, SpecialIds]:
    """Rows spread over the first shard of a local corpus, and its special ids."""
    store = open_store(url)
    manifest = read_manifest(store)
    path = store.local_path(manifest.shards[0].name)
    assert path is not None, f"{url}: give a local corpus"
    shard = Shard(path, manifest.seq_len, manifest.numpy_dtype)
    rows = shard.rows(np.linspace(0, shard.num_rows - 1, num_rows).astype(np.int64))
    return torch.from_numpy(rows.astype(np.int64)), SpecialIds.from_tokens(manifest.tokenizer.special)


def _stepper(config: Config, special: SpecialIds, batches: Sequence[torch.Tensor]) -> Callable[[], object]:
    """Each call: one step on the next batch."""
    way, numbered = ours(config, special), iter(enumerate(batches))

    def once() -> object:
        number, ids_BS = next(numbered)
        return take_step(way, ids_BS, number, "fp32", config.optimizer.clip_norm)

    return once


def compare_packing(config: Config, arguments: argparse.Namespace) -> Json:
    """Our step on packed rows and on rows of one example each: real tokens a second."""
    num_rows = BATCH * (arguments.rounds + 1)
    if arguments.corpus:
        found = {
            "packed": corpus_rows(arguments.corpus, num_rows),
            "padded": corpus_rows(arguments.padded_corpus, num_rows),
        }
    else:
        found = {
            "packed": (synthetic_rows(config, "rows", num_rows, FULL_SHARE), SPECIAL),
            "padded": (synthetic_rows(config, "none", num_rows, FULL_SHARE), SPECIAL),
        }
    calls, real = {}, {}
    for name, (rows, ids) in found.items():
        batches = rows.split(BATCH)
        calls[name] = _stepper(config, ids, batches)
        real[name] = [int((batch != ids.pad).sum()) for batch in batches[1:]]
    seconds = alternate(calls, arguments.rounds)
    rates = {name: [tokens / s for tokens, s in zip(real[name], seconds[name], strict=True)] for name in calls}
    return {
        name: {
            "seconds": seconds[name],
            "real_share": sum(real[name]) / (len(real[name]) * BATCH * config.data.seq_len),
            "real_tokens_per_s": summary(rates[name]),
            "ratio": ratio(rates["packed"], rates[name]),
        }
        for name in calls
    }


def report_packing(found: Json, facts: str, arguments: argparse.Namespace, argv: Sequence[str] | None) -> Json:
    """Print and record packed against padded rows."""
    text = "the corpora given" if arguments.corpus else f"{FULL_SHARE:.0%} of examples full, the rest of any length"
    print(f"fp32, {facts}; {text}")
    rows = [
        [name, f"{way['real_share']:.1%}", told(way["real_tokens_per_s"], ",.0f"), told(way["ratio"])]
        for name, way in found.items()
    ]
    print_table(["rows", "real tokens", "real tokens/s", "packed / this"], rows)
    line = ResultLine(
        f"packed rows, fp32, {facts}; {text}",
        f"{found['packed']['real_tokens_per_s']['median']:,.0f} real tokens/s",
        f"{found['padded']['ratio']['median']:.2f} x one example a row",
    )
    return finish("step-packed", arguments, argv, [line], threads=arguments.threads, ways=found)
