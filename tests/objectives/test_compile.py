"""Layers under torch.compile: one graph for each tower, no graph break, no recompilation, and eager's numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from electra_kernels.keyed_dropout import keep_attention
from electra_kernels.layer_passes import dropout_add_norm
from electra_kernels.operation_types import SpecialIds
from torch._dynamo.utils import counters

from electra_dist.config import ModelConfig, ObjectiveConfig, TowerConfig
from electra_dist.model.encoder import compile_layers
from electra_dist.objectives.base import StepInput
from electra_dist.objectives.build_objective import build_objective

SPECIAL = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)
SEED = 7


@pytest.fixture(autouse=True)
def _no_compiled_graphs() -> Iterator[None]:
    """Dynamo without graphs or counters of other tests."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def small_objective(dropout: float) -> Any:
    """Replaced-token detection over two towers of three layers, in training mode."""
    model = ModelConfig(
        vocab_size=300,
        embedding_size=32,
        max_positions=64,
        discriminator=TowerConfig(hidden_size=32, num_layers=3, num_heads=2, intermediate_size=64),
        generator=TowerConfig(hidden_size=16, num_layers=3, num_heads=1, intermediate_size=32),
        hidden_dropout=dropout,
        attention_dropout=dropout,
    )
    return build_objective(model, ObjectiveConfig(), SPECIAL, 3).train()


def losses_and_gradients(module: Any, ids: torch.Tensor, steps: range) -> list[torch.Tensor]:
    """The loss and then every parameter's gradient of each step, one step after the other."""
    results = []
    for step in steps:
        scales = 1.0 / module.loss_counts(ids).sum(0)
        rows = torch.arange(len(ids)) + 100 * step
        module.zero_grad()
        loss = module(StepInput(ids, rows, step, SEED, *scales)).loss
        loss.backward()
        results.append(loss.detach())
        for parameter in module.parameters():
            results.append(parameter.grad.clone())
    return results


@pytest.mark.parametrize(
    ("precision", "dropout"),
    [
        ("fp32", 0.0),
        pytest.param("fp32", 0.1, marks=pytest.mark.drill),
        pytest.param("autocast", 0.0, marks=pytest.mark.drill),
        ("autocast", 0.1),
        pytest.param("bf16", 0.0, marks=pytest.mark.drill),
        ("bf16", 0.1),
    ],
)
def test_compiled_layers_match_eager_without_graph_breaks_or_recompilation(
    make_ids: Callable[..., torch.Tensor], dropout: float, precision: str
) -> None:
    ids = make_ids([64, 50, 64, 33], seq_len=64)
    eager = small_objective(dropout)
    compiled = small_objective(dropout)
    if precision == "bf16":
        eager = eager.bfloat16()
        compiled = compiled.bfloat16()
    compile_layers(compiled, backend="aot_eager")

    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        expected = losses_and_gradients(eager, ids, range(4))
        results = losses_and_gradients(compiled, ids, range(1))
        with torch._dynamo.config.patch(error_on_recompile=True):
            results += losses_and_gradients(compiled, ids, range(1, 4))

    assert not counters["graph_break"]
    # One graph for each tower. Under autocast a tower's first layer may read fp32 embeddings, and the others bf16.
    expected_graphs = 3 if precision == "autocast" else 2
    assert counters["stats"]["unique_graphs"] == expected_graphs
    tolerance = 2e-5 if precision == "fp32" else 3e-2
    assert len(results) == len(expected)
    for tensor, expected_tensor in zip(results, expected, strict=True):
        largest_error = (tensor - expected_tensor).abs().max()
        assert largest_error <= tolerance * max(1.0, expected_tensor.abs().max().item())


def test_custom_operators_of_dropout_pass_torchs_own_checks() -> None:
    """torch.library.opcheck tests schema, aliasing, shapes without data, and gradients under AOTAutograd."""
    x, residual = (torch.randn(2, 8, 16, requires_grad=True) for _ in range(2))
    weight, bias = (torch.randn(16, requires_grad=True) for _ in range(2))
    tensors = (x, residual, weight, bias)
    key = torch.tensor([2**62, 5, 1])  # seed, step, number of the layer
    rows = torch.tensor([3, 9])

    for probability in (0.0, 0.3):
        site = 1
        eps = 1e-12
        options = (rows, key, site, probability, eps, "reference")

        def normed(*leaves: torch.Tensor, options: tuple = options) -> torch.Tensor:
            return dropout_add_norm(*leaves, *options)[0]

        torch.library.opcheck(dropout_add_norm, (*tensors, *options))
        float64_leaves = [tensor.detach().double().requires_grad_() for tensor in tensors]
        torch.autograd.gradcheck(normed, float64_leaves)
    torch.library.opcheck(keep_attention, (key, rows, 64, 0.3))
