"""Two steps launch the same work with the same arguments, as a CUDA graph would need: only tensors differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import rehearsal
from support.rehearsal_cases import CASES
from support.torch_versions import needs_products_on_meta
from torch.utils._pytree import tree_map_only

from electra_dist.objectives.rtd import ReplacedTokenDetection


def _work(name: str, step: int) -> list[Any]:
    """Return what a micro-batch of a step calls and launches, with shapes in place of tensors."""
    config = CASES[f"{name} evaluation, 2 layers"].config()
    work: list[Any] = []
    check = rehearsal._checked_launch

    class Arguments(rehearsal.Rehearsal):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            work.append((str(func), tree_map_only(torch.Tensor, lambda tensor: tensor.shape, (args, kwargs))))
            return super().__torch_dispatch__(func, types, args, kwargs)

    def record(kernel: Any, args: tuple[Any, ...], grid: Any, options: dict[str, Any]) -> rehearsal.Launch:
        launch = check(kernel, args, grid, options)
        work.append((launch.grid, tree_map_only(torch.Tensor, lambda tensor: tensor.shape, (args, options))))
        return launch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rehearsal, "Rehearsal", Arguments)
        patch.setattr(rehearsal, "_checked_launch", record)
        module = rehearsal.build(config)
        step_input = rehearsal.step_input(config, module, 8, step)
        rehearsal.rehearse(module, lambda: step_input)
    return work


@needs_products_on_meta
@pytest.mark.parametrize("name", ["rtd", "rtd reference", "replace_mlm", "electric", "adversarial", "unigram"])
def test_a_forward_and_backward_pass_is_the_same_work_in_every_step(name: str) -> None:
    _work(name, 1)  # what a process tries once and remembers
    assert _work(name, 3) == _work(name, 77_777)


@needs_products_on_meta
def test_a_number_of_the_step_in_an_operator_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    def weights_of_step(self: Any, batch: Any, corruption: Any) -> torch.Tensor:
        weight_BS: torch.Tensor = batch.layout.is_real_BS * batch.step
        return weight_BS

    monkeypatch.setattr(ReplacedTokenDetection, "detection_weights", weights_of_step)
    assert _work("rtd", 3) != _work("rtd", 77_777)
