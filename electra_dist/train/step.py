"""Run one optimizer step over this rank's share of the global batch.

Guarantee: what step t computes depends on the ids of its rows, the seed and t. Masks and samples are keyed by the
row's number in the global batch; dropout is seeded per micro-batch by the number of its first row, so that a
micro-batch drops the same units on whatever rank it runs. The update is made on all ranks or on none.

Losses are means over tokens of the global batch: the counts follow from the ids alone and are all-reduced before
the first forward. With `loss_mean: per_replica`, as in Google's code, each micro-batch takes its own mean, and the
means are averaged.

Cost: two all-reduces beside DeepSpeed's: one of integers before the forward (counts, receipt, flags, retries), one of
float64 sums after it. The host waits for the device once, before the update.
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
from electra_kernels.keyed_random import Purpose, derive_seed

from electra_dist.config import ObjectiveConfig
from electra_dist.data.loader import RowBatch
from electra_dist.data.row_receipt import Receipt
from electra_dist.engine.engine import Engine
from electra_dist.model.row_layout import SpecialIds
from electra_dist.objectives.base import StepInput, Sums, loss_counts

_OUTLIER_SIGMA = 6.0  # standard deviations above the median that make a row stand out
_SIGMA_PER_MAD = 1.4826  # standard deviation of a normal distribution over its median absolute deviation


class RankFlags(NamedTuple):
    """Requests and counters of one rank, which a step adds up over all ranks.

    They travel in an all-reduce that the step makes anyway, so that all ranks take the same decision after the same
    step. In a `StepResult` each field is the sum over the ranks.
    """

    stop: int = 0  # 1 if this rank received a request to stop
    save: int = 0  # 1 if this rank received a request to save and go on
    sick: int = 0  # 1 if the node of this rank is not to be trusted
    retries: int = 0  # store requests repeated since the run was started
    retry_wait_ms: int = 0  # milliseconds waited before these
    refetches: int = 0  # shards fetched again because their bytes were wrong


_NO_FLAGS = RankFlags()


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Results of one step over the global batch, equal on all ranks."""

    sums: Sums
    loss: float  # the minimised loss
    grad_norm: float  # before clipping; NaN if it is not finite
    fault: str  # why no update was made; empty if one was
    receipt: Receipt  # of the rows of all ranks
    flags: RankFlags  # added up over the ranks


