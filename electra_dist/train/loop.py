"""The run: check, build, restore, then step after step until the target, telling and saving as it goes.

Guarantee: step t sees what (resolved config, corpus, seed, t) say and nothing else, so a run that was killed at any
moment and started again repeats an uninterrupted one bit for bit at the same number of ranks. The only data state in
a checkpoint is the integer t.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import torch.distributed as dist

from electra_dist.config import Config, canonical_json
from electra_dist.config_file import dump_yaml
from electra_dist.data.cache import ShardCache
from electra_dist.data.loader import RowLoader
from electra_dist.data.order import RowOrder
from electra_dist.errors import EXIT_DONE
from electra_dist.model.init import build_towers
from electra_dist.model.rows import SpecialIds
from electra_dist.objectives.rtd import ReplacedTokenDetection
from electra_dist.store import replacing
from electra_dist.train.checkpointing import RunMemory
from electra_dist.train.engine import Engine, init_distributed
from electra_dist.train.evaluate import Evaluator
from electra_dist.train.preparation import (
    CONFIG_FILE,
    IDENTITY_FILE,
    TOKENIZER_FILE,
    VOCAB_FILE,
    Corpus,
    Inputs,
    check_inputs,
    run_identity,
)
from electra_dist.train.reporter import Reporter
from electra_dist.train.schedule import learning_rate
from electra_dist.train.step import TrainStep


def run(config: Config) -> int:
    """Train until `config.train.num_steps`, from wherever the run folder stands. Called by every rank.

    Returns:
        An exit code of errors.py.

    Raises:
        UserError: before anything is written.
    """
    inputs = check_inputs(config, int(os.environ.get("WORLD_SIZE", "1")))
    init_distributed()
    try:
        return _run(config, inputs)
    finally:
        dist.destroy_process_group()  # else a rank in four aborts at exit


def _run(config: Config, inputs: Inputs) -> int:
    rank = dist.get_rank()
    if rank == 0:
        _make_run_folder(config, inputs.corpus)
    dist.barrier()
    special = SpecialIds.from_tokens(inputs.corpus.manifest.tokenizer.special)
    engine = Engine(_build_module(config, special), config)
    memory = RunMemory(config, engine, inputs.corpus.manifest.fingerprint)
    restored, set_aside = memory.restore()
    reporter = None
    if rank == 0:
        reporter = Reporter(config, engine, inputs.corpus.manifest, restored)
        reporter.began(memory.attempt, restored, set_aside)
        memory.writer.on_commit = reporter.committed
    start_step = restored.step if restored else 0
    crashed = True
    try:
        if start_step < config.train.num_steps:
            _train(config, inputs, engine, special, start_step, memory, reporter)
        crashed = False
    finally:
        if reporter:
            reporter.close(crashed=crashed)
    engine.close()
    return EXIT_DONE


def _train(
    config: Config,
    inputs: Inputs,
    engine: Engine,
    special: SpecialIds,
    start_step: int,
    memory: RunMemory,
    reporter: Reporter | None,
) -> None:
    num_steps = config.train.num_steps
    with contextlib.ExitStack() as stack:
        loader = stack.enter_context(contextlib.closing(_open_loader(config, inputs.corpus, start_step, stack)))
        evaluator = _open_evaluator(config, inputs.heldout, special, stack) if inputs.heldout else None
        train_step = TrainStep(engine, config.objective, special, config.seed, config.train.micro_batch)
        stack.enter_context(contextlib.closing(memory))
        for step in range(start_step, num_steps):
            lr = learning_rate(step, num_steps, config.optimizer)
            result = train_step(loader.next(), lr)
            done, last = step + 1, step + 1 == num_steps
            if reporter and (last or _due(done, config.log.every_steps)):
                reporter.step(done, result, lr, loader.wait_s)
            if evaluator and (last or _due(done, config.log.eval_every_steps)):
                evaluation = evaluator.run(engine, done)
                if reporter:
                    reporter.evaluation(evaluation)
            if last or _due(done, config.checkpoint.every_steps):
                timing = memory.save(done)
                if reporter:
                    reporter.saving(done, timing)


def _due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0


def _build_module(config: Config, special: SpecialIds) -> ReplacedTokenDetection:
    towers = build_towers(config.model, config.seed)
    return ReplacedTokenDetection(towers, config.objective, special, config.kernels.backend)


def _open_cache(config: Config, corpus: Corpus, stack: contextlib.ExitStack) -> ShardCache:
    folder = Path(config.data.cache_dir or Path(config.run_dir) / "cache")
    cache = ShardCache(corpus.store, corpus.manifest, folder, config.data.fetch_threads)
    return stack.enter_context(contextlib.closing(cache))


def _open_loader(config: Config, corpus: Corpus, start_step: int, stack: contextlib.ExitStack) -> RowLoader:
    cache = _open_cache(config, corpus, stack)
    order = RowOrder([s.rows for s in corpus.manifest.shards], config.seed, config.data.shuffle_window_shards)
    return RowLoader(cache, order, config.train.global_batch, dist.get_rank(), dist.get_world_size(), start_step)


def _open_evaluator(config: Config, corpus: Corpus, special: SpecialIds, stack: contextlib.ExitStack) -> Evaluator:
    return Evaluator(
        cache=_open_cache(config, corpus, stack),
        num_rows=config.log.eval_rows,
        micro_batch=config.train.micro_batch,
        seed=config.seed,
        special=special,
    )


def _make_run_folder(config: Config, corpus: Corpus) -> None:
    """The folder says by itself what the run is: resolved config, identity, vocabulary."""
    texts = {
        CONFIG_FILE: dump_yaml(config).encode(),
        IDENTITY_FILE: canonical_json(run_identity(config, corpus.manifest)).encode() + b"\n",
        TOKENIZER_FILE: corpus.manifest.tokenizer.model_dump_json(indent=1).encode() + b"\n",
        VOCAB_FILE: corpus.store.read(corpus.manifest.tokenizer.vocab_file),
    }
    for name, text in texts.items():
        with replacing(Path(config.run_dir) / name) as file:
            file.write(text)
