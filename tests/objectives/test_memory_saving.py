"""Ways to hold fewer activations: the same gradients, and fewer bytes kept for the backward pass."""

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

STEP, SEED = 5, 3


class KeptBytes:
    """Bytes that autograd keeps for a backward pass, at any moment."""

    def __init__(self) -> None:
        self.bytes = 0

    def pack(self, tensor: torch.Tensor) -> Any:
        return _Counted(self, tensor)

    @staticmethod
    def unpack(counted: Any) -> torch.Tensor:
        return counted.tensor


class _Counted:
    def __init__(self, kept: KeptBytes, tensor: torch.Tensor) -> None:
        self.kept, self.tensor, self.size = kept, tensor, tensor.numel() * tensor.element_size()
        kept.bytes += self.size

    def __del__(self) -> None:
        self.kept.bytes -= self.size


def gradients(module: Any, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    torch.manual_seed(1)  # dropout on embeddings and attention
    module.zero_grad()
    scales = 1.0 / loss_counts(ids, module.special, module.objective).sum(0)
    out = module(StepInput(ids, torch.arange(len(ids)), STEP, SEED, *scales))
    (2.0 * out.loss).backward()
    return out.loss.detach(), {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def build(name: Any = "rtd", **model: Any) -> Any:
    towers = {
        "discriminator": TowerConfig(hidden_size=32, num_layers=2, num_heads=2, intermediate_size=64),
        "generator": TowerConfig(hidden_size=16, num_layers=2, num_heads=1, intermediate_size=32),
    }
    sizes = {"vocab_size": 300, "embedding_size": 32, "max_positions": 64}
    special = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
    return build_objective(ModelConfig(**sizes, **towers, **model), ObjectiveConfig(name=name), special, 3)


@pytest.fixture
def rows(make_ids: Callable[..., torch.Tensor]) -> torch.Tensor:
    return make_ids([64, 50, 64, 33], seq_len=64)


@pytest.mark.parametrize("name", ["rtd", "rtd_masked_only", "replace_mlm", "all_tokens_mlm"])
@pytest.mark.parametrize("sharing", ["embeddings", "none", "gdes"])
def test_gradients_made_early_are_those_made_together(rows: torch.Tensor, name: str, sharing: str) -> None:
    module = build(name, sharing=sharing).double()
    loss, together = gradients(module, rows)
    module.early_generator = True
    early_loss, early = gradients(module, rows)
    assert torch.equal(early_loss, loss)
    assert early.keys() == together.keys()
    for key, gradient in together.items():
        torch.testing.assert_close(early[key], gradient, rtol=1e-12, atol=1e-14, msg=key)


def test_nothing_of_the_generator_is_kept_while_the_discriminator_runs(rows: torch.Tensor) -> None:
    module = build()
    kept, at_start = KeptBytes(), []
    module.towers.discriminator.register_forward_pre_hook(lambda *_: at_start.append(kept.bytes))
    for module.early_generator in (False, True):
        with torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack):
            gradients(module, rows)
    together, early = at_start
    embedding = module.towers.embeddings.word.embedding_dim * rows.numel() * 4
    assert together > 20 * embedding
    assert early < 8 * embedding  # the discriminator's own embeddings


def test_layers_that_compute_their_activations_again_give_the_same_bits(rows: torch.Tensor) -> None:
    module = build()
    _, plain = gradients(module, rows)
    again, kept = copy.deepcopy(module), KeptBytes()
    for encoder in again.modules():
        if isinstance(encoder, Encoder):
            encoder.recompute = True
    _, recomputed = gradients(again, rows)
    for key, gradient in plain.items():
        assert torch.equal(recomputed[key], gradient), key
    at_end = []
    for one in (module, again):
        one.towers.discriminator.register_forward_hook(lambda *_: at_end.append(kept.bytes))
        with torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack):
            gradients(one, rows)
    assert at_end[1] < 0.5 * at_end[0]
