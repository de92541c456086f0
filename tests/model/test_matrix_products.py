"""bf16 products on a CPU without bf16 units, against float64 products of the same bf16 numbers."""

import contextlib
import runpy
import types

import pytest
import torch

from electra_dist.model import fused_layer as linear_module
from electra_dist.model.fused_layer import GradientSum, Linear, weight_gradient

BF16_ROUNDING = 2.0**-8


@pytest.fixture(autouse=True)
def _without_bf16_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_module, "HAS_BF16_PRODUCTS", False)


@pytest.mark.parametrize("how", ["bf16 parameters", "autocast"])
def test_products_and_gradients_are_those_of_the_rounded_operands(how: str) -> None:
    """Within a rounding of the result for each value: a sum in bf16 would be off by many."""
    torch.manual_seed(0)
    layer, x, upstream = Linear(256, 96), torch.randn(4, 50, 256), torch.randn(4, 50, 96).bfloat16()
    if how == "bf16 parameters":
        layer, x = layer.bfloat16(), x.bfloat16()
    x.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16) if how == "autocast" else contextlib.nullcontext():
        out = layer(x)
    out.backward(upstream)
    assert out.dtype == torch.bfloat16
    assert layer.weight.grad.dtype == layer.weight.dtype
    exact = [each.detach().bfloat16().double().requires_grad_() for each in (x, layer.weight, layer.bias)]
    expected = torch.nn.functional.linear(*exact)
    expected.backward(upstream.double())
    pairs = [(out, expected)] + [(a.grad, b.grad) for a, b in zip((x, layer.weight, layer.bias), exact)]
    for found, right in pairs:
        error = (found.double() - right).abs() / (right.abs() + 1e-2 * right.abs().max())
        assert error.max() <= BF16_ROUNDING


def test_other_precisions_are_torchs_own() -> None:
    layer, x = Linear(16, 8), torch.randn(3, 16)
    assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))
    assert torch.equal(layer.double()(x.double()), torch.nn.functional.linear(x.double(), layer.weight, layer.bias))


def test_a_torch_without_onednn_has_no_bf16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module is imported all the same; such builds of torch lack the operator that tells."""
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(torch.ops, "mkldnn", types.SimpleNamespace())
    assert runpy.run_path(linear_module.__file__)["HAS_BF16_PRODUCTS"] is False


def test_a_product_is_added_to_a_sum_as_float64_has_it_and_a_rounded_gradient_is_not() -> None:
    generator = torch.Generator().manual_seed(1)
    grad_TO = torch.randn(64, 8, generator=generator).bfloat16()
    x_TI = torch.randn(64, 12, generator=generator).bfloat16()
    counts: list[int] = []
    total_OI = torch.zeros(8, 12)
    for _ in range(2):
        assert weight_gradient(grad_TO, x_TI, GradientSum(total_OI, lambda: counts.append(1))) is None
    exact_OI = 2 * (grad_TO.double().t() @ x_TI.double())
    rounded_OI = weight_gradient(grad_TO, x_TI)
    assert rounded_OI is not None
    assert len(counts) == 2
    assert (total_OI - exact_OI).abs().max() < 1e-4
    assert (2 * rounded_OI.double() - exact_OI).abs().max() > 1e-3


@pytest.mark.parametrize("is_trained", [True, False])
def test_a_layer_with_a_sum_gives_autograd_the_other_gradients(is_trained: bool) -> None:
    torch.manual_seed(2)
    plain, summed = Linear(12, 8), Linear(12, 8)
    summed.load_state_dict(plain.state_dict())
    total_OI = torch.zeros(8, 12)
    summed.weight.gradient_sum = GradientSum(total_OI, lambda: None)  # type: ignore[assignment]
    summed.weight.requires_grad_(is_trained)
    x = torch.randn(2, 5, 12)
    grads = []
    for layer in (plain, summed):
        leaf = x.clone().requires_grad_()
        out = layer(leaf)
        out.square().sum().backward()
        grads.append((out, leaf.grad, layer.bias.grad))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*grads, strict=True))
    assert summed.weight.grad is None
    assert torch.allclose(total_OI, plain.weight.grad if is_trained else torch.zeros(8, 12), atol=1e-5)
