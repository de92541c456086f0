"""One optimizer step over this rank's share of the global batch.

Guarantee: what step t computes depends on the ids of its rows, the seed and t. Masks and samples are keyed by the
row's number in the global batch; dropout is seeded per micro-batch by the number of its first row, so that a
micro-batch drops the same units on whatever rank it runs. The update is made on all ranks or on none.

Losses are means over tokens of the global batch: the counts follow from the ids alone and are all-reduced before
the first forward. `loss_mean: per_replica` is the reference's way: each micro-batch its own mean, then averaged.

Cost: two all-reduces beside DeepSpeed's: one of integers before the forward (counts, receipt, flags, retries), one of
float64 sums after it. The host waits for the device once, in front of the update.
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
from electra_dist.data.receipt import Receipt
from electra_dist.engine.engine import Engine
from electra_dist.model.rows import SpecialIds
from electra_dist.objectives.base import StepInput, Sums, loss_counts


class RankFlags(NamedTuple):
    """What each rank brings to a step beside its rows; added up over the ranks."""

    stop: int = 0  # ranks that were told to stop
    save: int = 0  # ranks that were told to save
    sick: int = 0  # ranks whose node is not to be trusted
    retries: int = 0  # of store requests, since the run was started
    retry_wait_ms: int = 0
    refetches: int = 0  # shards fetched again because their bytes were wrong


_NO_FLAGS = RankFlags()


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Global figures of one step, the same on all ranks."""

    sums: Sums
    loss: float  # what is minimised
    grad_norm: float  # before clipping; NaN if it is not finite
    fault: str  # why no update was made; empty if one was
    receipt: Receipt
    flags: RankFlags


