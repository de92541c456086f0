"""The run: check, build, restore, then step after step until the target, telling and saving as it goes.

Guarantee: step t sees what (resolved config, corpus, seed, t) say and nothing else, so a run that was killed at any
moment and started again repeats an uninterrupted one bit for bit at the same number of ranks. The only data state in
a checkpoint is the integer t.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch.distributed as dist

from electra_dist.config import Config, canonical_json
from electra_dist.config_file import dump_yaml
from electra_dist.data.cache import ShardCache
from electra_dist.data.loader import RowLoader
from electra_dist.data.order import RowOrder
from electra_dist.errors import EXIT_DONE
from electra_dist.objectives.rtd import ReplacedTokenDetection
from electra_dist.train.checkpointing import RunMemory
from electra_dist.train.engine import Engine, init_distributed
from electra_dist.train.evaluate import Evaluator
from electra_dist.train.preparation import IDENTITY_FILE, Corpus, Inputs, check_inputs
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
    special = inputs.corpus.manifest.tokenizer.special
    module = ReplacedTokenDetection(config.model, config.objective, special, config.seed)
    engine = Engine(module, config)
    reporter = Reporter(config, engine) if rank == 0 else None
    memory = RunMemory(
        config, engine, inputs.corpus.manifest.fingerprint, reporter.committed if reporter else _nothing
    )
    restored = memory.restore(reporter.note if reporter else _nothing)
    start_step = restored.step if restored else 0
    if reporter:
        reporter.begin(memory.attempt, restored, inputs)
    caches = []
    try:
        if start_step < config.train.num_steps:
            corpus_cache = _open_cache(config, inputs.corpus)
            caches.append(corpus_cache)
            evaluator = None
            if inputs.heldout:
                heldout_cache = _open_cache(config, inputs.heldout)
                caches.append(heldout_cache)
                evaluator = Evaluator(
                    cache=heldout_cache,
                    num_rows=config.log.eval_rows,
                    micro_batch=config.train.micro_batch,
                    seed=config.seed,
                    pad_id=special["[PAD]"],
                )
            _train(config, engine, corpus_cache, special, start_step, evaluator, memory, reporter)
    finally:
        for cache in caches:
            cache.close()
        if reporter:
            reporter.close()
    engine.close()
    return EXIT_DONE


def _train(
    config: Config,
    engine: Engine,
    cache: ShardCache,
    special: dict[str, int],
    start_step: int,
    evaluator: Evaluator | None,
    memory: RunMemory,
    reporter: Reporter | None,
) -> None:
    num_steps = config.train.num_steps
    order = RowOrder([s.rows for s in cache.manifest.shards], config.seed, config.data.shuffle_window_shards)
    loader = RowLoader(
        cache, order, config.train.global_batch, dist.get_rank(), dist.get_world_size(), start_step
    )
    train_step = TrainStep(engine, config.objective, special, config.seed, config.train.micro_batch)
    try:
        for step in range(start_step, num_steps):
            lr = learning_rate(step, num_steps, config.optimizer)
            result = train_step(loader.next(), lr)
            done, last = step + 1, step + 1 == num_steps
            if reporter and (last or done % config.log.every_steps == 0):
                reporter.step(done, result, lr, loader.wait_s)
            if evaluator and (last or _due(done, config.log.eval_every_steps)):
                evaluation = evaluator.run(engine, done)
                if reporter:
                    reporter.evaluation(evaluation)
            if last or _due(done, config.checkpoint.every_steps):
                timing = memory.save(done)
                if reporter:
                    reporter.saving(done, timing)
        memory.close()
    finally:
        loader.close()


def _due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0


def _open_cache(config: Config, corpus: Corpus) -> ShardCache:
    folder = Path(config.data.cache_dir or Path(config.run_dir) / "cache")
    return ShardCache(corpus.store, corpus.manifest, folder, config.data.fetch_threads)


def _make_run_folder(config: Config, corpus: Corpus) -> None:
    """The folder says by itself what the run is: resolved config, identity, vocabulary."""
    run_dir = Path(config.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text(dump_yaml(config))
    (run_dir / IDENTITY_FILE).write_text(canonical_json(config.identity()) + "\n")
    (run_dir / "tokenizer.json").write_text(corpus.manifest.tokenizer.model_dump_json(indent=1) + "\n")
    vocab = run_dir / "vocab.txt"
    if not vocab.exists():
        vocab.write_bytes(corpus.store.read(corpus.manifest.tokenizer.vocab_file))


def _nothing(*_: object) -> None:
    """What the ranks that report nothing call."""
