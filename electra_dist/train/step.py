"""Run one optimizer step over this rank's share of the global batch.

Guarantee: what step t computes depends on the ids of its rows, the seed and t. The random numbers of masks, samples
and dropout are computed from the seed, t and the row's number in the global batch. Only the dropout of attention on a
GPU is drawn by torch's generator, which is seeded for each micro-batch by the number of its first row. So no random
number depends on which rank computes the row. The update is made on all ranks or on none.

Losses are means over tokens of the global batch: the counts follow from the ids alone and are all-reduced before the
first forward. With `loss_mean: per_replica`, as in Google's code, each micro-batch takes its own mean, and the means
are averaged.

Cost: two all-reduces beside DeepSpeed's: one of integers before the forward (token counts, checksum of the rows,
requests to stop or save, counters of retries), one of float64 sums after it. The host waits for the device once,
before the update.

Suffixes of tensor names give the axes: B rows, S tokens of a row, N micro-batches of this rank, K fields of `Sums`,
and 2 for the two losses (first that of the generator or of the only network, then the discriminator's).
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from electra_kernels.keyed_random import Purpose, copy_to_device, derive_seed

from electra_dist.collectives import gather
from electra_dist.data.corpora import Corpora
from electra_dist.data.loader import RowBatch
from electra_dist.data.receipt import Receipt
from electra_dist.engine.engine import Engine, StepNumbers
from electra_dist.objectives.base import Schedules, StepInput, Sums

_OUTLIER_SIGMA = 6.0  # standard deviations above the median that make a row stand out
_SIGMA_PER_MAD = 1.4826  # standard deviation of a normal distribution over its median absolute deviation
_LEAST_SIGMA = 1e-3  # least standard deviation, as a fraction of the median
_NUM_LOSSES = 2  # first the loss of the generator or of the only network, then the discriminator's


class RankFlags(NamedTuple):
    """What one rank tells the others in a step: requests to stop or save, the health of its node, repeated requests.

    Each step adds them up over the ranks, in an all-reduce that it makes anyway, so that all ranks take the same
    decision after the same step. In a `StepResult` each field is the sum.
    """

    stop: int = 0  # 1 if this rank received a request to stop
    save: int = 0  # 1 if this rank received a request to save and go on
    sick: int = 0  # 1 if the node of this rank is not to be trusted
    retries: int = 0  # store requests repeated since this start of the run
    retry_wait_ms: int = 0  # milliseconds waited before these requests
    refetches: int = 0  # shards fetched again because their bytes were wrong


_NO_FLAGS = RankFlags()


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Results of one optimizer step over the global batch, equal on all ranks.

    If `fault` is not empty or `overflow` is true, the step has not changed weights and moments.
    """

    sums: Sums  # over the tokens of the global batch, the minimised loss among them
    judged_loss: float  # what the guard compares with earlier steps; see `TrainStep.judged_loss`
    learning_rate: float
    generator_learning_rate: float | None  # None if it is `learning_rate`
    grad_norm: float  # before clipping; NaN if it is not finite
    fault: str  # why the guard allowed no update; empty if an update was made or `overflow` is true
    loss_scale: float | None  # with which the step was computed; None unless the run is in fp16
    overflow: bool  # whether no update was made because the scaled gradients overflowed fp16
    receipt: Receipt  # number and digest of the rows of all ranks
    flags: RankFlags  # added up over the ranks