class TrainStep:
    """Runs steps on an engine; what it keeps are the marks of a stopwatch."""

    def __init__(
        self, engine: Engine, objective: ObjectiveConfig, special: SpecialIds, seed: int, micro_batch: int
    ) -> None:
        self._engine, self._objective, self._special = engine, objective, special
        self._seed, self._micro_batch = seed, micro_batch
        self._stopwatch = _Stopwatch(engine.device)

    def __call__(
        self,
        batch: RowBatch,
        learning_rate: float,
        find_fault: Callable[[float], str] = lambda loss: "",
        flags: RankFlags = _NO_FLAGS,
    ) -> StepResult:
        """Forward and backward over every micro-batch of `batch`, then one update. Collective.

        Args:
            find_fault: is told the loss before the update; says why there shall be none, or nothing.
        """
        engine, size = self._engine, self._micro_batch
        ids_BS = self._to_device(batch)
        scales, reduced = self._reduce(ids_BS, batch.receipt, flags)
        sums_K = None
        num_micro = len(ids_BS) // size
        for micro in range(num_micro):
            part = slice(micro * size, (micro + 1) * size)
            row0 = batch.row0 + micro * size
            torch.manual_seed(derive_seed(self._seed, Purpose.DROPOUT, batch.step, row0))
            given = self._input(ids_BS[part], row0, batch.step, scales[micro])
            with self._stopwatch if micro == 0 else contextlib.nullcontext():
                out = engine.forward(given)
            engine.backward(out.loss)
            sums_K = out.sums if sums_K is None else sums_K + out.sums
            if micro < num_micro - 1:
                engine.step_micro_batch()
        assert sums_K is not None
        dist.all_reduce(sums_K)
        return self._update(sums_K, reduced, learning_rate, find_fault)

    def forward_s(self) -> float:
        """Seconds of the last step's first forward on this rank. Waits for the device."""
        return self._stopwatch.seconds()

    def _update(
        self, sums_K: torch.Tensor, reduced: torch.Tensor, learning_rate: float, find_fault: Callable[[float], str]
    ) -> StepResult:
        fault = ""

        def accept() -> bool:
            nonlocal fault
            fault = find_fault(Sums(*sums_K.tolist()).loss)
            return not fault

        norm, applied = self._engine.step(learning_rate, accept)
        sums = Sums(*sums_K.tolist())
        if not applied and not fault:
            fault = find_fault(sums.loss) or "the gradient is not finite"
        rows, digest, *rest = reduced.tolist()
        return StepResult(
            sums=sums,
            loss=sums.loss,
            grad_norm=norm,
            fault=fault,
            receipt=Receipt.from_words(rows, digest),
            flags=RankFlags(*rest),
        )

    def _input(self, ids_BS: torch.Tensor, row0: int, step: int, scale_2: torch.Tensor) -> StepInput:
        """Return the input of one forward.

        Args:
            ids_BS: int64 rows on the device, consecutive rows of the global batch.
            row0: number of the first of them within the global batch.
            step: number of the optimizer step.
            scale_2: what the first and the second loss's sums are multiplied with.
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
        ids_BS = torch.from_numpy(batch.ids.astype(np.int64))
        if self._engine.device.type == "cuda":
            ids_BS = ids_BS.pin_memory()  # else the copy waits for the steps that are queued
        return ids_BS.to(self._engine.device, non_blocking=True)

    def _reduce(self, ids_BS: torch.Tensor, receipt: Receipt, flags: RankFlags) -> tuple[torch.Tensor, torch.Tensor]:
        """What each micro-batch's two loss sums are multiplied with, [micro-batches, 2]; and the global sums of the
        receipt's words and the flags, int64."""
        counts = loss_counts(ids_BS, self._special, self._objective).view(-1, self._micro_batch, 2).sum(1)
        mine = torch.tensor([*receipt.words, *flags], dtype=torch.int64).to(ids_BS.device, non_blocking=True)
        total = torch.cat([counts.sum(0), mine])
        dist.all_reduce(total)
        if self._objective.loss_mean == "per_replica":
            scales = 1.0 / (counts.clamp(min=1) * self._engine.num_micro_batches * dist.get_world_size())
        else:
            scales = (1.0 / total[:2].clamp(min=1)).expand(len(counts), 2)
        return scales, total[2:]

    def row_losses(self, batch: RowBatch) -> list[float]:
        """The loss of each row by itself, as this step saw it but for dropout on embeddings and attention. Collective.

        For finding the row that poisoned a step; one forward a row.
        """
        engine = self._engine
        ids_BS = self._to_device(batch)
        losses = []
        scales = 1.0 / loss_counts(ids_BS, self._special, self._objective).clamp(min=1)
        with torch.no_grad():
            for i in range(len(ids_BS)):
                torch.manual_seed(derive_seed(self._seed, Purpose.DROPOUT, batch.step, batch.row0 + i))
                out = engine.forward(self._input(ids_BS[i : i + 1], batch.row0 + i, batch.step, scales[i]))
                losses.append(float(out.loss))
        return losses


class _Stopwatch:
    """Times a block on the device it runs on, without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else None
        self._times = [0.0, 0.0]

    def __enter__(self) -> None:
        self._mark(0)

    def __exit__(self, *_: object) -> None:
        self._mark(1)

    def _mark(self, which: int) -> None:
        if self._events:
            self._events[which].record()
        else:
            self._times[which] = time.perf_counter()

    def seconds(self) -> float:
        if self._events:
            self._events[1].synchronize()
            return self._events[0].elapsed_time(self._events[1]) / 1000
        return self._times[1] - self._times[0]


def outlier(losses: list[float]) -> int | None:
    """The row that stands out: the first that is not finite, or the highest if it is 6 sigma (by the median absolute
    deviation) above the median."""
    for i, loss in enumerate(losses):
        if not math.isfinite(loss):
            return i
    median = float(np.median(losses))
    sigma = 1.4826 * float(np.median(np.abs(np.array(losses) - median)))
    highest = int(np.argmax(losses))
    return highest if losses[highest] > median + 6.0 * max(sigma, 1e-3 * abs(median)) else None
