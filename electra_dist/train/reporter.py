"""Report a run on rank 0: one line per logged step, metrics.jsonl, TensorBoard, tracking services and the ledger.

Only rank 0 has a reporter. The ledger is the file ledger.jsonl; it records starts, checkpoints and stops as events.

The losses and accuracies in a record are of that step alone, not means over an interval. So a run that was interrupted
writes the same values as an uninterrupted run.
"""

from __future__ import annotations

import contextlib
import math
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil
import torch
import torch.distributed as dist
from electra_kernels.backend_choice import resolve

from electra_dist.checkpoint.manifest import RunState
from electra_dist.checkpoint.writer import SaveTiming
from electra_dist.config import Config
from electra_dist.config.schedule import describe, schedules_of, value_at
from electra_dist.corpus.build_report import corpus_sources
from electra_dist.data.corpora import Corpora, uses_of_phases
from electra_dist.data.receipt import Receipt
from electra_dist.engine.bit_settings import changed_draws
from electra_dist.engine.rank_environment import rank_place
from electra_dist.errors import StoreAway
from electra_dist.gpu_models import peak_flops
from electra_dist.model.counts import mfu, token_flops
from electra_dist.nvml import worst
from electra_dist.report.tracking import (
    BackgroundTracker,
    ReportRefresh,
    flat_settings,
    hyperparameters,
    log_record,
    open_trackers,
)
from electra_dist.run.context_auc import NUM_REPLACED, is_stuck, stuck_warning, was_reported
from electra_dist.run.environment_record import write_environment
from electra_dist.run.folder import CONFIG_FILE
from electra_dist.run.goodput import start_line
from electra_dist.run.ledger import Ledger, read_jobs, read_ledger
from electra_dist.run.log_lines import Console
from electra_dist.run.metrics import EvalRecord, MetricsWriter, StepRecord, TextSample, iter_evaluations
from electra_dist.store.patience import waits
from electra_dist.train.monitor import RankObservation
from electra_dist.train.start import Start
from electra_dist.train.step import StepResult

_LEAST_INTERVAL_S = 1e-9  # a shorter interval counts as this long, so that no rate is divided by 0
_NO_GPU_READING = worst(())
Ending = Literal["done", "stop", "storage", "unhealthy", "crash", "rollback", "replaced"]