class TrainStep:
    """Callable that runs one optimizer step on an engine: forward, backward, and at most one update.

    The weights and the optimizer's state are in the engine, not here. `micro_batch`, in rows, must divide the rows of
    every batch.
    """

    def __init__(self, engine: Engine, seed: int, micro_batch: int, schedules: Schedules) -> None:
        self._engine = engine
        self._seed = seed
        self._micro_batch = micro_batch
        self._schedules = schedules
        self._values = schedules.values(0)  # of the keys that may be scheduled, in the present step
        # Of the last step's first forward pass on this rank. Below ZeRO stage 3 a forward pass does not wait for other
        # ranks, so a rank that takes longer is slow itself.
        self.stopwatch = Stopwatch(engine.device)

    def __call__(
        self,
        batch: RowBatch,
        learning_rate: float,
        find_fault: Callable[[float], str] = lambda loss: "",
        flags: RankFlags = _NO_FLAGS,
        generator_learning_rate: float | None = None,
    ) -> StepResult:
        """Run forward and backward over every micro-batch of this rank's rows, then at most one update. Collective.

        Before the update, `find_fault` gets the loss (see `judged_loss`) and returns why there must be no update, or
        "" to allow it, the same on all ranks. `flags` are added up over the ranks. If `generator_learning_rate` is
        None, the generator learns with `learning_rate`, too.
        """
        self._values = self._schedules.values(batch.step)
        ids_BS = copy_to_device(torch.from_numpy(batch.ids.astype(np.int64)), self._engine.device)
        scale_N2, totals = self._reduce(ids_BS, batch.receipt, flags)
        sum_K = self._accumulate_gradients(batch, ids_BS, scale_N2)
        dist.all_reduce(sum_K)
        learning_rates = (learning_rate, generator_learning_rate)
        return self._update(sum_K, totals, learning_rates, find_fault)

    def _accumulate_gradients(self, batch: RowBatch, ids_BS: torch.Tensor, scale_N2: torch.Tensor) -> torch.Tensor:
        """Run forward and backward over every micro-batch; return this rank's `Sums`, float64 [K]. Collective."""
        engine = self._engine
        num_micro_batches = len(ids_BS) // self._micro_batch
        sum_K: torch.Tensor | None = None
        for index in range(num_micro_batches):
            first = index * self._micro_batch
            rows = slice(first, first + self._micro_batch)
            step_input = self._input(batch, ids_BS, rows, scale_N2[index])
            with self.stopwatch if index == 0 else contextlib.nullcontext():
                output = engine.forward(step_input)
            engine.backward(output.loss)
            sum_K = output.sums if sum_K is None else sum_K + output.sums
        assert sum_K is not None
        return sum_K

    def _update(
        self,
        sum_K: torch.Tensor,
        totals: torch.Tensor,
        learning_rates: tuple[float, float | None],
        find_fault: Callable[[float], str],
    ) -> StepResult:
        """Update the weights unless `find_fault` reports a fault; return the step's result. Collective."""
        learning_rate, generator_learning_rate = learning_rates
        scaler = self._engine.loss_scale
        loss_scale = None if scaler is None else scaler.cur_scale
        # The engine copies these numbers to the host together with the norm, so that the host waits only once.
        numbers = StepNumbers([sum_K, totals])
        fault = ""

        def accept() -> bool:
            nonlocal fault
            fault = find_fault(self.judged_loss(Sums(*numbers.values[0])))
            return not fault

        grad_norm, is_updated = self._engine.step(learning_rate, accept, generator_learning_rate, numbers=numbers)
        sums_on_host, [num_rows, digest, *flags] = numbers.values
        sums = Sums(*sums_on_host)
        judged_loss = self.judged_loss(sums)
        overflow = False
        if not is_updated and not fault:
            # The engine did not call `accept`, because the gradient norm is not finite. If the loss has a fault as
            # well, that fault is reported, because it is closer to the cause.
            fault = find_fault(judged_loss)
            overflow = not fault and scaler is not None and scaler.lower()
            if not fault and not overflow:
                fault = "the gradient is not finite"
                if scaler is not None:
                    fault += f" at the least loss scale, {loss_scale:,.0f}"
        return StepResult(
            sums=sums,
            judged_loss=judged_loss,
            learning_rate=learning_rate,
            generator_learning_rate=generator_learning_rate,
            grad_norm=grad_norm,
            fault=fault,
            loss_scale=loss_scale,
            overflow=overflow,
            receipt=Receipt.from_words(num_rows, digest),
            flags=RankFlags(*flags),
        )

    def judged_loss(self, sums: Sums) -> float:
        """Return the loss that the guard compares with earlier steps: mostly the loss that the optimizer minimises.

        If the weight of a loss term changes on a schedule, the terms (each a mean over tokens) are added without
        weights instead, so that the result does not jump with the weight. A minimised loss that is not finite is
        returned as it is.
        """
        if not self._schedules.change_weights or not math.isfinite(sums.loss):
            return sums.loss
        losses = sums.mean_losses()
        return float(losses["mlm_loss"] + losses["rtd_loss"] + losses["token_loss"])

    def _input(self, batch: RowBatch, ids_BS: torch.Tensor, rows: slice, scale_2: torch.Tensor) -> StepInput:
        """Return the model's input for some `rows` of a batch, and seed torch's generator of random numbers for them.

        Attention on a GPU draws its dropout from that generator. Seeded by the first row, it drops the same
        probabilities on whatever rank the rows are computed. `scale_2` turns sums of losses into means.
        """
        row0 = batch.row0 + rows.start  # number within the global batch
        torch.manual_seed(derive_seed(self._seed, Purpose.DROPOUT, batch.step, row0))
        return self._engine.module.step_input(
            ids_BS[rows], batch.ids[rows], row0, (self._seed, batch.step), scale_2, self._values
        )

    def _reduce(self, ids_BS: torch.Tensor, receipt: Receipt, flags: RankFlags) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the factors that turn loss sums into means, fp32 [N, 2], and the sums of receipt and flags, int64.

        Token counts, receipts (number and digest of rows) and flags are added up over all ranks. Collective.
        """
        count_B2 = self._engine.module.loss_counts(ids_BS, self._values.mask_prob)
        count_N2 = count_B2.view(-1, self._micro_batch, _NUM_LOSSES).sum(1)
        receipt_and_flags = torch.tensor([*receipt.words, *flags], dtype=torch.int64)
        totals = torch.cat([count_N2.sum(0), receipt_and_flags.to(ids_BS.device, non_blocking=True)])
        dist.all_reduce(totals)
        count_2 = totals[:_NUM_LOSSES]  # of the global batch
        # A count of 0 has a loss sum of 0: a divisor of 1 gives the mean 0 instead of NaN.
        if self._engine.module.objective.loss_mean == "per_replica":
            # The mean of each micro-batch, averaged over all micro-batches of all ranks.
            num_means = self._engine.num_micro_batches * dist.get_world_size()
            scale_N2 = 1.0 / (count_N2.clamp(min=1) * num_means)
        else:
            # One mean over the tokens of the global batch: the same factors for every micro-batch.
            scale_2 = 1.0 / count_2.clamp(min=1)
            scale_N2 = scale_2.expand(len(count_N2), _NUM_LOSSES)
        return scale_N2, totals[_NUM_LOSSES:]

    def row_losses(self, batch: RowBatch) -> list[float]:
        """Return the loss of each row of this rank's batch alone, to find the row that made a step fail. Collective.

        It is the loss that the optimizer minimises, in nats, as a mean over the row's own tokens. Masks, samples and
        dropout are the same as in the step, except for attention dropout on a GPU, which is drawn per micro-batch.
        All ranks must have the same number of rows.
        """
        self._values = self._schedules.values(batch.step)
        ids_BS = copy_to_device(torch.from_numpy(batch.ids.astype(np.int64)), self._engine.device)
        count_B2 = self._engine.module.loss_counts(ids_BS, self._values.mask_prob)
        scale_B2 = 1.0 / count_B2.clamp(min=1)  # the mean of each row
        losses = []
        with torch.no_grad():
            for row in range(len(ids_BS)):
                step_input = self._input(batch, ids_BS, slice(row, row + 1), scale_B2[row])
                losses.append(float(self._engine.forward(step_input).loss))
        return losses


class Stopwatch:
    """Context manager that times a block: by CUDA events on a GPU, otherwise by the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._is_on_gpu = device.type == "cuda"
        if self._is_on_gpu:
            self._begin_event = torch.cuda.Event(enable_timing=True)
            self._end_event = torch.cuda.Event(enable_timing=True)
        self._begin_s = 0.0
        self._end_s = 0.0

    def __enter__(self) -> None:
        if self._is_on_gpu:
            self._begin_event.record()
        else:
            self._begin_s = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        if self._is_on_gpu:
            self._end_event.record()
        else:
            self._end_s = time.perf_counter()

    def seconds(self) -> float:
        """Return the seconds that the last timed block took; on a GPU, first wait until it has finished."""
        if self._is_on_gpu:
            self._end_event.synchronize()
            milliseconds = self._begin_event.elapsed_time(self._end_event)
            return milliseconds / 1000
        return self._end_s - self._begin_s


