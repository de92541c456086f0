"""Layers under torch.compile: a graph for each tower, no break, nothing compiled again at a new step; eager's sums."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from electra_kernels import compiled_dropout
from torch._dynamo.utils import counters

from electra_dist.config import EngineConfig, ModelConfig, ObjectiveConfig, TowerConfig
from electra_dist.model.compile_layers import compile_layers
from electra_dist.model.row_layout import SpecialIds
from electra_dist.objectives.base import StepInput, loss_counts
from electra_dist.objectives.build_objective import build_objective

SPECIAL = SpecialIds(pad=0, unk=1, cls=2, sep=3, mask=4)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def objective(**model: Any) -> Any:
    towers = {
        "discriminator": TowerConfig(hidden_size=32, num_layers=3, num_heads=2, intermediate_size=64),
        "generator": TowerConfig(hidden_size=16, num_layers=3, num_heads=1, intermediate_size=32),
    }
    sizes = {"vocab_size": 300, "embedding_size": 32, "max_positions": 64}
    return build_objective(ModelConfig(**sizes, **towers, **model), ObjectiveConfig(), SPECIAL, 3)


def losses_and_gradients(module: Any, ids: torch.Tensor, steps: range) -> list[torch.Tensor]:
    found = []
    for step in steps:
        torch.manual_seed(step)  # dropout on embeddings
        scales = 1.0 / loss_counts(ids, SPECIAL, module.objective).sum(0)
        module.zero_grad()
        rows = torch.arange(len(ids)) + 100 * step
        loss = module(StepInput(ids, rows, step, 7, *scales)).loss
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in module.parameters())]
    return found


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("precision", ["fp32", "autocast", "bf16"])
def test_no_graph_breaks_and_a_step_compiles_nothing_again(
    make_ids: Callable[..., torch.Tensor], dropout: float, precision: str
) -> None:
    ids = make_ids([64, 50, 64, 33], seq_len=64)
    eager, compiled = (objective(hidden_dropout=dropout, attention_dropout=dropout).train() for _ in range(2))
    if precision == "bf16":
        eager, compiled = eager.bfloat16(), compiled.bfloat16()
    compile_layers(compiled, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        expected = losses_and_gradients(eager, ids, range(4))
        found = losses_and_gradients(compiled, ids, range(1))
        with torch._dynamo.config.patch(error_on_recompile=True):
            found += losses_and_gradients(compiled, ids, range(1, 4))
    assert not counters["graph_break"]
    # A tower each; under autocast a tower's first layer may read fp32 embeddings, and the others bf16.
    assert counters["stats"]["unique_graphs"] == (3 if precision == "autocast" else 2)
    tolerance = 2e-5 if precision == "fp32" else 3e-2
    for a, b in zip(found, expected):
        assert (a - b).abs().max() <= tolerance * max(1.0, b.abs().max().item())


def test_the_operators_keep_torchs_rules() -> None:
    """Torch's own checks of custom operators: schema, no aliasing, shapes told without data, gradients under AOT."""
    x, residual = (torch.randn(2, 8, 16, requires_grad=True) for _ in range(2))
    weight, bias = (torch.randn(16, requires_grad=True) for _ in range(2))
    key, rows = torch.tensor([2**62, 5, 1]), torch.tensor([3, 9])
    for probability in (0.0, 0.3):
        how = (rows, key, 1, probability, 1e-12, "reference")
        torch.library.opcheck(compiled_dropout.dropout_add_norm, (x, residual, weight, bias, *how))
        exact = [each.detach().double().requires_grad_() for each in (x, residual, weight, bias)]
        normed = functools.partial(lambda how, *four: compiled_dropout.dropout_add_norm(*four, *how)[0], how)
        torch.autograd.gradcheck(normed, exact)
    torch.library.opcheck(compiled_dropout.keep_attention, (key, rows, 64, 0.3))


def test_compiled_layers_need_whole_parameters() -> None:
    with pytest.raises(ValueError, match="zero_stage 3"):
        EngineConfig(compile=True, zero_stage=3)
