"""Comparison of our training step on packed rows and on rows of one example each, in real tokens per second.

A part of `step.py`. Real tokens are those that are not padding. The rows come from two corpora of one text or are
synthetic: examples of random ids, of which the share `FULL_SHARE` fill a row and the others have any length, as the
ends of documents do.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import numpy as np
import torch
from measure import Json, ResultLine, alternate, finish, format_summary, print_table, ratio, summary
from step_parts.variants import BATCH, SPECIAL, ours, synthetic_rows, take_step

from electra_dist.config import Config
from electra_dist.data.manifest import read_manifest
from electra_dist.data.shard import Shard
from electra_dist.model.row_layout import SpecialIds
from electra_dist.store.open_store import open_store

FULL_SHARE = 0.7


def corpus_rows(url: str, num_rows: int) -> tuple[torch.Tensor, SpecialIds]:
    """Return rows spread evenly over the first shard of a local corpus, and the corpus's special token ids.

    Args:
        url: Folder of the corpus; an s3:// address fails, because the shard is read in place.
        num_rows: Rows to return; a row repeats if the shard has fewer.

    Returns:
        [num_rows, S] int64 token ids, and the special ids.
    """
    store = open_store(url)
    manifest = read_manifest(store)
    path = store.local_path(manifest.shards[0].name)
    assert path is not None, f"the corpus {url} is not on a local disk; copy it to a folder and pass the folder"
    shard = Shard(path, manifest.seq_len, manifest.numpy_dtype)
    rows = shard.rows(np.linspace(0, shard.num_rows - 1, num_rows).astype(np.int64))
    return torch.from_numpy(rows.astype(np.int64)), SpecialIds.from_tokens(manifest.tokenizer.special)


def _stepper(config: Config, special: SpecialIds, batches: Sequence[torch.Tensor]) -> Callable[[], object]:
    """Return a function that takes one fp32 training step of a new model on the next batch at each call."""
    way = ours(config, special)
    numbered_batches = iter(enumerate(batches))

    def step() -> object:
        number, ids_BS = next(numbered_batches)
        return take_step(way, ids_BS, number, "fp32", config.optimizer.clip_norm)

    return step


def compare_packing(config: Config, arguments: argparse.Namespace) -> Json:
    """Time our step on packed and on padded rows in turn.

    Args:
        config: Config of the model and the optimizer.
        arguments: Options of `step.py`; `rounds`, `corpus` and `padded_corpus` are read.

    Returns:
        For "packed" and "padded": seconds of each step, share of real tokens in a row, real tokens per second, and the
        rate of packed rows divided by its own rate.
    """
    num_rows = BATCH * (arguments.rounds + 1)  # One batch is for the round that is not timed.
    if arguments.corpus:
        sources = {
            "packed": corpus_rows(arguments.corpus, num_rows),
            "padded": corpus_rows(arguments.padded_corpus, num_rows),
        }
    else:
        sources = {
            "packed": (synthetic_rows(config, "rows", num_rows, FULL_SHARE), SPECIAL),
            "padded": (synthetic_rows(config, "none", num_rows, FULL_SHARE), SPECIAL),
        }
    steppers = {}
    real_tokens: dict[str, list[int]] = {}  # Of each timed step.
    for name, (rows, special) in sources.items():
        batches = rows.split(BATCH)
        steppers[name] = _stepper(config, special, batches)
        real_tokens[name] = [int((batch != special.pad).sum()) for batch in batches[1:]]
    seconds = alternate(steppers, arguments.rounds)
    rates = {
        name: [tokens / elapsed for tokens, elapsed in zip(real_tokens[name], seconds[name], strict=True)]
        for name in steppers
    }
    return {
        name: {
            "seconds": seconds[name],
            "real_share": sum(real_tokens[name]) / (len(real_tokens[name]) * BATCH * config.data.seq_len),
            "real_tokens_per_s": summary(rates[name]),
            "ratio": ratio(rates["packed"], rates[name]),
        }
        for name in steppers
    }


def report_packing(found: Json, facts: str, arguments: argparse.Namespace, argv: Sequence[str] | None) -> Json:
    """Print the table of packed and padded rows and return the record of the run.

    Args:
        found: Result of `compare_packing`.
        facts: Size of the batch and number of threads, as text.
        arguments: Options of `step.py`.
        argv: Words of the command line; None means those of this process.
    """
    text = "the corpora given" if arguments.corpus else f"{FULL_SHARE:.0%} of examples full, the rest of any length"
    print(f"fp32, {facts}; {text}")
    rows = [
        [
            name,
            f"{way['real_share']:.1%}",
            format_summary(way["real_tokens_per_s"], ",.0f"),
            format_summary(way["ratio"]),
        ]
        for name, way in found.items()
    ]
    print_table(["rows", "real tokens", "real tokens/s", "packed / this"], rows)
    line = ResultLine(
        f"packed rows, fp32, {facts}; {text}",
        f"{found['packed']['real_tokens_per_s']['median']:,.0f} real tokens/s",
        f"{found['padded']['ratio']['median']:.2f} x one example a row",
    )
    return finish("step-packed", arguments, argv, [line], threads=arguments.threads, ways=found)