def find_suspect(corpora: Corpora, batch: RowBatch, losses: list[float]) -> str:
    """Describe the row of a step whose loss stands out among the rows of all ranks, if one does. Collective.

    `losses` are of this rank's rows. The text has the row's name (shard and index), its loss and the median loss; it
    is "" if no row stands out.
    """
    all_losses: list[float] = []
    all_row_ids: list[int] = []
    for rank_losses, rank_row_ids in gather([losses, batch.row_ids.tolist()]):
        all_losses += rank_losses
        all_row_ids += rank_row_ids
    index = outlier(all_losses)
    if index is None:
        return ""
    name = corpora.row_name(all_row_ids[index])
    median = np.nanmedian(all_losses)
    return f"{name} (loss {all_losses[index]:.4g}, median of the step's rows {median:.4g})"


def outlier(losses: list[float]) -> int | None:
    """Return the index of a loss that is not finite or, if all are finite, that stands out; None if there is none.

    The first loss that is not finite is taken, otherwise the highest. A loss stands out if it is more than 6 standard
    deviations above the median. The standard deviation is estimated from the median absolute deviation, which a single
    outlier hardly changes.
    """
    for index, loss in enumerate(losses):
        if not math.isfinite(loss):
            return index
    median = float(np.median(losses))
    median_deviation = float(np.median(np.abs(np.array(losses) - median)))
    # The deviation is 0 if most losses are equal; the least sigma then keeps small differences from standing out.
    sigma = max(_SIGMA_PER_MAD * median_deviation, _LEAST_SIGMA * abs(median))
    highest = int(np.argmax(losses))
    if losses[highest] > median + _OUTLIER_SIGMA * sigma:
        return highest
    return None