class TrainStep:
    """Runs optimizer steps on an engine.

    Call it with one batch per step, on all ranks. Between steps it keeps nothing but the time of the last forward.
    """

    def __init__(
        self, engine: Engine, objective: ObjectiveConfig, special: SpecialIds, seed: int, micro_batch: int
    ) -> None:
        """Store the engine and the settings of the run; nothing is computed.

        Args:
            engine: holds the model and the optimizer.
            objective: decides which tokens the losses are means over.
            special: ids of the special tokens.
            seed: seed of the run.
            micro_batch: rows per forward pass; must divide the rows of every batch.
        """
        self._engine = engine
        self._objective = objective
        self._special = special
        self._seed = seed
        self._micro_batch = micro_batch
        self._stopwatch = _Stopwatch(engine.device)

    def __call__(
        self,
        batch: RowBatch,
        learning_rate: float,
        find_fault: Callable[[float], str] = lambda loss: "",
        flags: RankFlags = _NO_FLAGS,
    ) -> StepResult:
        """Run forward and backward over every micro-batch of a batch, then at most one update. Collective.

        Args:
            batch: this rank's rows of the step.
            learning_rate: of the update.
            find_fault: called before the update with the loss of the step; returns why there must be no update, or an
                empty string. It must return the same on all ranks, as it does if it depends on the loss alone.
            flags: requests and counters of this rank.

        Returns:
            The results over the global batch. If `fault` is not empty, weights and moments are unchanged.
        """
        engine = self._engine
        ids_BS = self._to_device(batch)
        scales, reduced = self._reduce(ids_BS, batch.receipt, flags)
        num_micro_batches = len(ids_BS) // self._micro_batch
        sums_K: torch.Tensor | None = None
        for number in range(num_micro_batches):
            first = number * self._micro_batch
            row0 = batch.row0 + first
            torch.manual_seed(derive_seed(self._seed, Purpose.DROPOUT, batch.step, row0))
            given = self._input(ids_BS[first : first + self._micro_batch], row0, batch.step, scales[number])
            is_timed = number == 0
            with self._stopwatch if is_timed else contextlib.nullcontext():
                out = engine.forward(given)
            engine.backward(out.loss)
            sums_K = out.sums if sums_K is None else sums_K + out.sums
            is_last = number == num_micro_batches - 1
            if not is_last:
                engine.step_micro_batch()
        assert sums_K is not None
        dist.all_reduce(sums_K)
        return self._update(sums_K, reduced, learning_rate, find_fault)

    def forward_s(self) -> float:
        """Return the seconds of the last step's first forward on this rank; wait until the device has finished it.

        Below ZeRO stage 3 a forward pass does not wait for other ranks, so the time shows whether this rank is slow.
        """
        return self._stopwatch.seconds()

    def _update(
        self, sums_K: torch.Tensor, reduced: torch.Tensor, learning_rate: float, find_fault: Callable[[float], str]
    ) -> StepResult:
        """Update the weights unless the step has a fault, and return the result of the step. Collective.

        Args:
            sums_K: sums over the global batch, float64, one for each field of `Sums`.
            reduced: int64 sums over the ranks: number of rows, digest of the rows, and each field of `RankFlags`.
            learning_rate: of the update.
            find_fault: called once with the loss; returns why there must be no update, or an empty string.
        """
        fault = ""

        def accept() -> bool:
            """Compute the loss of the step, ask `find_fault` about it, and return whether the update may be made."""
            # The engine calls this when it has the norm of the reduced gradients: the host has to wait for the device
            # at that point anyway, so that reading the sums costs no second wait.
            nonlocal fault
            fault = find_fault(Sums(*sums_K.tolist()).loss)
            return not fault

        grad_norm, is_applied = self._engine.step(learning_rate, accept)
        sums = Sums(*sums_K.tolist())
        if not is_applied and not fault:
            # The engine did not call `accept`, because the gradient is not finite.
            fault = find_fault(sums.loss) or "the gradient is not finite"
        rows, digest, *flag_sums = reduced.tolist()
        return StepResult(
            sums=sums,
            loss=sums.loss,
            grad_norm=grad_norm,
            fault=fault,
            receipt=Receipt.from_words(rows, digest),
            flags=RankFlags(*flag_sums),
        )

    def _input(self, ids_BS: torch.Tensor, row0: int, step: int, scale_2: torch.Tensor) -> StepInput:
        """Return the input of one forward pass.

        Args:
            ids_BS: int64 rows on the device, consecutive rows of the global batch.
            row0: number of the first of them within the global batch.
            step: number of the optimizer step.
            scale_2: the factors that the sums of the first and of the second loss are multiplied by, [2].
        """
        first_scale, second_scale = scale_2
        return StepInput(
            ids_BS=ids_BS,
            row_B=torch.arange(row0, row0 + len(ids_BS), device=self._engine.device),
            step=step,
            seed=self._seed,
            first_scale=first_scale,
            second_scale=second_scale,
        )

    def _to_device(self, batch: RowBatch) -> torch.Tensor:
        """Return the token ids of a batch on the device, int64 [B, S], without waiting for the copy."""
        ids_BS = torch.from_numpy(batch.ids.astype(np.int64))
        if self._engine.device.type == "cuda":
            ids_BS = ids_BS.pin_memory()  # from pageable memory the copy would wait for the queued steps
        return ids_BS.to(self._engine.device, non_blocking=True)

    def _reduce(self, ids_BS: torch.Tensor, receipt: Receipt, flags: RankFlags) -> tuple[torch.Tensor, torch.Tensor]:
        """Add up over all ranks what a step needs before its first forward. Collective; one all-reduce of int64.

        Args:
            ids_BS: int64 rows of this rank.
            receipt: number and digest of these rows.
            flags: requests and counters of this rank.

        Returns:
            The factors that the two loss sums of each micro-batch are multiplied by, [micro-batches, 2]; and the int64
            sums over the ranks of the receipt's two numbers and of each flag.
        """
        counts_per_row = loss_counts(ids_BS, self._special, self._objective)
        counts = counts_per_row.view(-1, self._micro_batch, 2).sum(1)  # [micro-batches, 2]
        words = torch.tensor([*receipt.words, *flags], dtype=torch.int64).to(ids_BS.device, non_blocking=True)
        total = torch.cat([counts.sum(0), words])
        dist.all_reduce(total)
        if self._objective.loss_mean == "per_replica":
            # The mean of each micro-batch, averaged over all micro-batches of all ranks.
            scales = 1.0 / (counts.clamp(min=1) * self._engine.num_micro_batches * dist.get_world_size())
        else:
            scales = (1.0 / total[:2].clamp(min=1)).expand(len(counts), 2)
        return scales, total[2:]

    def row_losses(self, batch: RowBatch) -> list[float]:
        """Return the loss of each row of a batch by itself, to find the row that made a step fail. Collective.

        One forward per row, without gradients, in the mode of the engine. Masks and samples are those of the step;
        dropout of embeddings and attention may differ, because it is drawn per micro-batch.

        Args:
            batch: this rank's rows of the step.
        """
        engine = self._engine
        ids_BS = self._to_device(batch)
        losses = []
        scales = 1.0 / loss_counts(ids_BS, self._special, self._objective).clamp(min=1)
        with torch.no_grad():
            for row in range(len(ids_BS)):
                row0 = batch.row0 + row
                torch.manual_seed(derive_seed(self._seed, Purpose.DROPOUT, batch.step, row0))
                out = engine.forward(self._input(ids_BS[row : row + 1], row0, batch.step, scales[row]))
                losses.append(float(out.loss))
        return losses


