"""Run pretraining on one rank: check the inputs, build the model and the engine, restore, train to the last step.

The step loop itself is in `trainer.py`; this file does what comes before and after it: inputs, process group, run
folder, engine, and the exit code.
"""

from __future__ import annotations

import functools
import time
from pathlib import Path

import numpy as np
import torch.distributed as dist
from electra_kernels.native import cpu_library

from electra_dist.checkpoint.checkpoint import checkpoints
from electra_dist.checkpoint.checkpoint_stores import check_targets, open_targets
from electra_dist.checkpoint.restore import set_all_aside
from electra_dist.collectives import Choice, agree, from_rank_0, gather
from electra_dist.config import Config, canonical_json
from electra_dist.config.rules import keys_without_effect
from electra_dist.data.shard_cache import open_cache
from electra_dist.engine.engine import Engine
from electra_dist.engine.micro_batch import PredictRows, with_fitting_micro_batch, with_micro_batch
from electra_dist.engine.process_group import init_distributed, local_device, set_deterministic_mode
from electra_dist.engine.rank_environment import rank_place
from electra_dist.errors import EXIT_STOPPED, EXIT_USER_ERROR, ManifestMismatch, StorageLost, StoreAway, UserError
from electra_dist.escapes import printable
from electra_dist.model.attention import BACKENDS
from electra_dist.model.attention_choice import attention_note, choose_attention
from electra_dist.model.encoder import Encoder
from electra_dist.model.row_layout import SpecialIds
from electra_dist.objectives.base import Objective
from electra_dist.objectives.build_objective import build_objective, needs_token_counts
from electra_dist.objectives.corruption import CorruptingObjective
from electra_dist.pretrained.weights import begin_with_source, read_frozen_generator, with_generator_digest
from electra_dist.run.folder import (
    begin_run_folder,
    check_run_folder,
    delete_unfinished_files,
    move_records_aside,
    run_identity,
)
from electra_dist.run.lease import RunLease, hold_lease
from electra_dist.store.patience import Patience, print_line
from electra_dist.store.user_cache import keep_compiled_code
from electra_dist.train.health.error_relay import report_once, reported_exit_code
from electra_dist.train.health.rank_monitor import RankMonitor
from electra_dist.train.health.stop_request import StopRequest
from electra_dist.train.input_checks import RunInputs, check_inputs, remarks_on_corpora
from electra_dist.train.open_cache import describe_caches, node_cache_folder, shard_folder
from electra_dist.train.reporting.time_accounting import seconds_since_process_start
from electra_dist.train.restart_pause import pause_after_lost_storage, record_lost_storage
from electra_dist.train.skip_list_file import SkipList
from electra_dist.train.token_counts import unigram_counts
from electra_dist.train.trainer import Trainer


def run(
    config: Config,
    accept_new_numerics: bool = False,
    predict_rows: PredictRows | None = None,
    from_scratch: bool = False,
) -> int:
    """Train from the newest checkpoint of the run until `config.train.num_steps`. Every rank calls it.

    The call creates the process group that the launcher's environment variables describe, and destroys it. Before the
    group exists, UserError and StorageLost are raised; nothing has been written then. Later, the first such error of
    any rank is printed once, and all ranks return its exit code.

    Args:
        accept_new_numerics: whether to continue a run of a version that draws random numbers or rounds differently.
        predict_rows: predicts the largest micro-batch for `train.micro_batch: auto`; see `with_micro_batch`.
        from_scratch: whether to begin again at step 0 in a folder that has checkpoints. They and the records of the
            run are set aside, and nothing is deleted.

    Returns:
        An exit code of `electra_dist/errors.py`: 0 for done, 69 for an unhealthy node, 75 for stopped on request or
        for lack of storage, or 78 for a user's error.
    """
    import_s = seconds_since_process_start()
    begin = time.perf_counter()
    place = rank_place()
    patience = Patience(config.cluster.storage_patience_s, print_line if place.local_rank == 0 else _print_nothing)
    config, notes = with_fitting_micro_batch(config, place.world_size)
    try:
        if config.objective.generator == "frozen":
            config = patience.call(functools.partial(with_generator_digest, config))
        inputs = patience.call(
            lambda: check_inputs(config, place.world_size, accept_new_numerics, from_scratch, patience)
        )
    except StorageLost as error:
        if place.rank == 0:
            record_lost_storage(Path(config.run_dir), str(error))
        raise
    set_deterministic_mode(config.engine.deterministic)
    init_distributed()
    try:
        return _run(config, inputs, import_s, begin, predict_rows, from_scratch, patience, notes)
    except UserError as error:
        code = EXIT_STOPPED if isinstance(error, StoreAway) else EXIT_USER_ERROR
        report_once(error, code)
        if isinstance(error, StorageLost) and dist.get_rank() == 0:
            record_lost_storage(Path(config.run_dir), str(error))
        return code
    except RuntimeError:
        # A collective fails when another rank has ended; that rank has printed the cause.
        reported_code = reported_exit_code()
        if reported_code is None:
            raise
        return reported_code
    finally:
        dist.destroy_process_group()  # without it, one rank in four aborts at exit


