"""The run: check, build, restore, then step after step until the target, telling and saving as it goes.

The step loop itself is `trainer.py`; this file is what surrounds it: inputs, process group, run folder, engine.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch.distributed as dist
from electra_kernels.native import host

from electra_dist.checkpoint.targets import open_targets
from electra_dist.collectives import gather
from electra_dist.config import Config
from electra_dist.engine.distributed import init_distributed, local_device
from electra_dist.engine.engine import Engine
from electra_dist.engine.micro_batch import with_micro_batch
from electra_dist.errors import EXIT_USER_ERROR, UserError
from electra_dist.model.attention import AttentionChoice, choose_attention
from electra_dist.model.encoder import Encoder
from electra_dist.model.rows import SpecialIds
from electra_dist.objectives.base import Objective
from electra_dist.objectives.build import build_objective
from electra_dist.objectives.corruption import CorruptingObjective
from electra_dist.pretrained.init_from import begin_with_source
from electra_dist.run.folder import begin_run_folder
from electra_dist.train.clock import seconds_since_process_start
from electra_dist.train.health.error_relay import another_rank_reported, report_once
from electra_dist.train.health.rank_monitor import RankMonitor
from electra_dist.train.health.stop_request import StopRequest
from electra_dist.train.inputs import RunInputs, check_inputs, run_identity
from electra_dist.train.skip_list import SkipList
from electra_dist.train.token_counts import unigram_counts
from electra_dist.train.trainer import Trainer


def run(config: Config) -> int:
    """Train until `config.train.num_steps`, from wherever the run folder stands. Called by every rank.

    Returns:
        An exit code of errors.py.

    Raises:
        UserError: before anything is written; a later one is told here and is an exit code.
    """
    import_s, begin = seconds_since_process_start(), time.perf_counter()
    inputs = check_inputs(config, int(os.environ.get("WORLD_SIZE", "1")))
    init_distributed()
    try:
        return _run(config, inputs, import_s, begin)
    except UserError as error:
        report_once(error)
        return EXIT_USER_ERROR
    except RuntimeError:
        if another_rank_reported():
            return EXIT_USER_ERROR
        raise
    finally:
        dist.destroy_process_group()  # else a rank in four aborts at exit


def _run(config: Config, inputs: RunInputs, import_s: float, begin: float) -> int:
    stop = StopRequest(Path(config.run_dir), dist.get_rank() == 0)
    special = SpecialIds.from_tokens(inputs.corpus.manifest.tokenizer.special)
    module = _build_module(config, inputs, special)
    notes = [f"attention: {module.attention.backend} ({module.attention.reason})"]
    if host.permute is None:
        notes.append(
            "host library: not built, so NumPy orders rows, slower; install a C compiler and the package again"
        )
    if config.engine.compile:
        notes.append(f"layers are compiled at the first step; compiled code is kept in {config.cache_folder}")
    # Before the folder: other weights may be refused.
    notes += [f"init_from: {note}" for note in begin_with_source(module.towers, config.train, open_targets(config))]
    if dist.get_rank() == 0:
        manifest = inputs.corpus.manifest
        tokenizer = manifest.tokenizer
        begin_run_folder(
            config,
            run_identity(config, manifest.fingerprint),
            tokenizer.model_dump_json(indent=1),
            inputs.corpus.store.read(tokenizer.vocab_file),
        )
    dist.barrier()
    if config.train.largest_micro_batch:
        config = with_micro_batch(config, module, local_device())
        notes.append(f"micro-batch: {config.train.micro_batch} rows, the most that fit")
    monitor = RankMonitor(Path(config.run_dir), config.cluster)
    engine = Engine(module, config.train, config.engine, config.optimizer)
    skips = SkipList(Path(config.run_dir), config.train.skip_steps)
    build_s = {"import": import_s, "build": time.perf_counter() - begin}
    code = Trainer(config, inputs, engine, special, skips, stop, monitor, build_s, notes).run()
    while code is None:  # a rollback is a restart that keeps the process
        code = Trainer(config, inputs, engine, special, skips, stop, monitor, None).run()
    monitor.close()
    engine.close()
    return code


def _build_module(config: Config, inputs: RunInputs, special: SpecialIds) -> Objective:
    counts = None
    if config.objective.generator == "unigram":
        corpus = inputs.corpus
        counts = unigram_counts(
            corpus,
            config.model.vocab_size,
            Path(config.run_dir),
            lambda: corpus.open_cache(config.data, config.cache_folder),
        )
    objective = build_objective(config.model, config.objective, special, config.seed, config.kernels.backend, counts)
    objective.attention = _agreed(choose_attention(config, local_device().type))
    for module in objective.modules():
        if isinstance(module, Encoder):
            module.recompute = config.engine.activation_checkpointing
    if config.engine.compile:
        from electra_dist.model.compile import compile_layers  # seconds, which other runs are spared

        compile_layers(objective, config.cache_folder / "compiled")
    if isinstance(objective, CorruptingObjective):
        objective.early_generator = config.engine.early_generator
    return objective


def _agreed(choice: AttentionChoice) -> AttentionChoice:
    """The same on all ranks: one whose trial failed decides for the others."""
    return next((each for each in gather(choice) if each.backend == "sdpa"), choice)
