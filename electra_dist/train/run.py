"""Run pretraining on one rank: check the inputs, build the model and the engine, restore, train to the last step.

`run` is the order of a start from top to bottom; the step loop itself is in `trainer.py`.

Guarantee: every refusal of a config, an input or a target comes before anything is written into the run folder. After
a start that ended because storage stayed full or away (ledger event `storage`), the next one begins no sooner than ten
minutes later, whoever starts it: a supervisor, Slurm or a person. So the jobs of a Slurm chain are not all spent while
storage is away.

Limits: if the ledger cannot be written, there is no event and no pause; the next start then waits for storage itself,
at most `cluster.storage_patience_s`. The age of the event is taken by the wall clock, but even if the clock was set
back, no pause is longer than ten minutes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch.distributed as dist
from electra_kernels.native import cpu_library
from electra_kernels.operation_types import SpecialIds

from electra_dist.checkpoint.stored_copies import check_targets, set_all_aside
from electra_dist.collectives import Choice, agree, from_rank_0, gather, report_once, reported_exit_code
from electra_dist.config import Config
from electra_dist.config.rules import keys_without_effect
from electra_dist.config.secrets import without_secret_arguments
from electra_dist.data.shard_cache import open_cache
from electra_dist.engine.engine import Engine, check_machine
from electra_dist.engine.micro_batch import with_micro_batch
from electra_dist.engine.process_group import init_distributed, local_device, set_deterministic_mode
from electra_dist.engine.rank_environment import rank_place
from electra_dist.errors import EXIT_STOPPED, EXIT_USER_ERROR, ManifestMismatch, StorageLost, StoreAway, UserError
from electra_dist.escapes import printable
from electra_dist.model.attention import BACKENDS
from electra_dist.model.attention_choice import attention_note, choose_attention
from electra_dist.model.encoder import Encoder, compile_layers
from electra_dist.objectives.base import Objective
from electra_dist.objectives.build_objective import build_objective, needs_token_counts
from electra_dist.pretrained.weights import load_frozen_generator, load_recorded_source
from electra_dist.report.tracking import flat_settings
from electra_dist.run.folder import (
    begin_run_folder,
    check_run_folder,
    delete_unfinished_files,
    is_run_folder,
    move_records_aside,
    open_run,
)
from electra_dist.run.lease import RunLease, hold_lease
from electra_dist.run.ledger import Ledger, LedgerEvent, read_ledger
from electra_dist.run.this_node import seconds_since_process_start
from electra_dist.store.json_file import canonical_json
from electra_dist.store.patience import Patience, patient, print_line
from electra_dist.store.user_cache import keep_compiled_code
from electra_dist.train.check_inputs import RunInputs, begins_at_step_0, check_inputs, remarks_on_corpora
from electra_dist.train.guard import SkipList
from electra_dist.train.monitor import RankMonitor
from electra_dist.train.open_cache import describe_caches, node_cache_folder, shard_folder
from electra_dist.train.start import Start
from electra_dist.train.stop_request import StopRequest
from electra_dist.train.token_counts import unigram_counts
from electra_dist.train.trainer import Trainer

PAUSE_S = 600.0  # from the end of a start that has lost its storage to the next one
_POLL_S = 1.0  # seconds between two checks for a request to stop


def run(config: Config, accept_new_numerics: bool = False, from_scratch: bool = False) -> int:
    """Train from the newest checkpoint of the run until `config.train.num_steps`. Every rank calls it.

    The call creates the process group that the launcher's environment variables describe, and destroys it. Before the
    group exists, UserError and StorageLost are raised; nothing has been written then. Later, the first such error of
    any rank is printed once, and all ranks return its exit code.

    Args:
        accept_new_numerics: whether to continue a run of a version that draws random numbers or rounds differently.
        from_scratch: whether to begin again at step 0 in a folder that has checkpoints. They and the records of the
            run are set aside, and nothing is deleted.

    Returns:
        An exit code of `electra_dist/errors.py`: 0 for done, 69 for an unhealthy node, 75 for stopped on request or
        for lack of storage, or 78 for a user's error.
    """
    build_s = {"import": seconds_since_process_start()}
    begin = time.perf_counter()
    place = rank_place()
    run_dir = Path(config.run_dir)
    # One rank of each node reports that storage does not respond.
    patience = Patience(config.cluster.storage_patience_s, print_line if place.local_rank == 0 else lambda text: None)
    config, notes = config.for_ranks(place.world_size)
    check_machine(config)
    try:
        inputs = check_inputs(config, place.world_size, accept_new_numerics, from_scratch, patience=patience)
    except StorageLost as error:
        if place.rank == 0:
            record_lost_storage(run_dir, str(error))
        raise
    config = inputs.config
    notes += inputs.notes
    set_deterministic_mode(config.engine.deterministic)
    init_distributed()
    try:
        stop = StopRequest(run_dir, place.rank == 0)  # first of all: a signal during the build must not be lost
        if _pause_after_lost_storage(run_dir, stop):
            return EXIT_STOPPED
        if config.checkpoint.targets:  # the default target is inside the run folder, into which nothing is written yet
            from_rank_0(lambda: check_targets(inputs.targets))
        with _held_run_folder(config, inputs, patience) as lease:
            start = _build(config, inputs, stop, patience, lease, notes)
            build_s["build"] = time.perf_counter() - begin
            exit_code = Trainer(start, build_s, notes).run()
            while exit_code is None:  # the run goes back to a checkpoint, with the same engine
                exit_code = Trainer(start, None).run()
            start.monitor.close()
            start.engine.close()
        return exit_code
    except UserError as error:
        code = EXIT_STOPPED if isinstance(error, StoreAway) else EXIT_USER_ERROR
        report_once(error, code)
        if isinstance(error, StorageLost) and place.rank == 0:
            record_lost_storage(run_dir, str(error))
        return code
    except RuntimeError:
        # A collective fails when another rank has ended; that rank has printed the cause.
        reported_code = reported_exit_code()
        if reported_code is None:
            raise
        return reported_code
    finally:
        dist.destroy_process_group()  # without it, one rank in four aborts at exit


@contextlib.contextmanager
def _held_run_folder(config: Config, inputs: RunInputs, patience: Patience) -> Iterator[RunLease | None]:
    """Lock the run folder for a `with` block, and check again that it holds no other run. Collective.

    The block gets the lock on rank 0, and None on the other ranks.
    """
    run_dir = Path(config.run_dir)
    if len(set(gather(canonical_json({"identity": inputs.identity, "heldout": inputs.heldout_digest})))) > 1:
        raise ManifestMismatch(
            f"run_dir {run_dir}: a corpus or the frozen generator has changed while the ranks have read it, or is not "
            f"the same on all nodes; start the run again"
        )
    leases: list[RunLease] = []  # gets the lease on rank 0, because only that rank calls the function below
    from_rank_0(lambda: leases.append(_lock_run_folder(run_dir, inputs, patience=patience)))
    try:
        yield leases[0] if leases else None
    finally:
        for lease in leases:
            lease.release()


@patient
def _lock_run_folder(run_dir: Path, inputs: RunInputs, *, patience: Patience) -> RunLease:
    """Lock the run folder and return the lock; raise UserError if another run has begun in it since `check_inputs`."""
    lease = hold_lease(run_dir, say=lambda line: print(printable(line), flush=True))
    try:
        check_run_folder(run_dir, inputs.identity, inputs.accept_new_numerics)
        delete_unfinished_files(run_dir)
    except UserError:
        lease.release()
        raise
    return lease


def _build(
    config: Config,
    inputs: RunInputs,
    stop: StopRequest,
    patience: Patience,
    lease: RunLease | None,
    notes: list[str],
) -> Start:
    """Build model and engine, and write the files that describe the run. Adds log lines to `notes`. Collective."""
    run_dir = Path(config.run_dir)
    special = SpecialIds.from_tokens(inputs.corpora.tokenizer.special)
    if inputs.from_scratch:
        notes += from_rank_0(lambda: _set_earlier_run_aside(run_dir, inputs, patience=patience))
    begins = from_rank_0(lambda: begins_at_step_0(inputs, patience=patience))
    notes += from_rank_0(lambda: remarks_on_corpora(config, inputs.corpora, begins))
    if inputs.heldout is None:
        notes.append("data.heldout is not set, so nothing is evaluated: no context AUC, and no best checkpoint")
    token_counts = None
    if needs_token_counts(config.objective):
        corpora = inputs.corpora
        token_counts = unigram_counts(
            corpora,
            vocab_size=config.model.vocab_size,
            run_dir=run_dir,
            open_cache=lambda: open_cache(corpora, config.data, shard_folder(config, corpora)),
        )
    module, attention = build_module(config, special, token_counts)
    notes += _build_notes(config, attention)
    notes += describe_caches(config, inputs)
    input_digests = inputs.heldout_digest
    if begins and config.train.init_from:
        # Weights of another model may be refused, which must happen before the run folder is written.
        source_notes, source_digest = load_recorded_source(module.towers, config.starting_weights, run_dir)
        notes += [f"init_from: {note}" for note in source_notes]
        input_digests |= source_digest
    changed_settings = [] if begins else from_rank_0(lambda: _changed_settings(config))
    from_rank_0(
        lambda: begin_run_folder(
            config,
            identity=inputs.identity,
            tokenizer_json=inputs.corpora.tokenizer.model_dump_json(indent=1),
            vocabulary=inputs.vocabulary.text.encode(),
            input_digests=input_digests,
            patience=patience,
        )
    )
    if config.train.largest_micro_batch:
        config = with_micro_batch(config, module, local_device(), _predict_rows)
        notes.append(f"micro-batch: {config.train.micro_batch} rows, the most that fit")
    monitor = RankMonitor(run_dir, config.cluster, patience.reporter)
    engine = Engine(module, config.train, config.engine, config.optimizer)
    notes += engine.notes
    return Start(
        config=config,
        inputs=inputs,
        engine=engine,
        skips=SkipList(run_dir, config.train.skip_steps, patience),
        stop=stop,
        monitor=monitor,
        lease=lease,
        patience=patience,
        changed_settings=changed_settings,
    )


@patient
def _set_earlier_run_aside(run_dir: Path, inputs: RunInputs, *, patience: Patience) -> list[str]:
    """Rename the checkpoints and records of the earlier run in the folder, and return log lines. Rank 0 only."""
    return [*set_all_aside(inputs.targets), *move_records_aside(run_dir)]


def _changed_settings(config: Config) -> list[str]:
    """Return a log line about settings that are not those of the last start, as the run folder's config has them."""
    run_dir = Path(config.run_dir)
    try:
        before = flat_settings(open_run(run_dir))  # without secrets
    except UserError:  # lost, or of a version with other keys
        return []
    now = flat_settings(config.model_copy(update={"run_dir": str(run_dir)}))
    changed = [
        f"{key} {before.get(key, 'null')} -> {now.get(key, 'null')}"
        for key in dict.fromkeys([*before, *now])
        if before.get(key) != now.get(key)
    ]
    shown = without_secret_arguments(changed)
    return [f"changed since the last start: {', '.join(shown)}"] if shown else []


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
    device_type = local_device().type
    if device_type == "cuda" or config.engine.compile:  # The choice of attention may compile FlexAttention.
        keep_compiled_code(node_cache_folder(config).path / "compiled")
    attention = agree(choose_attention(config, device_type), fallback="sdpa")
    objective.attention = BACKENDS[attention.name]
    if device_type == "cuda":  # A CPU has one set of kernels.
        objective.attention.switch_on()
    for module in objective.modules():
        if isinstance(module, Encoder):
            module.recompute = config.engine.activation_checkpointing
    if config.engine.compile:
        compile_layers(objective)
    if config.objective.generator == "frozen":
        load_frozen_generator(objective, config)
    return objective, attention