def _print_nothing(text: str) -> None:
    """Print nothing. Only one rank of each node reports that storage is away; the others use this function."""


def _set_earlier_run_aside(config: Config, patience: Patience) -> list[str]:
    """Set checkpoints and records of the earlier run aside, deleting nothing; return log lines. Rank 0 only."""
    return [*set_all_aside(open_targets(config, patience)), *move_records_aside(Path(config.run_dir))]


def _run(
    config: Config,
    inputs: RunInputs,
    import_s: float,
    begin: float,  # when `run` was called, by `time.perf_counter`
    predict_rows: PredictRows | None,
    from_scratch: bool,
    patience: Patience,
    notes: list[str],
) -> int:
    """Lock the run folder against other processes, train until the run ends, and unlock the folder. Collective."""
    run_dir = Path(config.run_dir)
    is_first_rank = dist.get_rank() == 0
    stop = StopRequest(run_dir, is_first_rank)  # first of all: a signal during the build must not be lost
    if pause_after_lost_storage(run_dir, stop):
        return EXIT_STOPPED
    # Targets are checked before anything is written into the run folder.
    from_rank_0(lambda: check_targets(config, patience))
    lease = _hold_run_folder(config, inputs, patience)
    try:
        return _train(config, inputs, stop, lease, import_s, begin, predict_rows, from_scratch, patience, notes)
    finally:
        if lease is not None:
            lease.release()


def _hold_run_folder(config: Config, inputs: RunInputs, patience: Patience) -> RunLease | None:
    """Lock the run folder and check again that it holds no other run; return the lock (rank 0) or None. Collective."""
    run_dir = Path(config.run_dir)
    identity = run_identity(config, inputs.corpora.fingerprint, inputs.corpora.phase_fingerprints)
    if len(set(gather(canonical_json({"identity": identity, "heldout": inputs.heldout_digest})))) > 1:
        raise ManifestMismatch(
            f"run_dir {run_dir}: a corpus or the frozen generator has changed while the ranks have read it, or is not "
            f"the same on all nodes; start the run again"
        )
    leases: list[RunLease] = []

    # Another run may have begun in the folder since `check_inputs` has looked. With the lease, none can begin.
    def hold() -> None:
        lease = hold_lease(run_dir, say=lambda line: print(printable(line), flush=True))
        try:
            check_run_folder(run_dir, identity, inputs.accept_new_numerics)
            delete_unfinished_files(run_dir)
        except UserError:
            lease.release()
            raise
        leases.append(lease)

    from_rank_0(lambda: patience.call(hold))
    return leases[0] if leases else None


