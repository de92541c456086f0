"""Arithmetic on pairs of fp32 numbers against float64: high + low holds what one fp32 number cannot."""

import math

import numpy as np
import torch
import triton
import triton.language as tl
from electra_kernels.triton.arithmetic import (
    precise_inverse_root,
    precise_log,
    precise_ratio,
    precise_sum,
    scaled_exp,
    two_sum,
)

SIZE = 4096
FP32_ROUNDING = 2.0**-24  # relative error of rounding to the nearest fp32 number
PAIR_ERROR = 2.0**-44  # relative error allowed to a pair, which holds about 48 bits


def pair_of(kernel, *inputs: torch.Tensor, size: int = SIZE) -> tuple[np.ndarray, np.ndarray]:
    """The two outputs of a kernel, high and low part of each result, in float64."""
    high, low = torch.empty(size), torch.empty(size)
    kernel[(1,)](*inputs, high, low, SIZE=SIZE)
    return high.double().numpy(), low.double().numpy()


def test_scaled_exponential_is_within_an_fp32_rounding_and_has_the_right_limits():
    @triton.jit
    def run(x_ptr, scale_ptr, high_ptr, low_ptr, SIZE: tl.constexpr):
        at = tl.arange(0, SIZE)
        high, low = scaled_exp(tl.load(x_ptr + at), None, tl.load(scale_ptr + at), None)
        tl.store(high_ptr + at, high)
        tl.store(low_ptr + at, low)

    x = torch.rand(SIZE) * -86  # exp(x) is a normal fp32 number
    scale = torch.rand(SIZE) + 0.5
    high, low = pair_of(run, x, scale)
    exact = np.exp(x.double().numpy()) * scale.double().numpy()
    # The rest of the reduced argument and the product with the scale are rounded at a third of the result.
    assert np.abs((high + low) / exact - 1).max() < FP32_ROUNDING

    ends = torch.tensor([0.0, -88.0, -1e30, -math.inf, math.nan]).repeat(SIZE // 4)[:SIZE].contiguous()
    no_scale = torch.ones(SIZE)
    high, low = pair_of(run, ends, no_scale)
    np.testing.assert_array_equal((high + low)[:5], [1.0, 0.0, 0.0, 0.0, math.nan])


def test_logarithm_ratio_and_inverse_root_hold_more_bits_than_fp32():
    """For arguments from 1 to 30001, most of them near 1."""

    @triton.jit
    def run_log(x_ptr, high_ptr, low_ptr, SIZE: tl.constexpr):
        at = tl.arange(0, SIZE)
        high, low = precise_log(tl.load(x_ptr + at), 0.0)
        tl.store(high_ptr + at, high)
        tl.store(low_ptr + at, low)

    @triton.jit
    def run_ratio(x_ptr, high_ptr, low_ptr, SIZE: tl.constexpr):
        at = tl.arange(0, SIZE)
        high, low = precise_ratio(0.7, tl.load(x_ptr + at), 0.0)
        tl.store(high_ptr + at, high)
        tl.store(low_ptr + at, low)

    @triton.jit
    def run_root(x_ptr, high_ptr, low_ptr, SIZE: tl.constexpr):
        at = tl.arange(0, SIZE)
        high, low = precise_inverse_root(tl.load(x_ptr + at))
        tl.store(high_ptr + at, high)
        tl.store(low_ptr + at, low)

    x = 1.0 + 30000 * torch.rand(SIZE) ** 8
    exact = x.double().numpy()
    high, low = pair_of(run_log, x)
    # The logarithms are up to 10, so this is a sixteenth of the rounding of the largest.
    assert np.abs(high + low - np.log(exact)).max() < FP32_ROUNDING

    high, low = pair_of(run_ratio, x)
    assert np.abs((high + low) * exact / float(np.float32(0.7)) - 1).max() < PAIR_ERROR

    high, low = pair_of(run_root, x)
    assert np.abs((high + low) * np.sqrt(exact) - 1).max() < PAIR_ERROR


def test_precise_sum_is_within_an_fp32_rounding_and_has_a_low_part():
    """For 4096 numbers of similar size, of small size, and of very different sizes."""

    @triton.jit
    def run(x_ptr, high_ptr, low_ptr, SIZE: tl.constexpr):
        high, low = precise_sum(tl.load(x_ptr + tl.arange(0, SIZE)), 0.0, 2.0 * SIZE)
        tl.store(high_ptr, high)
        tl.store(low_ptr, low)

    for x in (torch.rand(SIZE), torch.rand(SIZE) * 1e-4, torch.rand(SIZE) ** 20):
        high, low = pair_of(run, x, size=1)
        exact = x.double().sum().item()
        total = (high + low)[0]
        assert abs(total / exact - 1) < FP32_ROUNDING

    _, low = pair_of(run, torch.rand(SIZE), size=1)
    assert abs(low[0]) > 0


def test_two_sum_is_exact_and_its_low_part_stays_finite_for_infinite_and_nan_sums():
    @triton.jit
    def run(a_ptr, b_ptr, high_ptr, low_ptr, SIZE: tl.constexpr):
        at = tl.arange(0, SIZE)
        high, low = two_sum(tl.load(a_ptr + at), tl.load(b_ptr + at))
        tl.store(high_ptr + at, high)
        tl.store(low_ptr + at, low)

    a = torch.randn(SIZE) * 100
    b = torch.randn(SIZE)
    b[:2] = torch.tensor([-math.inf, math.nan])
    high, low = pair_of(run, a, b)
    exact = a.double().numpy() + b.double().numpy()
    np.testing.assert_array_equal(high + low, exact)
    assert np.isfinite(low).all()
