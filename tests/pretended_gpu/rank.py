"""Run pretraining as one rank on the pretended GPU, and write what its last step did to a file of JSON.

    python tests/pretended_gpu/rank.py COUNTS.json LAST_STEP --config CONFIG ...

`drill.py` sets the environment, which puts the pretended libraries before CUDA's. The counts are of the step's last
micro-batch, from the end of the one before it to the end of its backward pass, and of the update after it. The process
ends there, because a checkpoint of numbers that no kernel has computed is useless.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from electra_launcher import pretrain

from electra_dist.engine import engine
from electra_dist.model import attention_choice

COUNTS = Path(sys.argv[1])
LAST_STEP = int(sys.argv[2])

_library = ctypes.CDLL(None)
_counted: dict[str, Any] = {}
_steps = 0


def take_counts() -> list[dict[str, Any]]:
    """Return what the pretended libraries have counted since the last call."""
    with tempfile.NamedTemporaryFile() as file:
        _library.pretended_write(file.name.encode())
        lines = Path(file.name).read_text(encoding="utf-8").splitlines()
    counts = []
    for line in lines:
        kind, name, events, num_bytes = line.split("\t")
        counts.append({"kind": kind, "name": name, "events": int(events), "bytes": int(num_bytes)})
    return counts


def backward(self: engine.Engine, loss: torch.Tensor) -> None:
    """Take the place of `Engine.backward`, whose end is the end of a micro-batch."""
    _backward(self, loss)
    _counted["micro_batch"] = take_counts()


def step(self: engine.Engine, *arguments: Any, **options: Any) -> tuple[float, bool]:
    """Take the place of `Engine.step`; after the last step write the counts and end the process."""
    global _steps
    result = _step(self, *arguments, **options)
    _steps += 1
    _counted["update"] = take_counts()
    if _steps == LAST_STEP:
        _counted["attention"] = self.module.attention.name
        _counted["peak_bytes"] = torch.cuda.max_memory_allocated()
        _counted["reserved_bytes"] = torch.cuda.max_memory_reserved()
        COUNTS.write_text(json.dumps(_counted), encoding="utf-8")
        os._exit(0)
    return result


def to_host(tensors: Any) -> list[list[Any]]:
    """Take the place of `engine._to_host`: read as it does, and return losses of 1 and no requests to stop."""
    return [[1.0 if isinstance(value, float) else 0 for value in values] for values in _to_host(tensors)]


def find_trial_fault(*arguments: Any) -> str:
    """Take the place of the attention trial: run it, and do not judge the dropout, which no kernel applies."""
    fault = _find_trial_fault(*arguments)
    return "" if fault.startswith("its dropout") else fault


_backward, _step, _to_host = engine.Engine.backward, engine.Engine.step, engine._to_host
_find_trial_fault = attention_choice.find_trial_fault
engine.Engine.backward = backward  # type: ignore[method-assign]
engine.Engine.step = step  # type: ignore[method-assign]
engine._to_host = to_host
attention_choice.find_trial_fault = find_trial_fault

if __name__ == "__main__":
    sys.exit(pretrain.main(sys.argv[3:]))