def _predict_rows(config: Config, free_bytes: float, world_size: int) -> int:
    """Estimate how many rows fit into `free_bytes` of a GPU. `train.micro_batch: auto` begins its search there."""
    from electra_dist.planning.activation_memory import micro_batch_limit  # Most starts need no estimate.

    plan = config.plan.model_copy(update={"num_gpus": world_size})
    return micro_batch_limit(config.model_copy(update={"plan": plan}), free_bytes / 1e9).fitting_rows


def record_lost_storage(run_dir: Path, why: str) -> None:
    """Append the event `storage` to a run's ledger, unless the ledger ends with this event already.

    Errors are ignored, because the ledger may be on the disk that cannot be reached.
    """
    with contextlib.suppress(UserError, OSError):
        if not is_run_folder(run_dir):
            return
        events = read_ledger(run_dir)
        if events and events[-1].event == "storage":
            return
        ledger = Ledger(run_dir)
        try:
            ledger.append("storage", events[-1].step if events else 0, why=why)
        finally:
            ledger.discard()  # This closes the file, and does not try again to write an event that was refused.


def remaining_pause_s(ledger: Sequence[LedgerEvent], now: float) -> float:
    """Return the seconds to wait from Unix time `now` if the last start ended for lack of storage, otherwise 0."""
    if not ledger or ledger[-1].event != "storage":
        return 0.0
    return min(PAUSE_S, max(0.0, ledger[-1].unix_s + PAUSE_S - now))


def _pause_after_lost_storage(run_dir: Path, stop: StopRequest) -> bool:
    """If the last start ended for lack of storage, wait until ten minutes after its end. Collective.

    Returns True if the run was asked to stop meanwhile.
    """
    pause_s = from_rank_0(lambda: _read_pause_s(run_dir))
    end = time.monotonic() + pause_s
    while time.monotonic() < end:
        time.sleep(min(_POLL_S, max(0.0, end - time.monotonic())))
        if any(gather(stop.wants_stop())):
            return True
    return False


def _read_pause_s(run_dir: Path) -> float:
    """Return how many seconds this start must wait before it begins; if it must, print why. Rank 0 only."""
    ledger = []
    with contextlib.suppress(UserError, OSError):  # A damaged or silent ledger is reported where it is needed.
        ledger = read_ledger(run_dir)
    pause_s = remaining_pause_s(ledger, datetime.now(UTC).timestamp())
    if pause_s > 0:
        print_line(
            f"the last start ended because storage stayed away ({ledger[-1].why}); this one begins in "
            f"{pause_s:.0f} s, send SIGTERM to end it"
        )
    return pause_s