class Reporter:
    """Writer of the log lines, metrics and ledger events of one start of a run. Rank 0 only.

    Call `began` once, then the method for each event, and `close` at the end. The checkpoint thread calls
    `before_commit` and `committed`; only the thread of the step loop may call the other methods.
    """

    def __init__(self, start: Start, restored: RunState | None, hosts: Sequence[str] = ()) -> None:
        """Open the files. Delete the metrics of steps after the restored checkpoint, because the run repeats them."""
        self.patience = start.patience
        self._open(start, restored, hosts)
        self._refresh = ReportRefresh(self._run_dir, start.config.log.report_every_minutes)

    @waits
    def _open(self, start: Start, restored: RunState | None, hosts: Sequence[str]) -> None:
        """Open all outputs, delete the metrics of steps that the run repeats, and log the setup."""
        config = start.config
        corpora = start.inputs.corpora
        run_dir = Path(config.run_dir)
        self._config = config
        self._engine = start.engine
        self._run_dir = run_dir
        start_step = restored.step if restored else 0
        self._ledger = Ledger(run_dir, start.patience)
        self._console = Console(run_dir, config.train.num_steps, start_step)
        tensorboard = hyperparameters(config) if config.log.tensorboard else None
        self._metrics = MetricsWriter(run_dir, tensorboard, start.patience)
        furthest_step = self._metrics.truncate_after(start_step)
        self._has_warned = False  # of a low context AUC, in this start
        # Of the context AUC; an objective without a discriminator has none.
        self._has_noted_few_tokens = config.objective.facts.predicts_tokens
        self._num_repeated = max(0, furthest_step - start_step)  # steps that an earlier start has done already
        self._corpus_sizes = corpora.sizes()
        sources = corpus_sources(corpora.phases[0].store)
        write_environment(run_dir, dist.get_world_size(), hosts, {**self._corpus_sizes, "sources": sources})
        self._trackers = open_trackers(config.log, run_dir, lambda: flat_settings(config))
        self._step_recorder = StepRecorder(config, start.engine.device, self._corpus_sizes, start_step)
        self._note_setup(corpora)

    def began(
        self,
        attempt: int,
        restored: RunState | None,
        set_aside: list[str],
        setup_s: dict[str, float],
        changed: dict[str, str],
    ) -> None:
        """Record that this start of the run begins to train, and which checkpoints were found damaged.

        Args:
            attempt: number of this start of the run, from 1.
            set_aside: one line for each damaged checkpoint, which no later start will try to load.
            setup_s: seconds of each part of the setup, by the names of `trainer.py`.
            changed: settings that differ from the checkpoint's and may change the last bits (`bit_settings.changes`).
        """
        step = restored.step if restored else 0
        for line in set_aside:
            self.note(line)
            self._ledger.append("set_aside", step, reason=line)
        if restored:
            self._record_new_numerics(restored, attempt)
        self._ledger.append(
            "resume" if restored else "start",
            step,
            attempt=attempt,
            ranks=dist.get_world_size(),
            repeated=self._num_repeated,
            setup_s={name: round(seconds, 3) for name, seconds in setup_s.items()},
            **({"changed": changed} if changed else {}),
        )
        if restored:
            self._note_restored(restored, attempt)
        if changed:
            listed = ", ".join(f"{name} from {change}" for name, change in changed.items())
            dropout_clause = changed_draws(
                changed, self._config.model.largest_attention_dropout, self._engine.device.type
            )
            if dropout_clause:
                dropout_clause += ", and "
            self.note(
                f"changed since the checkpoint: {listed}; rows, masks and samples stay the same, but "
                f"{dropout_clause}the losses may differ from those of an uninterrupted run (docs/exactness.md)"
            )

    def _record_new_numerics(self, restored: RunState, attempt: int) -> None:
        """Log and record it if a version that draws or rounds differently has written the restored checkpoint."""
        current = self._config.numerics
        for numerics, identity_sha256 in self._config.older_identities().items():
            if restored.identity_sha256 == identity_sha256:
                self.note(
                    f"new numerics accepted: steps before {restored.step:,} were computed with numerics {numerics}, "
                    f"steps from {restored.step:,} on are computed with numerics {current}"
                )
                self._ledger.append("new_numerics", restored.step, attempt=attempt, was=numerics, now=current)

    def _note_restored(self, restored: RunState, attempt: int) -> None:
        """Log from which checkpoint the run continues, or that it has already reached its last step."""
        num_steps = self._config.train.num_steps
        if restored.step >= num_steps:
            self.note(
                f"step {restored.step:,} of {num_steps:,} is reached: nothing to do; set another run_dir to train anew"
            )
            return
        summary = start_line(read_ledger(self._run_dir), read_jobs(self._run_dir))
        self.note(f"{summary}; saved by attempt {restored.attempt}, this is attempt {attempt}")

    def step(self, done: int, result: StepResult, waited_s: float, receipt: Receipt, look: RankObservation) -> None:
        """Report a logged step to console, metrics and tracking services; log slow ranks and an fp16 overflow.

        `done` counts the finished steps, this one included. `waited_s` is how long rank 0 has waited for rows in all,
        since this start. `receipt` is the number and digest of all rows trained on so far, `look` the health check
        after this step.
        """
        record = self._step_recorder.record_of(done, result, waited_s, receipt, look)
        if look.slow_ranks:
            advice = "another program may use the processors of this machine"
            if torch.cuda.is_available() or rank_place().has_several_nodes:
                config = shlex.quote(str(self._run_dir / CONFIG_FILE))
                advice = f"check their nodes with python -m electra_launcher.preflight --config {config}"
            self.note(
                f"step {done:,}: ranks {look.slow_ranks} were slower than the others at the last three log steps; "
                f"{advice}"
            )
        if result.overflow:
            self._note_overflow(done - 1, result)
        self._metrics.write(record)
        self._console.line(record)
        self._track(record)

    def _note_overflow(self, step: int, result: StepResult) -> None:
        scaler = self._engine.loss_scale
        assert scaler is not None
        self.note(
            f"step {step:,} made no update: its gradients overflowed fp16 at loss scale {result.loss_scale:,.0f}; the "
            f"next step has loss scale {scaler.cur_scale:,.0f}"
        )

    def evaluation(self, record: EvalRecord, samples: list[TextSample]) -> None:
        """Report an evaluation, some of its rows as text, and warnings about its context AUC.

        The rates in the next log line are measured from now on, so that they do not include the time of the
        evaluation.
        """
        self._warn_of_low_context_auc(record)
        self._metrics.write(record)
        if samples:
            self._metrics.write_samples(record.step, samples)
        self._console.evaluation(record)
        self._track(record)
        self._note_few_replaced_tokens(record)
        self._step_recorder.begin_interval(record.step)

    def _track(self, record: StepRecord | EvalRecord) -> None:
        """Send a record to the tracking services, and log which outputs have begun to fail."""
        for tracker in self._trackers:
            log_record(tracker, record)
        self._note_problems()

    def _note_problems(self) -> None:
        """Log a line for each tracking service that has failed, and each metrics file whose disk refuses records."""
        outputs: list[MetricsWriter | BackgroundTracker] = [self._metrics, *self._trackers]
        for output in outputs:
            for problem in output.problems():
                self.note(problem)

    def _warn_of_low_context_auc(self, record: EvalRecord) -> None:
        """Warn, once in a run, if the discriminator does not use context; call it before `record` is written."""
        if self._has_warned or not is_stuck(record, self._config):
            return
        self._has_warned = True
        if not was_reported(iter_evaluations(self._run_dir), self._config):
            self.note(stuck_warning(record, self._config))

    def _note_few_replaced_tokens(self, record: EvalRecord) -> None:
        """Log, once in each start of the run, if the held-out corpus is too small for a precise context AUC."""
        if self._has_noted_few_tokens or record.context_replaced >= NUM_REPLACED:
            return
        self._has_noted_few_tokens = True
        self.note(
            f"context AUC is over {record.context_replaced:,} replaced tokens instead of {NUM_REPLACED:,}, because "
            f"data.heldout {self._config.data.heldout} has no more; build the corpus with a larger "
            f"corpus.heldout_fraction for a smaller standard error"
        )

    def flush_tensorboard(self) -> None:
        """Write TensorBoard's buffered values to the disk; call it when a save begins."""
        self._metrics.flush_tensorboard()

    def before_commit(self) -> None:
        """Sync metrics and ledger to the disk before a checkpoint is committed; wait for a disk that refuses.

        A restart from the checkpoint does not repeat earlier steps, so their records must be on the disk by then.
        """
        self._metrics.sync()
        self._ledger.sync()

    def committed(self, state: RunState, timing: SaveTiming, write_s: float, spent_s: dict[str, float]) -> None:
        """Record in the ledger that a checkpoint is committed: all its files are in every checkpoint store.

        The checkpoint thread calls this. `write_s` is the time that this thread took to write and commit; `spent_s`
        is `Clock.spent_s` at the beginning of the save.
        """
        self._ledger.append(
            "checkpoint",
            state.step,
            attempt=state.attempt,
            stall_s=timing.stall_s,
            wait_s=timing.wait_s,
            write_s=write_s,
            spent_s=spent_s,
        )

    def stopped_step(self, step: int, fault: str, suspect: str) -> None:
        """Record that `fault` prevented the update of a step; `suspect` is the row whose loss stands out, or "".

        Call this before the list of skipped steps is written. If the run is killed in between, its restart stops the
        step again.
        """
        self._ledger.append_once("stopped_step", step, fault=fault, suspect=suspect)
        advice = "no single row stands out; nothing to do unless it happens often, then lower optimizer.lr"
        if suspect:
            advice = f"check the row that stands out: {suspect}"
        self.note(f"step {step:,} was stopped before its update and is skipped from now on: {fault}; {advice}")

    def rolled_back(self, first: int, stopped: list[int]) -> None:
        """Record in log and ledger that the run goes back and skips the steps from `first` to the last stopped one.

        Call this before the list of skipped steps is written. If the run is killed in between, its restart goes back.
        """
        last = stopped[-1]
        self._ledger.append_once("rollback", last, skip_from=first, skip_to=last)
        self.note(
            f"{len(stopped)} steps in a row were stopped: the run goes back to a checkpoint and skips steps {first:,} "
            f"to {last:,}; if this happens again, lower optimizer.lr in a new run"
        )

    def stopped(self, done: int, reason: str) -> None:
        """Log that the run has saved its state and stops on request; `close` records this in the ledger."""
        self.note(f"stopped after step {done:,}: {reason}; the state is saved, run the same command to go on")

    def note(self, text: str) -> None:
        """Write a line of text to the console and to log.txt; not to the ledger."""
        self._console.note(text)

    def close(self, ending: Ending, step: int, why: str, spent_s: dict[str, float]) -> None:
        """Record how this start of the run has ended after `step` steps, and close all outputs.

        Two endings are not recorded: "rollback", because `rolled_back` has done so, and "replaced", because another
        start writes the ledger now. If the disk does not come back in time, StorageLost is raised, unless `ending` is
        "storage" or "crash".
        """
        is_lost = ending in ("storage", "crash")  # The disk is tried once more, and not waited for.
        ignored = (StoreAway,) if is_lost else ()
        if ending != "rollback" and ending != "replaced":
            reason = {"why": why} if why else {}
            append = self._ledger.append_soon if is_lost else self._ledger.append
            append(ending, step, **reason, spent_s=spent_s)
        self._refresh.close()
        for tracker in self._trackers:
            tracker.close(has_failed=ending == "crash")
        self._note_problems()
        try:
            for close in (self._metrics.close, self._ledger.close):
                with contextlib.suppress(*ignored):
                    close(waits=not is_lost)
        finally:
            self._metrics.discard()
            self._ledger.discard()
            self._note_problems()
            self._console.close()

    def _note_setup(self, corpora: Corpora) -> None:
        """Log one line each about the run, its corpora and its schedules."""
        config = self._config
        engine = self._engine
        backend = resolve(config.kernels.backend, engine.device.type)
        self.note(
            f"run {config.run_dir} | {dist.get_world_size()} x {engine.device.type} | ZeRO-{config.engine.zero_stage} "
            f"{config.train.precision} | optimizer {engine.optimizer_name} | kernels {backend}"
        )
        for phase in corpora.phases:
            corpus = phase.manifest
            steps_per_epoch = corpus.num_rows / config.train.global_batch
            from_step = f" from step {phase.from_step:,} on" if phase.from_step else ""
            self.note(
                f"corpus {phase.url}{from_step} | {corpus.num_rows:,} rows of {corpus.seq_len} | "
                f"{corpus.num_tokens:,} tokens | {steps_per_epoch:,.0f} steps per epoch | {corpus.fingerprint[:12]}"
            )
        schedules = schedules_of(config.objective)
        if schedules:
            changes = [f"objective.{key} {describe(schedule)}" for key, schedule in schedules.items()]
            self.note(f"schedules | {' | '.join(changes)}")