class _Stopwatch:
    """Context manager that times a block on the device that it runs on, without waiting for the device.

    On a GPU it records two CUDA events; on a CPU it reads the clock.
    """

    def __init__(self, device: torch.device) -> None:
        """Create the CUDA events if `device` is a GPU; they are used again for every block."""
        self._is_on_gpu = device.type == "cuda"
        if self._is_on_gpu:
            self._begin_event = torch.cuda.Event(enable_timing=True)
            self._end_event = torch.cuda.Event(enable_timing=True)
        self._begin_s = 0.0
        self._end_s = 0.0

    def __enter__(self) -> None:
        """Record the beginning of the block."""
        if self._is_on_gpu:
            self._begin_event.record()
        else:
            self._begin_s = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        """Record the end of the block."""
        if self._is_on_gpu:
            self._end_event.record()
        else:
            self._end_s = time.perf_counter()

    def seconds(self) -> float:
        """Return the seconds of the last timed block; on a GPU wait until the device has finished it."""
        if self._is_on_gpu:
            self._end_event.synchronize()
            return self._begin_event.elapsed_time(self._end_event) / 1000
        return self._end_s - self._begin_s


def outlier(losses: list[float]) -> int | None:
    """Return the index of the loss that stands out, or None if none does.

    It is the first loss that is not finite. If all are finite, it is the highest, provided that it lies more than 6
    standard deviations above the median; the deviation is estimated robustly, from the median absolute deviation.

    Args:
        losses: at least one loss.
    """
    for index, loss in enumerate(losses):
        if not math.isfinite(loss):
            return index
    median = float(np.median(losses))
    median_deviation = float(np.median(np.abs(np.array(losses) - median)))
    sigma = max(_SIGMA_PER_MAD * median_deviation, 1e-3 * abs(median))  # equal losses would give 0
    highest = int(np.argmax(losses))
    if losses[highest] > median + _OUTLIER_SIGMA * sigma:
        return highest
    return None
