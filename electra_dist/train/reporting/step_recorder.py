"""Make the record of a logged step from the step's results: losses, rates, FLOPs, memory, readings of the GPU."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist

from electra_dist.config import Config
from electra_dist.config.schedule import schedules_of, value_at
from electra_dist.data.corpora import tokens_per_row
from electra_dist.data.receipt import Receipt
from electra_dist.engine.learning_rate import generator_learning_rate
from electra_dist.model.counts import mfu, peak_flops, token_flops
from electra_dist.run.metrics import StepRecord
from electra_dist.train.health.gpu_monitor import GpuReading
from electra_dist.train.health.rank_monitor import RankObservation
from electra_dist.train.step import StepResult

_LEAST_INTERVAL_S = 1e-9  # a shorter interval counts as this long, so that no rate is divided by 0
_NO_GPU_READING = GpuReading(
    gpu_temperature_c=None,
    gpu_power_w=None,
    gpu_sm_clock_mhz=None,
    gpu_memory_used_gb=None,
    gpu_ecc_uncorrected=None,
    gpu_throttle=(),
)


class _LogPoint(NamedTuple):
    """Time and progress at the last log line or evaluation; the next rates are measured from there."""

    step: int  # steps done
    time: float  # of time.perf_counter, in seconds
    waited_s: float  # total seconds waited for rows


class StepRecorder:
    """Makes the metrics record of each logged step in one start of a run, with rates since the last record."""

    def __init__(self, config: Config, device: torch.device, corpus_sizes: Mapping[str, Any], start_step: int) -> None:
        self._config = config
        self._device = device
        self._corpus_sizes = corpus_sizes
        self._peak_flops = None  # FLOP/s of one GPU, if they are known
        if device.type == "cuda":
            self._peak_flops = peak_flops(torch.cuda.get_device_name(), config.train.precision)
        self._last = _LogPoint(step=start_step, time=time.perf_counter(), waited_s=0.0)

    def begin_interval(self, done: int) -> None:
        """Measure the next rates from now on, so that they do not include the time of an evaluation."""
        self._last = _LogPoint(step=done, time=time.perf_counter(), waited_s=self._last.waited_s)

    def record_of(
        self,
        done: int,
        result: StepResult,
        lr: float,
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
        global_batch = self._config.train.global_batch
        remaining_steps = num_steps - done
        return StepRecord(
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
            generator_lr=generator_learning_rate(done - 1, num_steps, self._config.optimizer),
            grad_norm=result.grad_norm,
            tokens_per_s=tokens_per_s,
            mfu=mfu(tokens_per_s, self._flops_per_token(done), dist.get_world_size(), self._peak_flops),
            data_wait=data_wait,
            memory_gb=self._memory_gb(),
            eta_s=step_s * remaining_steps,
            tokens_seen=round(receipt.rows * tokens_per_row(self._corpus_sizes, done, global_batch)),
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
            **self._scheduled_values(done),
        )

    def _scheduled_values(self, done: int) -> dict[str, Any]:
        """Return the values of the objective's scheduled settings in the newest of `done` steps, by key."""
        last_step = done - 1  # steps are numbered from 0
        progress = last_step / self._config.train.num_steps
        schedules = schedules_of(self._config.objective)
        return {key: value_at(schedule, progress) for key, schedule in schedules.items()}

    def _flops_per_token(self, done: int) -> float:
        """Return the training FLOPs per token in the newest of `done` steps; the stage of training decides them."""
        config = self._config
        last_step = done - 1  # steps are numbered from 0
        return token_flops(config.model, config.data.seq_len, config.objective, last_step).total

    def _memory_gb(self) -> float:
        """Return this rank's peak GPU memory or, on a CPU, its present host memory, in 1e9 bytes."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated() / 1e9
        return psutil.Process().memory_info().rss / 1e9


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
