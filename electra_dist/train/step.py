"""One optimizer step over this rank's share of the global batch.

Guarantee: what step t computes depends on the ids of its rows, the seed and t. Masks and samples are keyed by the
row's number in the global batch; dropout is seeded per micro-batch by the number of its first row, so that a
micro-batch drops the same units on whatever rank it runs.

Losses are means over the tokens of the global batch: the counts follow from the ids alone and are all-reduced before
the first forward. `loss_mean: per_replica` is the reference's way: each micro-batch its own mean, then averaged.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from electra_dist.config import ObjectiveConfig
from electra_dist.data.loader import Batch
from electra_dist.keyed_random import Purpose, derive_seed
from electra_dist.model.rows import SpecialIds
from electra_dist.objectives.masking import num_masked
from electra_dist.objectives.rtd import RtdSums
from electra_dist.train.engine import Engine


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Global figures of one step; `sums` (float64, [K]) stay on the device until somebody looks."""

    sums: torch.Tensor
    grad_norm: float

    def read(self) -> RtdSums:
        """The sums on the host: waits for the device."""
        return RtdSums(*self.sums.tolist())


class TrainStep:
    """Runs steps on an engine; has no state of its own."""

    def __init__(
        self, engine: Engine, objective: ObjectiveConfig, special: SpecialIds, seed: int, micro_batch: int
    ) -> None:
        self._engine, self._objective, self._special = engine, objective, special
        self._seed, self._micro_batch = seed, micro_batch

    def __call__(self, batch: Batch, learning_rate: float) -> StepResult:
        """Forward and backward over every micro-batch of `batch`, then one update. Collective."""
        engine, size = self._engine, self._micro_batch
        ids_BS = torch.from_numpy(batch.ids.astype(np.int64)).to(engine.device, non_blocking=True)
        scales = self._scales(ids_BS)
        sums = None
        num_micro = len(ids_BS) // size
        for micro in range(num_micro):
            part = slice(micro * size, (micro + 1) * size)
            row0 = batch.row0 + micro * size
            torch.manual_seed(derive_seed(self._seed, Purpose.DROPOUT, batch.step, row0))
            rows_B = torch.arange(row0, row0 + size, device=engine.device)
            mlm_scale, rtd_scale = scales[micro]
            out = engine.forward(ids_BS[part], rows_B, batch.step, self._seed, mlm_scale, rtd_scale)
            engine.backward(out.loss)
            sums = out.sums if sums is None else sums + out.sums
            if micro < num_micro - 1:
                engine.step_micro_batch()
        assert sums is not None
        dist.all_reduce(sums)
        return StepResult(sums=sums, grad_norm=engine.step(learning_rate))

    def _scales(self, ids_BS: torch.Tensor) -> torch.Tensor:
        """[micro-batches, 2]: what each micro-batch's MLM and RTD loss sums are multiplied with."""
        masked_B = num_masked(ids_BS, self._special, self._objective)
        real_B = (ids_BS != self._special.pad).sum(-1)
        counts = torch.stack([masked_B, real_B], -1).view(-1, self._micro_batch, 2).sum(1)
        if self._objective.loss_mean == "per_replica":
            return 1.0 / (counts.clamp(min=1) * self._engine.num_micro_batches * dist.get_world_size())
        total = counts.sum(0)
        dist.all_reduce(total)
        return (1.0 / total.clamp(min=1)).expand(len(counts), 2)
