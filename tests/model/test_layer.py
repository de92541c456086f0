"""A layer's two autograd functions against its composition of separate operations, which is their definition."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from electra_kernels.operation_types import LayerDropout
from support.rehearsal import gpu_branch

from electra_dist.model import fused_layer
from electra_dist.model.attention import SdpaMask
from electra_dist.model.encoder import DropoutKeys, EncoderLayer
from electra_dist.model.fused_layer import input_gradient, weight_gradient

ROWS, TOKENS, WIDTH = 3, 10, 32
SEED, STEP = 2**40 + 7, 5


def keys_of_layer(row_B: torch.Tensor, number: int = 1) -> LayerDropout:
    return DropoutKeys(SEED, STEP, row_B, "reference").of_layers(number + 1)[number]


def results(layer: EncoderLayer, run: Callable[..., torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The output of a layer, and the gradients of its input and of all parameters."""
    generator = torch.Generator().manual_seed(4)
    hidden_TH = torch.randn(ROWS * TOKENS, WIDTH, generator=generator).to(dtype).requires_grad_()
    upstream_TH = torch.randn(ROWS * TOKENS, WIDTH, generator=generator)
    mask = torch.zeros(ROWS, 1, TOKENS, TOKENS, dtype=dtype)
    mask[1, :, :, 6:] = -torch.inf
    layer.zero_grad()
    out_TH = run(hidden_TH, SdpaMask(mask), keys_of_layer(torch.tensor([7, 2**32 - 1, 0])))
    out_TH.backward(upstream_TH.to(out_TH.dtype))
    gradients = {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}
    return {"out": out_TH.detach(), "input": hidden_TH.grad, **gradients}


@pytest.fixture(params=[0.0, 0.3], ids=["no dropout", "dropout"])
def layer(request: pytest.FixtureRequest, make_config: Callable[..., Any]) -> EncoderLayer:
    """A layer in training mode; its norms and biases are not those at initialisation, which are 1 and 0."""
    model = make_config(32, WIDTH, 32, hidden_dropout=request.param, attention_dropout=request.param)
    torch.manual_seed(1)
    layer = EncoderLayer(model, model.discriminator).train()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, mean=0.1, std=0.3)
    return layer


def test_in_float64_values_and_gradients_are_those_of_the_composition(layer: EncoderLayer) -> None:
    layer = layer.double()
    expected = results(layer, layer.compose, torch.float64)
    found = results(layer, layer, torch.float64)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-10, atol=1e-11, msg=name)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "autocast", "emulated bf16", "emulated autocast"])
def test_gradients_are_no_further_from_float64_than_the_compositions(
    precision: str, layer: EncoderLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative errors are summed over all tensors, because the two round in different places."""
    monkeypatch.setattr(fused_layer, "HAS_BF16_PRODUCTS", "emulated" not in precision)
    dtype = torch.float32
    context: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if "autocast" in precision:
        context = torch.autocast("cpu", torch.bfloat16)
    elif "bf16" in precision:
        layer = layer.bfloat16()
        dtype = torch.bfloat16
    with context:
        by_composition = results(layer, layer.compose, dtype)
        found = results(layer, layer, dtype)
    exact = results(layer.double(), layer.compose, torch.float64)
    errors = {"function": 0.0, "composition": 0.0}
    for name, tensor in found.items():
        assert tensor.dtype == by_composition[name].dtype, name
        scale = exact[name].norm().item()
        errors["function"] += (tensor.double() - exact[name]).norm().item() / scale
        errors["composition"] += (by_composition[name].double() - exact[name]).norm().item() / scale
    assert errors["function"] <= 1.05 * errors["composition"]


def test_evaluation_without_gradients_gives_the_values_of_the_composition(layer: EncoderLayer) -> None:
    layer = layer.double().eval()
    hidden_TH = torch.randn(ROWS * TOKENS, WIDTH, dtype=torch.float64)
    mask = SdpaMask(torch.zeros(ROWS, 1, TOKENS, TOKENS, dtype=torch.float64))
    keys = keys_of_layer(torch.arange(ROWS))
    with torch.no_grad():
        torch.testing.assert_close(layer(hidden_TH, mask, keys), layer.compose(hidden_TH, mask, keys))


def test_a_second_backward_pass_is_an_error(layer: EncoderLayer) -> None:
    """The first one overwrites the activations."""
    mask = SdpaMask(torch.zeros(ROWS, 1, TOKENS, TOKENS))
    out_TH = layer(torch.randn(ROWS * TOKENS, WIDTH), mask, keys_of_layer(torch.arange(ROWS)))
    out_TH.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out_TH.sum().backward()


def test_products_of_gradients_are_those_of_float64() -> None:
    grad_TO, weight_OI, other_TI, x_TI = (
        torch.randn(shape, dtype=torch.float64) for shape in [(6, 5), (5, 4), (6, 4), (6, 4)]
    )
    out_TI = torch.empty(6, 4, dtype=torch.float64)
    expected_TI = grad_TO @ weight_OI + other_TI
    sum_TI = input_gradient(grad_TO, weight_OI, other_TI)
    torch.testing.assert_close(sum_TI, expected_TI)
    assert sum_TI is other_TI  # added in place: a GPU would copy the other gradient first
    torch.testing.assert_close(input_gradient(grad_TO, weight_OI, out_TI=out_TI), grad_TO @ weight_OI)
    torch.testing.assert_close(weight_gradient(grad_TO, x_TI), torch.einsum("to,ti->oi", grad_TO, x_TI))


@pytest.fixture
def launched(make_config: Callable[..., Any]) -> Callable[[int], list[Any]]:
    """`launched(step)`: the launches of a layer's forward and backward pass on `meta`."""

    def run(step: int) -> list[Any]:
        model = make_config(32, WIDTH, 32, hidden_dropout=0.1, attention_dropout=0.0)
        with torch.device("meta"):
            layer = EncoderLayer(model, model.discriminator).train()
            hidden_TH = torch.empty(ROWS * TOKENS, WIDTH, requires_grad=True)
            mask = SdpaMask(torch.empty(ROWS, 1, TOKENS, TOKENS))
            row_B = torch.empty(ROWS, dtype=torch.int64)
        with gpu_branch() as launches:
            keys = DropoutKeys(SEED, step, row_B, "auto").of_layers(2)[1]
            layer(hidden_TH, mask, keys).sum().backward()
        return launches

    return run


def test_launches_have_no_argument_that_changes_with_the_step(launched: Callable[[int], list[Any]]) -> None:
    """Triton would compile a kernel again for another value of some arguments."""
    first, later = launched(3), launched(2**31 + 9)
    assert [launch.kernel for launch in first].count("norm_backward_kernel") == 2
    assert first == later
    for launch in first:
        if launch.kernel.startswith("norm"):
            assert launch.tensors["key_ptr"] == (3,)


@pytest.fixture(autouse=True)
def _deterministic_inputs() -> None:
    torch.manual_seed(2)
