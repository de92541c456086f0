"""Options that keep fewer activations for the backward pass: they keep fewer bytes and give the same gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from electra_kernels.operation_types import SpecialIds

from electra_dist.config import ModelConfig, ObjectiveConfig, TowerConfig
from electra_dist.model.encoder import Encoder
from electra_dist.objectives.base import StepInput
from electra_dist.objectives.build_objective import build_objective

SPECIAL = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
STEP = 5
SEED = 3


class SavedBytes:
    """Counter of the bytes that autograd holds for a backward pass, through hooks on saved tensors."""

    def __init__(self) -> None:
        self.bytes = 0

    def counting(self) -> Any:
        """A context in which every tensor that autograd saves is counted until it is freed."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> Any:
        return _SavedTensor(self, tensor)

    @staticmethod
    def _unpack(saved: Any) -> torch.Tensor:
        return saved.tensor


class _SavedTensor:
    """A tensor that autograd holds; it is subtracted from the counter when autograd frees it."""

    def __init__(self, counter: SavedBytes, tensor: torch.Tensor) -> None:
        self.counter = counter
        self.tensor = tensor
        self.size = tensor.numel() * tensor.element_size()
        counter.bytes += self.size

    def __del__(self) -> None:
        self.counter.bytes -= self.size


def small_objective(name: Any = "rtd", **model_fields: Any) -> Any:
    """An objective over two small towers."""
    model = ModelConfig(
        vocab_size=300,
        embedding_size=32,
        max_positions=64,
        discriminator=TowerConfig(hidden_size=32, num_layers=2, num_heads=2, intermediate_size=64),
        generator=TowerConfig(hidden_size=16, num_layers=2, num_heads=1, intermediate_size=32),
        **model_fields,
    )
    return build_objective(model, ObjectiveConfig(name=name), SPECIAL, 3)


def loss_and_gradients(module: Any, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of one step over `ids`, and the gradients of twice the loss by parameter name."""
    module.zero_grad()
    scales = 1.0 / module.loss_counts(ids).sum(0)
    out = module(StepInput(ids, torch.arange(len(ids)), STEP, SEED, *scales))
    (2.0 * out.loss).backward()
    return out.loss.detach(), {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


@pytest.fixture
def ids(make_ids: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Four rows of 64 ids; two of them end with padding."""
    return make_ids([64, 50, 64, 33], seq_len=64)


def test_recomputed_layers_give_gradients_equal_bit_for_bit_and_hold_less_than_half_the_bytes(
    ids: torch.Tensor,
) -> None:
    module = small_objective()
    recomputing_module = copy.deepcopy(module)
    for submodule in recomputing_module.modules():
        if isinstance(submodule, Encoder):
            submodule.recompute = True

    _, gradients = loss_and_gradients(module, ids)
    _, recomputed_gradients = loss_and_gradients(recomputing_module, ids)
    saved = SavedBytes()
    bytes_after_discriminator: list[int] = []
    for measured_module in (module, recomputing_module):
        measured_module.towers.discriminator.register_forward_hook(
            lambda *_: bytes_after_discriminator.append(saved.bytes)
        )
        with saved.counting():
            loss_and_gradients(measured_module, ids)

    for name, gradient in gradients.items():
        assert torch.equal(recomputed_gradients[name], gradient), name
    plain_bytes, recomputing_bytes = bytes_after_discriminator
    assert recomputing_bytes < 0.5 * plain_bytes
