"""Open the two sources of rows of a round of training: the loader of training batches, and the evaluator.

A round is the part of a run from a restored checkpoint to the last step, a stop, or a rollback.
"""

from __future__ import annotations

import contextlib

import torch.distributed as dist

from electra_dist.config import Config
from electra_dist.config.schedule import value_at
from electra_dist.data.loader import RowLoader
from electra_dist.data.shard_cache import open_cache
from electra_dist.model.row_layout import SpecialIds
from electra_dist.train.evaluator import Evaluator
from electra_dist.train.health.rank_monitor import RankMonitor
from electra_dist.train.input_checks import RunInputs
from electra_dist.train.open_cache import open_shared_cache, shard_folder
from electra_dist.train.saving.checkpointer import TrainState

_SILENT_READ_S = 10.0  # a longer wait for rows is reported as a wait for storage


def open_loader(
    config: Config,
    inputs: RunInputs,
    state: TrainState,
    monitor: RankMonitor,
    stack: contextlib.ExitStack,
) -> RowLoader:
    """Return a loader of this rank's training rows that begins at the restored step and omits skipped steps.

    `stack` closes the cache of shards; the caller must close the loader itself, before the cache. Collective.
    """
    corpora = inputs.corpora
    return RowLoader(
        cache=open_shared_cache(config, corpora, stack),
        order=corpora.row_order(config.seed, config.data.shuffle_window_shards, config.train.global_batch),
        global_batch=config.train.global_batch,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        start_step=state.step,
        skip_steps=state.skips.steps,
        on_wait=lambda waited_s: monitor.waits_for_thread(waited_s, f"rows of {corpora.url}", _SILENT_READ_S),
    )


def open_evaluator(
    config: Config, inputs: RunInputs, special: SpecialIds, stack: contextlib.ExitStack
) -> Evaluator | None:
    """Return an evaluator on `log.eval_rows` rows of the corpus `data.heldout`; None if that key is not set."""
    heldout = inputs.heldout
    if heldout is None:
        return None
    cache = open_cache(heldout, config.data, shard_folder(config, heldout))
    stack.enter_context(contextlib.closing(cache))
    objective = config.objective
    return Evaluator(
        cache=cache,
        num_rows=config.log.eval_rows,
        micro_batch=config.train.micro_batch,
        seed=config.seed,
        special=special,
        context_mask_prob=value_at(objective.mask_prob, 1.0) if not objective.facts.predicts_tokens else None,
        num_shown_rows=config.log.text_samples,
    )
