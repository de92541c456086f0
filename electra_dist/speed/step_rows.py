"""Open rows for a measurement of training steps: those of the config's corpus, or made-up ones without a corpus."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from electra_dist.config import Config
from electra_dist.data.loader import RowBatch, RowLoader
from electra_dist.data.receipt import Receipt
from electra_dist.data.shard_cache import open_cache
from electra_dist.errors import StoreMissing
from electra_dist.model.row_layout import SpecialIds
from electra_dist.train.inputs import open_training_corpora

_MADE_UP_IDS = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)


class BatchSource(Protocol):
    """Source of the batches for a measurement of training steps, one batch for each step."""

    wait_s: float  # seconds that `next` has waited in total

    def next(self) -> RowBatch:
        """Return the batch of the next step."""


@dataclass(frozen=True)
class StepRows:
    """Rows with which training steps are measured: those of the run's corpus, or made up where it cannot be read."""

    name: str  # "corpus" or "made up"
    special: SpecialIds
    batches: BatchSource


class MadeUpBatches:
    """Source of batches of random rows: each row is one example, `[CLS]`, ordinary tokens, `[SEP]`, without pads."""

    wait_s = 0.0

    def __init__(self, config: Config) -> None:
        self._config = config
        self._draw = np.random.default_rng(config.seed)
        self._step = 0

    def next(self) -> RowBatch:
        """Return a new batch of random rows, int32 ids, with row numbers that belong to no corpus."""
        shape = (self._config.train.global_batch, self._config.data.seq_len)
        first_ordinary_id = max(_MADE_UP_IDS) + 1
        ids = self._draw.integers(first_ordinary_id, self._config.model.vocab_size, shape, dtype=np.int32)
        ids[:, 0] = _MADE_UP_IDS.cls
        ids[:, -1] = _MADE_UP_IDS.sep
        row_ids = np.arange(shape[0], dtype=np.int64)
        batch = RowBatch(step=self._step, row0=0, ids=ids, row_ids=row_ids, receipt=Receipt())
        self._step += 1
        return batch


def open_rows(config: Config, stack: contextlib.ExitStack) -> StepRows:
    """Open the rows of the config's corpus as a run reads them, or make rows up if there is no corpus.
    `stack` closes what is opened. Raises UserError if the corpus exists and cannot be used.
    """
    try:
        corpora = open_training_corpora(config)
    except StoreMissing:
        return StepRows("made up", _MADE_UP_IDS, MadeUpBatches(config))
    cache = stack.enter_context(contextlib.closing(open_cache(corpora, config.data, config.cache_folder)))
    order = corpora.row_order(config.seed, config.data.shuffle_window_shards, config.train.global_batch)
    loader = RowLoader(
        cache=cache, order=order, global_batch=config.train.global_batch, rank=0, world_size=1, start_step=0
    )
    stack.enter_context(contextlib.closing(loader))
    return StepRows("corpus", SpecialIds.from_tokens(corpora.tokenizer.special), loader)
