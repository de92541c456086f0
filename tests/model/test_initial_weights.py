"""A model's start: what it depends on, and how its weights are distributed."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from electra_dist.config import ModelConfig
from electra_dist.model.towers import build_towers
from electra_dist.objectives.corruption import FrozenGenerator


def built(model: ModelConfig, seed: int) -> dict[str, torch.Tensor]:
    return build_towers(model, seed).state_dict()


def test_start_depends_on_the_seed_and_the_name_only(make_config: Callable[..., Any]) -> None:
    model = make_config(32, 64, 16)
    torch.manual_seed(1)
    first = built(model, 7)
    torch.manual_seed(2)
    again, other, shallow = built(model, 7), built(model, 8), built(make_config(32, 64, 16, layers=1), 7)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embeddings.word.weight"], other["embeddings.word.weight"])
    assert all(torch.equal(tensor, first[name]) for name, tensor in shallow.items())
    layers = [first[f"discriminator.layers.{i}.expand.weight"] for i in range(2)]
    assert not torch.equal(*layers)


def test_distributions(make_config: Callable[..., Any]) -> None:
    model = make_config(64, 128, 32, vocab_size=3000)
    state = built(model, 7)
    for name, tensor in state.items():
        if name.endswith("bias"):
            assert not tensor.any(), name
        elif "norm" in name:
            assert (tensor == 1).all(), name
    for name in ("generator.embeddings_project.weight", "discriminator.embeddings_project.weight",
                 "discriminator_head.out.weight"):  # fmt: skip
        bound = math.sqrt(6 / sum(state[name].shape))
        assert bound * 0.9 < state[name].abs().max() <= bound
    table = state["embeddings.word.weight"]
    assert not table[3000:].any()
    values = table[:3000].flatten().double()
    assert values.abs().max() <= 2 * 0.02 + 1e-8
    # A normal cut at two deviations has 0.8796 of its standard deviation, and 0.7153 of it within one.
    assert values.std().item() == pytest.approx(0.02 * 0.8796, rel=0.005)
    assert (values.abs() < 0.02).double().mean().item() == pytest.approx(0.6827 / 0.9545, abs=0.005)
    assert abs(values.mean().item()) < 2e-4


class OperationsOnMeta(TorchDispatchMode):
    """Records the operations whose first argument is on the device "meta"."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], torch.Tensor) and args[0].device.type == "meta":
            self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_nothing_is_drawn_before_the_initial_weights(make_config: Callable[..., Any]) -> None:
    """To draw on "meta", which gives nothing, torch imports its compiler, which takes most of a second."""
    with OperationsOnMeta() as operations:
        build_towers(make_config(32, 64, 16), 7)
        FrozenGenerator(make_config(32, 64, 16))
    assert operations.names and not operations.names & {"normal_", "uniform_"}
