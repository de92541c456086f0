"""Options that keep fewer activations for the backward pass: they keep fewer bytes and give the same gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from electra_dist.config import ModelConfig, ObjectiveConfig, TowerConfig
from electra_dist.model.encoder import Encoder
from electra_dist.model.row_layout import SpecialIds
from electra_dist.objectives.base import StepInput, loss_counts
from electra_dist.objectives.build_objective import build_objective
from electra_dist.objectives.gradients_in_forward import with_gradients_now

SPECIAL = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
STEP = 5
SEED = 3
FP32_BYTES = 4


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
    scales = 1.0 / loss_counts(ids, module.special, module.objective).sum(0)
    out = module(StepInput(ids, torch.arange(len(ids)), STEP, SEED, *scales))
    (2.0 * out.loss).backward()  # an upstream gradient other than 1, which early gradients must include
    return out.loss.detach(), {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


@pytest.fixture
def ids(make_ids: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Four rows of 64 ids; two of them end with padding."""
    return make_ids([64, 50, 64, 33], seq_len=64)


@pytest.mark.parametrize("name", ["rtd", "rtd_masked_only", "replace_mlm", "all_tokens_mlm"])
@pytest.mark.parametrize("sharing", ["embeddings", "none", "gdes"])
def test_early_generator_gives_the_gradients_of_one_backward_pass(ids: torch.Tensor, name: str, sharing: str) -> None:
    """With `early_generator` the generator's backward pass runs before the discriminator's forward pass."""
    module = small_objective(name, sharing=sharing).double()

    loss, gradients = loss_and_gradients(module, ids)
    module.early_generator = True
    early_loss, early_gradients = loss_and_gradients(module, ids)

    assert torch.equal(early_loss, loss)
    assert early_gradients.keys() == gradients.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(early_gradients[key], gradient, rtol=1e-12, atol=1e-14, msg=key)


def test_early_gradients_in_fp16_contain_the_loss_scale_so_that_small_ones_are_not_rounded_to_zero() -> None:
    parameter = torch.ones(2, dtype=torch.float16, requires_grad=True)
    for gradient_scale, expected in [(None, [0.0, 0.0]), (1024.0, [1024 * 2.0**-30, 1024 * 3 * 2.0**-30])]:
        parameter.grad = None
        factors = torch.tensor([2.0**-30, 3 * 2.0**-30])  # fp16 holds nothing below 2**-24
        loss = with_gradients_now((parameter * factors).sum(), [parameter], gradient_scale)
        assert loss.item() == 4 * 2.0**-30
        (loss * 1024.0).backward()
        assert parameter.grad is not None and parameter.grad.tolist() == expected


def test_early_generator_frees_the_generators_activations_before_the_discriminator_runs(ids: torch.Tensor) -> None:
    module = small_objective()
    saved = SavedBytes()
    bytes_at_discriminator: list[int] = []
    module.towers.discriminator.register_forward_pre_hook(lambda *_: bytes_at_discriminator.append(saved.bytes))

    for is_early in (False, True):
        module.early_generator = is_early
        with saved.counting():
            loss_and_gradients(module, ids)

    bytes_together, bytes_early = bytes_at_discriminator
    embedding_bytes = module.towers.embeddings.word.embedding_dim * ids.numel() * FP32_BYTES
    assert bytes_together > 20 * embedding_bytes
    assert bytes_early < 8 * embedding_bytes  # these belong to the discriminator's own embeddings


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
