"""How many more real tokens per second does our step train on packed rows than on rows of one example each?

    python benchmarks/run.py step_packed                                  # synthetic rows
    python benchmarks/run.py step_packed --corpus A --padded-corpus B     # two corpora of one text

Real tokens are those that are not padding. Synthetic rows hold random ids: the share `FULL_SHARE` of the examples fill
a row and the others have any length, as the ends of documents do.

Limits: fp32, one process, without DeepSpeed and without a loader.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np
import torch
from measure import Found, ResultLine, alternate, format_summary, print_table, ratio, summary
from step import add_model_options, small_config
from step_ways import BATCH, SPECIAL, ours, stepper, synthetic_rows

from electra_dist.data.manifest import read_manifest
from electra_dist.data.shard import Shard
from electra_dist.model.row_layout import SpecialIds
from electra_dist.store.open_store import open_store

ROUNDS = 7
FULL_SHARE = 0.7


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--corpus", help="folder of a corpus of packed rows")
    parser.add_argument("--padded-corpus", help="folder of a corpus of the same text, built with corpus.packing=none")
    add_model_options(parser)


def corpus_rows(url: str, num_rows: int) -> tuple[torch.Tensor, SpecialIds]:
    """Return rows spread evenly over the first shard of a local corpus, [num_rows, S] int64, and its special ids.

    A row repeats if the shard has fewer.
    """
    store = open_store(url)
    manifest = read_manifest(store)
    path = store.local_path(manifest.shards[0].name)
    assert path is not None, f"the corpus {url} is not on a local disk; copy it to a folder and pass the folder"
    shard = Shard(path, manifest.seq_len, manifest.numpy_dtype)
    rows = shard.rows(np.linspace(0, shard.num_rows - 1, num_rows).astype(np.int64))
    return torch.from_numpy(rows.astype(np.int64)), SpecialIds.from_tokens(manifest.tokenizer.special)


def measure(arguments: argparse.Namespace) -> Found:
    """Time our step on packed and on padded rows in turn."""
    if bool(arguments.corpus) != bool(arguments.padded_corpus):
        sys.exit("only one of --corpus and --padded-corpus is set; set both or neither")
    config, facts = small_config(arguments)
    num_rows = BATCH * (arguments.rounds + 1)  # One batch is for the round that is not timed.
    if arguments.corpus:
        text = "the corpora given"
        sources = {
            "packed": corpus_rows(arguments.corpus, num_rows),
            "padded": corpus_rows(arguments.padded_corpus, num_rows),
        }
    else:
        text = f"{FULL_SHARE:.0%} of examples full, the rest of any length"
        sources = {
            "packed": (synthetic_rows(config, "rows", num_rows, FULL_SHARE), SPECIAL),
            "padded": (synthetic_rows(config, "none", num_rows, FULL_SHARE), SPECIAL),
        }
    turns = {}
    real_tokens: dict[str, list[int]] = {}  # Of each timed step.
    for name, (rows, special) in sources.items():
        batches = rows.split(BATCH)
        turns[name] = stepper(ours(config, special), batches, "fp32", config.optimizer.clip_norm)
        real_tokens[name] = [int((batch != special.pad).sum()) for batch in batches[1:]]
    seconds = alternate(turns, arguments.rounds)
    rates = {
        name: [tokens / elapsed for tokens, elapsed in zip(real_tokens[name], seconds[name], strict=True)]
        for name in turns
    }
    found = {
        name: {
            "seconds": seconds[name],
            "real_share": sum(real_tokens[name]) / (len(real_tokens[name]) * BATCH * config.data.seq_len),
            "real_tokens_per_s": summary(rates[name]),
            "ratio": ratio(rates["packed"], rates[name]),
        }
        for name in turns
    }
    print(f"fp32, {facts}; {text}")
    cells = [
        [
            name,
            f"{way['real_share']:.1%}",
            format_summary(way["real_tokens_per_s"], ",.0f"),
            format_summary(way["ratio"]),
        ]
        for name, way in found.items()
    ]
    print_table(["rows", "real tokens", "real tokens/s", "packed / this"], cells)
    line = ResultLine(
        f"packed rows, fp32, {facts}; {text}",
        f"{found['packed']['real_tokens_per_s']['median']:,.0f} real tokens/s",
        f"{found['padded']['ratio']['median']:.2f} x one example a row",
    )
    return Found([line], {"threads": torch.get_num_threads(), "ways": found})
