"""What rank 0 tells: one dense line, metrics.jsonl, TensorBoard, the ledger, the report. Others have no Reporter.

The loop hands over device tensors; they are read here, at log steps only, so that a step costs no host sync. A record
holds the values of its own step, not of an interval: a run cut anywhere writes the same records as an uncut one.
"""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from electra_dist.checkpoint.manifest import RunState
from electra_dist.checkpoint.save import SaveTiming
from electra_dist.config import Config
from electra_dist.objectives.rtd import SUM_NAMES
from electra_dist.telemetry.console import Console, EvalRecord, StepRecord
from electra_dist.telemetry.flops import flops_per_token, peak_flops
from electra_dist.telemetry.ledger import Ledger
from electra_dist.telemetry.metrics import MetricsWriter
from electra_dist.telemetry.report import write_report
from electra_dist.train.engine import Engine
from electra_dist.train.preparation import Inputs
from electra_dist.train.step import StepResult


class Reporter:
    """Rank 0's voice. `begin` once, then `step`, `evaluation`, `saving`, `committed`; `close` writes the report."""

    def __init__(self, config: Config, engine: Engine) -> None:
        self._config, self._engine = config, engine
        self._run_dir = Path(config.run_dir)
        self._ledger = Ledger(self._run_dir)
        self._console = Console(self._run_dir, config.train.num_steps)
        self._metrics: MetricsWriter | None = None
        flops = flops_per_token(config.model, config.data.seq_len, config.objective.mask_prob)
        self._flops_per_token = flops.total
        device = torch.cuda.get_device_name() if engine.device.type == "cuda" else None
        self._peak = peak_flops(device) if device else None
        self._last = (0, time.perf_counter(), 0.0)  # step, time, seconds waited for data

    def begin(self, attempt: int, restored: RunState | None, inputs: Inputs) -> None:
        """Say where the run stands and cut off the records of steps that will be repeated."""
        step = restored.step if restored else 0
        self._metrics = MetricsWriter(self._run_dir, tensorboard=self._config.log.tensorboard)
        dropped = self._metrics.truncate_after(step)
        self._ledger.append("resume" if restored else "start", step=step, attempt=attempt, ranks=dist.get_world_size())
        self._last = (step, time.perf_counter(), 0.0)
        config, corpus = self._config, inputs.corpus.manifest
        self.note(
            f"run {config.run_dir} | {dist.get_world_size()} ranks on {self._engine.device.type} | "
            f"ZeRO-{config.engine.zero_stage} {config.train.precision} | {self._engine.optimizer_name} | "
            f"kernels {self._engine.kernel_backend}"
        )
        self.note(
            f"corpus {config.data.corpus} | {corpus.num_rows:,} rows of {corpus.seq_len} | "
            f"{corpus.num_tokens:,} tokens | fingerprint {corpus.fingerprint[:12]}"
        )
        if restored and step >= config.train.num_steps:
            self.note(f"the run is finished: step {step:,} of {config.train.num_steps:,}; nothing to do")
        elif restored:
            self.note(f"restored step {step:,} (attempt {attempt}); {dropped} later metrics records will be made again")
        self._console.begin(step)

    def step(self, done: int, result: StepResult, lr: float, waited_s: float) -> None:
        """A log step: read the sums, print the line, write the record."""
        sums = dict(zip(SUM_NAMES, result.sums.tolist()))
        last_step, last_time, last_waited = self._last
        now = time.perf_counter()
        step_s = (now - last_time) / max(1, done - last_step)
        self._last = (done, now, waited_s)
        tokens_per_s = sums["tokens"] / step_s
        objective = self._config.objective
        mlm = sums["mlm_loss"] / max(sums["mlm_weight"], 1.0)
        rtd = sums["rtd_loss"] / max(sums["tokens"], 1.0)
        flops_per_s = self._flops_per_token * tokens_per_s
        record = StepRecord(
            step=done,
            loss=objective.mlm_weight * mlm + objective.rtd_weight * rtd,
            mlm_loss=mlm,
            rtd_loss=rtd,
            mlm_accuracy=sums["mlm_correct"] / max(sums["mlm_weight"], 1.0),
            replaced_accuracy=sums["replaced_correct"] / max(sums["replaced"], 1.0),
            original_accuracy=sums["original_correct"] / max(sums["original"], 1.0),
            replaced_fraction=sums["replaced"] / max(sums["tokens"], 1.0),
            lr=lr,
            grad_norm=result.grad_norm,
            tokens_per_s=tokens_per_s,
            mfu=flops_per_s / (self._peak * dist.get_world_size()) if self._peak else None,
            data_wait=min(1.0, (waited_s - last_waited) / max(step_s * (done - last_step), 1e-9)),
            memory_gb=self._memory_gb(),
            eta_s=step_s * (self._config.train.num_steps - done),
            tokens_seen=done * int(sums["tokens"]),
            step_s=step_s,
        )
        assert self._metrics is not None
        self._metrics.write_step(record)
        self._console.line(record)

    def evaluation(self, record: EvalRecord) -> None:
        """A held-out evaluation."""
        assert self._metrics is not None
        self._metrics.write_evaluation(record)
        self._console.evaluation(record)
        self._forget_interval(record.step)

    def saving(self, step: int, timing: SaveTiming) -> None:
        """A save has begun; the loop goes on."""
        assert self._metrics is not None
        self._metrics.flush()
        self._ledger.append("saving", step=step, stall_s=timing.stall_s, wait_s=timing.wait_s)
        if timing.wait_s > 1.0:
            self.note(f"step {step:,}: waited {timing.wait_s:.1f} s for the previous checkpoint to be written")

    def committed(self, state: RunState, seconds: float) -> None:
        """A checkpoint exists. Called from the writing thread."""
        self._ledger.append("checkpoint", step=state.step, attempt=state.attempt, write_s=seconds)

    def note(self, text: str) -> None:
        """A line of prose."""
        self._console.note(text)

    def close(self) -> None:
        """Flush everything and write report.html, also when the run was cut short by an exception."""
        self._console.close()
        if self._metrics is not None:
            self._metrics.close()
            write_report(self._run_dir)

    def _forget_interval(self, step: int) -> None:
        """Evaluation time is not step time."""
        self._last = (step, time.perf_counter(), self._last[2])

    def _memory_gb(self) -> float:
        if self._engine.device.type == "cuda":
            return torch.cuda.max_memory_allocated() / 2**30
        return psutil.Process().memory_info().rss / 2**30
