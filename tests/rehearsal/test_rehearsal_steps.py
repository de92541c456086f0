"""What the host passes to a GPU does not change from step to step, so that a CUDA graph could repeat a micro-batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.rehearsal import META, build, gpu_branch, step_input
from support.rehearsal_cases import CASES
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

STEPS = (12, 400_001)  # both in the second stage of two-stage training
OBJECTIVES = ("rtd", "rtd reference", "mlm", "electric", "uniform", "unigram", "adversarial", "two_stage second")
CASE_NAMES = (*[f"{name} fp32, 2 layers" for name in OBJECTIVES], "rtd bf16 scheduled")


class Numbers(TorchDispatchMode):
    """Dispatch mode that records the Python numbers among the arguments of every operator on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded: list[tuple[str, list[Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and record the numbers that it was called with."""
        leaves = tree_leaves((args, kwargs or {}))
        if any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in leaves) or META in leaves:
            self.recorded.append((str(func), [leaf for leaf in leaves if isinstance(leaf, int | float)]))
        return func(*args, **(kwargs or {}))


def numbers_of(module: Any, config: Any, step: int) -> tuple[list[Any], list[Any]]:
    """Return the numbers passed to operators, and those passed to Triton's kernels, in a micro-batch of a step."""
    given = step_input(config, module, rows=2, step=step)
    with gpu_branch() as launches, Numbers() as numbers:
        module(given).loss.backward()
    module.zero_grad()
    words = [(launch.kernel, launch.grid, launch.words) for launch in launches]
    return numbers.recorded, words


@pytest.mark.parametrize("name", CASE_NAMES)
def test_no_number_that_the_host_passes_depends_on_the_step(name: str) -> None:
    config = CASES[name].config()
    module = build(config)
    numbers_of(module, config, STEPS[0])  # what a process makes once, it makes now
    first, second = (numbers_of(module, config, step) for step in STEPS)
    assert first[0] == second[0]
    assert first[1] == second[1]
