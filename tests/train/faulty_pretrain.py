"""Runs launcher/pretrain.py with injected faults, which the environment variable FAULTS describes as JSON:

    nan_gradient   [[rank, step], ...]: that rank's gradient is NaN while its loss is finite
    poisoned_row   a row of ids: any batch that holds it has a NaN loss
    spike          [step, ...]: the loss and its gradient are multiplied by 100
    nan_outputs    number: so many of the discriminator's outputs of a batch are NaN in evaluations
    tampered       [step, place, row_id]: rank 0's loader reads the corpus row `row_id` at that place of that step
    signal_at      [signal, step]: the process gets the signal while it computes that step for the first time
    created_at     [path, step]: the file is created while the process computes that step for the first time
    shell_at       [[command, step], ...]: rank 0 runs a shell command while it computes that step for the first time
    pause_s        the pause after a start that has lost its storage
    killed_with_streak  number: the process gets SIGKILL when so many steps in a row are recorded as stopped

Each rank appends the decisions of its guard to RUN/decisions-RANK.jsonl.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from electra_launcher.pretrain import main

from electra_dist.data.loader import RowLoader
from electra_dist.objectives.base import StepInput, StepOutput, Sums
from electra_dist.objectives.rtd import ReplacedTokenDetection
from electra_dist.train import run
from electra_dist.train.guard import SkipList

FAULTS: dict[str, Any] = json.loads(os.environ["FAULTS"])
RANK = int(os.environ.get("RANK", "0"))


class NanGradient(torch.autograd.Function):
    """Identity function whose gradient is NaN."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * torch.nan


def sum_factors(loss_factor: float) -> torch.Tensor:
    """Return one factor for each field of Sums: `loss_factor` for the losses, 1 for the counts."""
    return torch.tensor([loss_factor if "loss" in name else 1.0 for name in Sums._fields])


def with_faults(forward: Any) -> Any:
    """Return `forward` with the faults `nan_gradient`, `spike` and `poisoned_row`."""

    def faulty(self: Any, step_input: StepInput) -> StepOutput:
        out = forward(self, step_input)
        if not self.training:
            out.rtd_logit_BS[:, : FAULTS.get("nan_outputs", 0)] = torch.nan
            return out
        if FAULTS.get("signal_at", [0, -1])[1] == step_input.step:
            os.kill(os.getpid(), FAULTS.pop("signal_at")[0])
        if FAULTS.get("created_at", ["", -1])[1] == step_input.step:
            Path(FAULTS.pop("created_at")[0]).touch()
        for command, step in list(FAULTS.get("shell_at", [])):
            if step == step_input.step and RANK == 0:
                FAULTS["shell_at"].remove([command, step])
                subprocess.run(command, shell=True, check=True)
        if [RANK, step_input.step] in FAULTS.get("nan_gradient", []):
            out = out._replace(loss=NanGradient.apply(out.loss))
        if step_input.step in FAULTS.get("spike", []):
            out = out._replace(loss=out.loss * 100.0, sums=out.sums * sum_factors(100.0))
        if "poisoned_row" in FAULTS:
            is_poisoned = (step_input.ids_BS == torch.tensor(FAULTS["poisoned_row"])).all(1)
            if is_poisoned.any():
                out = out._replace(loss=out.loss * torch.nan, sums=out.sums * sum_factors(torch.nan))
        return out

    return faulty


def with_tampering(read: Any) -> Any:
    """Return the loader's `read` with the fault `tampered`."""

    def tampered(self: RowLoader, step: int) -> Any:
        if "tampered" in FAULTS and FAULTS["tampered"][0] == step and RANK == 0:
            _, place, row_id = FAULTS["tampered"]
            self._locate(step)
            ends = np.cumsum([s.entry.rows for s in self._cache.corpora.shards])
            shard = int(np.searchsorted(ends, row_id, side="right"))
            number = step % len(self._located[0])
            self._located[0][number, place] = shard
            self._located[1][number, place] = row_id - ends[shard] + self._cache.corpora.shards[shard].entry.rows
        return read(self, step)

    return tampered


def with_diary(method: Any) -> Any:
    """Return a method of SkipList that also appends its name and the skipped steps to this rank's decisions."""

    def recorded(self: SkipList, argument: Any) -> Any:
        result = method(self, argument)
        with (self._file.parent / f"decisions-{RANK}.jsonl").open("a") as file:
            file.write(json.dumps([method.__name__, sorted(self.steps)]) + "\n")
        return result

    return recorded


def with_kill(write: Any) -> Any:
    """Return the skip list's `write` with the fault `killed_with_streak`."""

    def killed(self: SkipList) -> None:
        write(self)
        if len(self.streak) == FAULTS.get("killed_with_streak"):
            os.kill(os.getpid(), signal.SIGKILL)

    return killed


ReplacedTokenDetection.forward = with_faults(ReplacedTokenDetection.forward)  # type: ignore[method-assign]
RowLoader._read = with_tampering(RowLoader._read)  # type: ignore[method-assign]
SkipList.write = with_kill(SkipList.write)  # type: ignore[method-assign]
SkipList.stop = with_diary(SkipList.stop)  # type: ignore[method-assign]
SkipList.roll_back = with_diary(SkipList.roll_back)  # type: ignore[method-assign]

run.PAUSE_S = FAULTS.get("pause_s", run.PAUSE_S)

if __name__ == "__main__":
    sys.exit(main())
