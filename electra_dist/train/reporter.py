"""What rank 0 tells: one dense line, metrics.jsonl, TensorBoard, the ledger. Others have no Reporter.

A record holds the values of its own step, not of an interval: a run cut anywhere writes the same records as an uncut
one.
"""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
import torch.distributed as dist
from electra_kernels.backend import resolve

from electra_dist.analysis.goodput import start_line
from electra_dist.checkpoint.manifest import RunState
from electra_dist.checkpoint.save import SaveTiming
from electra_dist.config import Config
from electra_dist.data.manifest import CorpusManifest
from electra_dist.data.receipt import Receipt
from electra_dist.engine.engine import Engine
from electra_dist.model.flops import mfu, peak_flops, token_flops
from electra_dist.run.console import Console
from electra_dist.run.environment import write_environment
from electra_dist.run.ledger import Event, Ledger, read_jobs, read_ledger
from electra_dist.run.metrics import MetricsWriter
from electra_dist.run.records import EvalRecord, StepRecord
from electra_dist.train.health.rank_monitor import RankObservation
from electra_dist.train.step import StepResult

Ending = Literal["done", "stop", "unhealthy", "crash", "rollback"]


class Reporter:
    """Rank 0's voice: `began` once, then `step`, `evaluation`, `saving`, `committed`; `close` at the end."""

    def __init__(self, config: Config, engine: Engine, corpus: CorpusManifest, restored: RunState | None) -> None:
        """Open everything and cut off the records of steps that will be repeated."""
        self._config, self._engine = config, engine
        self._run_dir = run_dir = Path(config.run_dir)
        start_step = restored.step if restored else 0
        self._ledger, self._ledger_lock = Ledger(run_dir), threading.Lock()
        self._console = Console(run_dir, config.train.num_steps, start_step)
        self._metrics = MetricsWriter(run_dir, tensorboard=config.log.tensorboard)
        self._repeated = max(0, self._metrics.truncate_after(start_step) - start_step)
        write_environment(run_dir, dist.get_world_size())
        self._tokens_per_row = corpus.num_tokens / corpus.num_rows
        on_gpu = engine.device.type == "cuda"
        self._peak = peak_flops(torch.cuda.get_device_name(), config.train.precision) if on_gpu else None
        self._last = (start_step, time.perf_counter(), 0.0)  # step, time, seconds waited for data
        self._greet(corpus)

    def began(self, attempt: int, restored: RunState | None, set_aside: list[str], setup_s: dict[str, float]) -> None:
        """Where this start begins, and how long that took."""
        for line in set_aside:
            self.note(line)
            self._record("set_aside", restored.step if restored else 0, reason=line)
        step = restored.step if restored else 0
        ranks = dist.get_world_size()
        details = {"attempt": attempt, "ranks": ranks, "repeated": self._repeated}
        setup_s = {name: round(seconds, 3) for name, seconds in setup_s.items()}
        self._record("resume" if restored else "start", step, **details, setup_s=setup_s)
        if restored and step >= self._config.train.num_steps:
            self.note(f"finished: step {step:,} of {self._config.train.num_steps:,} is reached; nothing to do")
        elif restored:
            said = start_line(read_ledger(self._run_dir), read_jobs(self._run_dir))
            self.note(f"{said}; saved by attempt {restored.attempt}, this is attempt {attempt}")

    def step(
        self, done: int, result: StepResult, lr: float, waited_s: float, receipt: Receipt, look: RankObservation
    ) -> None:
        """A log step: print the line, write the record."""
        sums = result.sums
        last_step, last_time, last_waited = self._last
        now = time.perf_counter()
        step_s = (now - last_time) / max(1, done - last_step)
        self._last = (done, now, waited_s)
        tokens_per_s = sums.tokens / step_s
        record = StepRecord(
            step=done,
            loss=result.loss,
            mlm_loss=sums.mlm_loss_sum / max(sums.mlm_weight, 1.0),
            rtd_loss=sums.rtd_loss_sum / max(sums.rtd_weight, 1.0),
            token_loss=sums.token_loss_sum / max(sums.token_weight, 1.0),
            mlm_accuracy=_ratio(sums.mlm_correct, sums.mlm_weight),
            replaced_accuracy=_ratio(sums.replaced_correct, sums.replaced),
            original_accuracy=_ratio(sums.original_correct, sums.original),
            replaced_fraction=_ratio(sums.replaced, sums.tokens),
            lr=lr,
            grad_norm=result.grad_norm,
            tokens_per_s=tokens_per_s,
            mfu=mfu(tokens_per_s, self._flops_per_token(done), dist.get_world_size(), self._peak),
            data_wait=min(1.0, (waited_s - last_waited) / max(now - last_time, 1e-9)),
            memory_gb=self._memory_gb(),
            eta_s=step_s * (self._config.train.num_steps - done),
            tokens_seen=round(receipt.rows * self._tokens_per_row),
            step_s=step_s,
            rows_seen=receipt.rows,
            receipt=receipt.hex,
            store_retries=result.flags.retries,
            store_wait_s=result.flags.retry_wait_ms / 1000,
            refetches=result.flags.refetches,
            gpu_temperature_c=look.gpu.gpu_temperature_c if look.gpu else None,
            gpu_power_w=look.gpu.gpu_power_w if look.gpu else None,
            gpu_sm_clock_mhz=look.gpu.gpu_sm_clock_mhz if look.gpu else None,
            gpu_throttle=list(look.gpu.gpu_throttle) if look.gpu else [],
            slow_ranks=look.slow_ranks,
        )
        if look.slow_ranks:
            self.note(f"step {done:,}: slower than the others for three looks: ranks {look.slow_ranks}")
        self._metrics.write(record)
        self._console.line(record)

    def evaluation(self, record: EvalRecord) -> None:
        """A held-out evaluation; its time is not step time."""
        self._metrics.write(record)
        self._console.evaluation(record)
        self._last = (record.step, time.perf_counter(), self._last[2])

    def saving(self) -> None:
        """A save begins: the records of its steps must outlive the machine before it is committed."""
        self._metrics.sync()

    def committed(self, state: RunState, timing: SaveTiming, write_s: float, spent_s: dict[str, float]) -> None:
        """A checkpoint exists. Called from the writing thread, which the loop joins before it closes anything."""
        details = {"stall_s": timing.stall_s, "wait_s": timing.wait_s, "write_s": write_s, "spent_s": spent_s}
        self._record("checkpoint", state.step, attempt=state.attempt, **details)

    def stopped_step(self, step: int, fault: str, suspect: str) -> None:
        """The guard let no update happen in `step` (from 0)."""
        self._record("stopped_step", step, fault=fault, suspect=suspect)
        where = f"; a row stands out: {suspect}" if suspect else "; no single row stands out"
        self.note(f"step {step:,} stopped before the optimizer: {fault}{where}")

    def rolled_back(self, first: int, stopped: list[int]) -> None:
        """The run goes back; steps from `first` to the last stopped one are skipped."""
        self._record("rollback", stopped[-1], skip_from=first, skip_to=stopped[-1])
        self.note(f"{len(stopped)} steps stopped in a row: going back, skipping steps {first:,} to {stopped[-1]:,}")

    def stopped(self, done: int, reason: str) -> None:
        """The run was told to stop and has saved."""
        self.note(f"stopped after step {done:,}: {reason}; saved, the same command goes on from here")

    def note(self, text: str) -> None:
        """A line of prose."""
        self._console.note(text)

    def close(self, ending: Ending, step: int, why: str, spent_s: dict[str, float]) -> None:
        """Record how it ended after `step` steps, and flush everything."""
        if ending != "rollback":
            self._record(ending, step, **({"why": why} if why else {}), spent_s=spent_s)
        self._console.close()
        self._metrics.close()
        self._ledger.close()

    def _greet(self, corpus: CorpusManifest) -> None:
        config, engine = self._config, self._engine
        backend = resolve(config.kernels.backend, engine.device.type)
        self.note(
            f"run {config.run_dir} | {dist.get_world_size()} x {engine.device.type} | ZeRO-{config.engine.zero_stage} "
            f"{config.train.precision} | optimizer {engine.optimizer_name} | kernels {backend}"
        )
        self.note(
            f"corpus {config.data.corpus} | {corpus.num_rows:,} rows of {corpus.seq_len} | {corpus.num_tokens:,} "
            f"tokens | {corpus.num_rows / config.train.global_batch:,.0f} steps an epoch | {corpus.fingerprint[:12]}"
        )

    def _record(self, event: Event, step: int, **details: Any) -> None:
        with self._ledger_lock:
            self._ledger.append(event, step, **details)

    def _flops_per_token(self, done: int) -> float:
        config = self._config
        return token_flops(config.model, config.data.seq_len, config.objective, done - 1).total

    def _memory_gb(self) -> float:
        if self._engine.device.type == "cuda":
            return torch.cuda.max_memory_allocated() / 1e9
        return psutil.Process().memory_info().rss / 1e9


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