class _LogPoint(NamedTuple):
    """Time and progress at the last log line or evaluation, from which the rates of the next log line are measured."""

    step: int  # steps done
    time: float  # of time.perf_counter, in seconds
    waited_s: float  # total seconds waited for rows


class StepRecorder:
    """Makes the metrics record of each logged step in one start of a run, with rates since the last record."""

    def __init__(self, config: Config, device: torch.device, corpus_sizes: Mapping[str, Any], start_step: int) -> None:
        self._config = config
        self._device = device
        self._corpus_sizes = corpus_sizes
        self._schedules = schedules_of(config.objective)
        self._peak_flops = None  # FLOP/s of one GPU, if they are known
        if device.type == "cuda":
            self._peak_flops = peak_flops(torch.cuda.get_device_name(), config.train.precision)
        self._last = _LogPoint(step=start_step, time=time.perf_counter(), waited_s=0.0)

    def begin_interval(self, done: int) -> None:
        """Measure the next rates from now on, after `done` steps, without the time of an evaluation before."""
        self._last = _LogPoint(step=done, time=time.perf_counter(), waited_s=self._last.waited_s)

    def record_of(
        self,
        done: int,
        result: StepResult,
        waited_s: float,
        receipt: Receipt,
        look: RankObservation,
    ) -> StepRecord:
        """Return the record of a logged step for metrics.jsonl and the console, from the arguments of `Reporter.step`.

        Times and rates are means since the last log line or evaluation. Losses (means over tokens) and accuracies
        (fractions) are over the global batch of this step alone. A loss that the objective does not have is 0; an
        accuracy over no tokens is NaN.
        """
        now = time.perf_counter()
        elapsed_s = now - self._last.time
        steps_since_last = max(1, done - self._last.step)
        step_s = elapsed_s / steps_since_last
        newly_waited_s = waited_s - self._last.waited_s
        data_wait = min(1.0, newly_waited_s / max(elapsed_s, _LEAST_INTERVAL_S))
        self._last = _LogPoint(step=done, time=now, waited_s=waited_s)
        sums = result.sums
        gpu = _NO_GPU_READING if look.gpu is None else look.gpu
        tokens_per_s = sums.tokens / step_s
        num_steps = self._config.train.num_steps
        progress = (done - 1) / num_steps  # steps are numbered from 0
        if self._device.type == "cuda":
            memory_bytes = torch.cuda.max_memory_allocated()
        else:
            memory_bytes = psutil.Process().memory_info().rss  # at present, because the peak is not known
        scheduled: dict[str, Any] = {key: value_at(schedule, progress) for key, schedule in self._schedules.items()}
        return StepRecord(
            step=done,
            loss=sums.loss,
            mlm_accuracy=_ratio(sums.mlm_correct, sums.mlm_weight),
            replaced_accuracy=_ratio(sums.replaced_correct, sums.replaced),
            original_accuracy=_ratio(sums.original_correct, sums.original),
            replaced_fraction=_ratio(sums.replaced, sums.tokens),
            lr=result.learning_rate,
            generator_lr=result.generator_learning_rate,
            grad_norm=result.grad_norm,
            tokens_per_s=tokens_per_s,
            mfu=None if self._peak_flops is None else self._mfu(done, tokens_per_s, self._peak_flops),
            data_wait=data_wait,
            memory_gb=memory_bytes / 1e9,
            eta_s=step_s * (num_steps - done),
            tokens_seen=round(receipt.rows * self._tokens_per_row(done)),
            step_s=step_s,
            rows_seen=receipt.rows,
            receipt=receipt.hex,
            store_retries=result.flags.retries,
            store_wait_s=result.flags.retry_wait_ms / 1000,
            refetches=result.flags.refetches,
            gpu_temperature_c=gpu.gpu_temperature_c,
            gpu_power_w=gpu.gpu_power_w,
            gpu_sm_clock_mhz=gpu.gpu_sm_clock_mhz,
            gpu_throttle=list(gpu.gpu_throttle),
            slow_ranks=look.slow_ranks,
            loss_scale=result.loss_scale,
            overflow=result.overflow,
            **sums.mean_losses(),
            **scheduled,
        )

    def _tokens_per_row(self, done: int) -> float:
        """Return the mean number of tokens in the rows of the first `done` steps, [PAD] not counted."""
        sizes = self._corpus_sizes
        if "phases" not in sizes:
            return float(sizes["tokens"] / sizes["rows"])
        uses = uses_of_phases(sizes["phases"], done, self._config.train.global_batch)
        return sum(use.tokens for use in uses) / sum(use.rows for use in uses)

    def _mfu(self, done: int, tokens_per_s: float, peak_flops: float) -> float:
        """Return the model's FLOP/s at this throughput as a share of the GPUs' peak; `done` counts finished steps."""
        config = self._config
        last_step = done - 1  # its stage of training decides the FLOPs
        flops_per_token = token_flops(config.model, config.data.seq_len, config.objective, last_step).total
        return mfu(tokens_per_s, flops_per_token, dist.get_world_size(), peak_flops)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
