"""The normal distribution of Triton kernels against float64 and torch."""

import math

import pytest
import torch
import triton
import triton.language as tl
from electra_kernels.triton import arithmetic
from electra_kernels.triton.arithmetic import cdf_and_density, gelu_slope

SIZE = 65536
ULP = 2.0**-23


@triton.jit
def run(x_ptr, cdf_ptr, gelu_ptr, slope_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    x = tl.load(x_ptr + at)
    cdf, density = cdf_and_density(x)
    tl.store(cdf_ptr + at, cdf)
    tl.store(gelu_ptr + at, x * cdf)
    tl.store(slope_ptr + at, gelu_slope(x, cdf, density))


def by_kernel(x):
    """Cdf, GELU and its slope at each of SIZE numbers."""
    results = [torch.empty(SIZE) for _ in range(3)]
    run[(1,)](x, *results, SIZE=SIZE)
    return results


def exact(x):
    x = x.double()
    cdf = torch.special.erfc(-x / math.sqrt(2)) / 2
    density = torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    return [cdf, x * cdf, cdf + x * density]


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_gelu_and_its_slope_are_no_further_from_float64_than_torchs(assert_no_worse, scale):
    x = torch.randn(SIZE) * scale
    _, gelu, slope = by_kernel(x)
    _, exact_gelu, exact_slope = exact(x)

    assert_no_worse([(gelu, torch.nn.functional.gelu(x), exact_gelu)])
    assert_no_worse([(slope, torch.ops.aten.gelu_backward(torch.ones_like(x), x), exact_slope)])


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_errors_of_a_gpus_instructions_change_gelu_by_a_few_roundings(monkeypatch, scale):
    """Reciprocal and power are wrong by random amounts up to those that PTX documents: 1 and 2 units."""

    def wrong_by(ulps, function):
        def wrong(x):
            value = function(x)
            noise = torch.rand(value.handle.data.shape).sub(0.5).mul(2 * ulps * ULP).add(1).numpy()
            value.handle.data = value.handle.data * noise
            return value

        return wrong

    x = torch.randn(SIZE) * scale
    without = by_kernel(x)
    for name, ulps in (("reciprocal", 1), ("power_of_2", 2)):
        monkeypatch.setattr(arithmetic, name, wrong_by(ulps, getattr(arithmetic, name)))
    found = by_kernel(x)

    assert not torch.equal(found[0], without[0])
    for result, truth in zip(found, exact(x)):
        assert (result.double() - truth).abs().max() < 4 * ULP * truth.abs().clamp(min=1).max()


def test_far_below_0_the_cdf_keeps_its_digits():
    x = torch.linspace(-12.5, 0, SIZE)
    cdf, _, _ = by_kernel(x)

    error = (cdf.double() / exact(x)[0] - 1).abs()
    assert error[x > -7].max() < 5e-6
    assert error.max() < 1e-3


def test_the_ends_are_those_of_gelu():
    x = torch.tensor([0.0, -0.0, 1e30, -1e30, 20.0, -20.0, math.nan, 1e-40]).repeat(SIZE // 8)
    cdf, gelu, slope = (result[:8].tolist() for result in by_kernel(x))

    torch.testing.assert_close(cdf, [0.5, 0.5, 1.0, 0.0, 1.0, 0.0, math.nan, 0.5], rtol=0, atol=1e-7, equal_nan=True)
    torch.testing.assert_close(gelu[2:6], [1e30, 0.0, 20.0, 0.0], rtol=1e-6, atol=1e-30)
    torch.testing.assert_close(slope, [0.5, 0.5, 1.0, 0.0, 1.0, 0.0, math.nan, 0.5], rtol=0, atol=1e-7, equal_nan=True)
