"""launcher/pretrain.py with faults inside, for tests: what the environment variable FAULTS says, in JSON.

    nan_gradient   [[rank, step], ...]: that rank's gradient is NaN, its loss is not
    poisoned_row   a row of ids: any batch that holds it has a NaN loss
    spike          [step, ...]: the loss and its gradient are 100 times as large
    tampered       [step, place, row_id]: rank 0's loader takes another row of the corpus at that place of that step

Each rank appends what its own guard decided to RUN/decisions-RANK.jsonl.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from electra_dist.data.loader import RowLoader
from electra_dist.objectives.base import StepInput, StepOutput, Sums
from electra_dist.objectives.rtd import ReplacedTokenDetection
from electra_dist.train.skip_list import SkipList
from launcher.pretrain import main

FAULTS: dict[str, Any] = json.loads(os.environ["FAULTS"])
RANK = int(os.environ.get("RANK", "0"))


class NanGradient(torch.autograd.Function):
    """The identity, whose gradient is NaN."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * torch.nan


def factors(of_losses: float) -> torch.Tensor:
    """One factor for each sum: `of_losses` for the losses, 1 for the counts."""
    return torch.tensor([of_losses if "loss" in name else 1.0 for name in Sums._fields])


def with_faults(forward: Any) -> Any:
    def faulty(self: Any, given: StepInput) -> StepOutput:
        out = forward(self, given)
        if not self.training:
            return out
        if [RANK, given.step] in FAULTS.get("nan_gradient", []):
            out = out._replace(loss=NanGradient.apply(out.loss))
        if given.step in FAULTS.get("spike", []):
            out = out._replace(loss=out.loss * 100.0, sums=out.sums * factors(100.0))
        if "poisoned_row" in FAULTS and (given.ids_BS == torch.tensor(FAULTS["poisoned_row"])).all(1).any():
            out = out._replace(loss=out.loss * torch.nan, sums=out.sums * factors(torch.nan))
        return out

    return faulty


def with_tampering(read: Any) -> Any:
    def tampered(self: RowLoader, step: int) -> Any:
        if "tampered" in FAULTS and FAULTS["tampered"][0] == step and RANK == 0:
            _, place, row_id = FAULTS["tampered"]
            self._locate(step)
            ends = np.cumsum([s.rows for s in self._cache.manifest.shards])
            shard = int(np.searchsorted(ends, row_id, side="right"))
            number = step % len(self._located[0])
            self._located[0][number, place] = shard
            self._located[1][number, place] = row_id - ends[shard] + self._cache.manifest.shards[shard].rows
        return read(self, step)

    return tampered


def with_diary(method: Any) -> Any:
    def noted(self: SkipList, step: int) -> None:
        method(self, step)
        with (self._file.parent / f"decisions-{RANK}.jsonl").open("a") as file:
            file.write(json.dumps([method.__name__, step]) + "\n")

    return noted


ReplacedTokenDetection.forward = with_faults(ReplacedTokenDetection.forward)  # type: ignore[method-assign]
RowLoader._read = with_tampering(RowLoader._read)  # type: ignore[method-assign]
SkipList.stop = with_diary(SkipList.stop)  # type: ignore[method-assign]
SkipList.roll_back = with_diary(SkipList.roll_back)  # type: ignore[method-assign]

if __name__ == "__main__":
    sys.exit(main())