def _train(
    config: Config,
    inputs: RunInputs,
    stop: StopRequest,
    lease: RunLease | None,
    import_s: float,
    begin: float,
    predict_rows: PredictRows | None,
    from_scratch: bool,
    patience: Patience,
    notes: list[str],
) -> int:
    """Build the model and the engine and train until the run ends. Collective."""
    run_dir = Path(config.run_dir)
    wait = patience.call
    special = SpecialIds.from_tokens(inputs.corpora.tokenizer.special)
    if from_scratch:
        notes = notes + from_rank_0(lambda: wait(lambda: _set_earlier_run_aside(config, patience)))
    begins = from_scratch or not checkpoints(open_targets(config, patience))
    notes = notes + from_rank_0(lambda: remarks_on_corpora(config, inputs.corpora, begins))
    token_counts = _count_tokens(config, inputs) if needs_token_counts(config.objective) else None
    module, attention = build_module(config, special, token_counts)
    notes = notes + _build_notes(config, attention)
    notes += describe_caches(config, inputs)
    # Weights of another model may be refused, which must happen before the run folder is written.
    source_notes, source_digest = begin_with_source(
        module.towers, config.starting_weights, open_targets(config, patience), run_dir
    )
    notes += [f"init_from: {note}" for note in source_notes]
    from_rank_0(lambda: wait(lambda: _begin_run_folder(config, inputs, source_digest)))
    if config.train.largest_micro_batch:
        config = with_micro_batch(config, module, local_device(), predict_rows)
        notes.append(f"micro-batch: {config.train.micro_batch} rows, the most that fit")
    monitor = RankMonitor(run_dir, config.cluster, patience, lease)
    engine = Engine(module, config.train, config.engine, config.optimizer)
    notes += engine.notes
    skips = SkipList(run_dir, config.train.skip_steps, patience)
    build_s: dict[str, float] | None = {"import": import_s, "build": time.perf_counter() - begin}
    exit_code: int | None = None
    while exit_code is None:
        exit_code = Trainer(
            config=config,
            inputs=inputs,
            engine=engine,
            special=special,
            skips=skips,
            stop=stop,
            monitor=monitor,
            build_s=build_s,
            notes=notes,
            patience=patience,
        ).run()
        # Without an exit code the run goes back to a checkpoint, in a new round with the engine that exists already.
        build_s = None
        notes = []
    monitor.close()
    engine.close()
    return exit_code


def _build_notes(config: Config, attention: Choice) -> list[str]:
    """Return log lines about attention, kernels and compilation, and about config keys that have no effect."""
    notes = [attention_note(attention, config, local_device().type)]
    notes += [f"config: {key} has no effect: {reason}" for key, reason in keys_without_effect(config).items()]
    if cpu_library.permute is None:
        notes.append(
            "electra_kernels CPU library: not built, so NumPy orders the rows, which is slower; install a C compiler, "
            "then install this package again"
        )
    if config.objective.generator == "frozen":
        digest = config.objective.generator_sha256
        notes.append(f"frozen generator: the weights of {config.train.init_generator_from}, sha256 {digest}")
    if config.engine.compile:
        folder = node_cache_folder(config).path
        notes.append(f"layers are compiled at the first step; compiled code is kept in {folder}")
    return notes


def _begin_run_folder(config: Config, inputs: RunInputs, source_digest: dict[str, str]) -> None:
    """Write the files that describe the run: config, identity, inputs, tokenizer, vocabulary. Rank 0 only."""
    begin_run_folder(
        config,
        identity=run_identity(config, inputs.corpora.fingerprint, inputs.corpora.phase_fingerprints),
        tokenizer_json=inputs.corpora.tokenizer.model_dump_json(indent=1),
        vocabulary=inputs.vocabulary.text.encode(),
        input_digests={**inputs.heldout_digest, **source_digest},
    )


def build_module(config: Config, special: SpecialIds, token_counts: np.ndarray | None) -> tuple[Objective, Choice]:
    """Build the networks and their objective on the host, with initial weights and the `engine` settings. Collective.

    The attention backend is returned with the reason for it. `token_counts`, int64 [vocab_size], says how often each
    token occurs in the corpus; only an objective that draws replacements by frequency needs it (`needs_token_counts`).
    """
    objective = build_objective(
        model=config.model,
        objective=config.objective,
        special=special,
        seed=config.seed,
        backend=config.kernels.backend,
        count_V=token_counts,
    )
    if local_device().type == "cuda":  # The choice of attention may compile FlexAttention.
        keep_compiled_code(node_cache_folder(config).path / "compiled")
    attention = agree(choose_attention(config, local_device().type), fallback="sdpa")
    objective.attention = BACKENDS[attention.name]
    for module in objective.modules():
        if isinstance(module, Encoder):
            module.recompute = config.engine.activation_checkpointing
    if config.engine.compile:
        # The import takes seconds, which runs without compilation need not spend.
        from electra_dist.model.compile_layers import compile_layers

        compile_layers(objective, node_cache_folder(config).path / "compiled")
    if isinstance(objective, CorruptingObjective) and objective.frozen_generator is not None:
        objective.frozen_generator.load_state_dict(read_frozen_generator(config))
    return objective, attention


def _count_tokens(config: Config, inputs: RunInputs) -> np.ndarray:
    """Return how often each token id occurs in the training corpus, int64 [vocab_size]. Collective."""
    corpora = inputs.corpora
    return unigram_counts(
        corpora,
        vocab_size=config.model.vocab_size,
        run_dir=Path(config.run_dir),
        open_cache=lambda: open_cache(corpora, config.data, shard_folder(config, corpora)),
    )
