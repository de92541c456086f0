"""Compute in fp32 inside kernels with small errors: results held as pairs of numbers, and the normal distribution.

The functions up to `precise_sum` keep the rounding error of a result in a second register: the result is the sum high
+ low, where high is the rounded value and low the correction to it. The pair is added up only at the end of a
computation. `cdf_and_density` gives the two parts of which GELU and its slope are made: GELU is x * cdf(x), and its
slope is cdf(x) + x * density(x), with the standard normal distribution's cdf and density.

Guarantee: a kernel that ends in `high + low` of these functions rounds once, where the plain expression rounds at
every operation. Approximate instructions of the GPU, `ex2.approx` (error up to 2 ulp), `div.full` (2 ulp) and
`sqrt.approx`, are either not used or corrected. No kernel computes in fp64, which is 64 times slower than fp32 on GPUs
that are not made for it. In fp32, GELU and its slope are no further from float64 than torch's, which adds 1 to `erf`
and so loses the digits of cdf(x) far below 0; the reciprocal and the power that they use are instructions with errors
of up to 1 and 2 units in the last place.

How, pairs: products use fused multiply-adds (`tl.fma`), which give the exact remainder of a product, and sums use
Knuth's two-sum. The exponential is a range reduction and a polynomial. `scaled_exp` takes 15 instructions.

How, normal distribution: with z = |x|, both parts need exp(-x^2 / 2). The density is 0.399 times it, and cdf(-z) is
ratio(z) times it. That ratio, half of erfcx(z / sqrt(2)), falls smoothly from 0.5, like 0.4 / z. As a polynomial of
degree 8 in u = 0.375 z / (1 + 0.375 z) it has a relative error of at most 1.1e-8 for z up to 7, where cdf(-z) is
1e-12. Near x = 0, where u is small, the errors of u hardly count. `erf` would take two polynomials and an exponential
of its own. The cost is about 20 instructions an element. GELU's gradient with its sum takes half the instructions that
it takes with `erf` and `exp`.

Limits: `tl.fma` must round once; in Triton's interpreter, it does from version 3.9 on. Infinite x gives a cdf and a
slope of NaN, and so does GELU's slope in torch; another result would take one more instruction.
"""

# Kernels are in Triton's language: their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

_LOWEST_EXPONENT: tl.constexpr = tl.constexpr(-88.0)  # exp(-88) is below the least normal number
_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
_LN2_HIGH: tl.constexpr = tl.constexpr(0.693145751953125)  # 16 bits: a product with -127 .. 0 is exact
_LN2_LOW: tl.constexpr = tl.constexpr(1.4286068202862268e-06)
_TO_EXPONENT: tl.constexpr = tl.constexpr(12583039.0)  # 1.5 * 2**23 + 127: adding it puts n + 127 in the low bits
_FRACTION_BITS: tl.constexpr = tl.constexpr(23)  # of an fp32 number; the exponent field is above them

# The interpreter, which is chosen before Triton is imported, has no inline assembly.
_IS_INTERPRETED: tl.constexpr = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
_DENSITY_AT_0: tl.constexpr = tl.constexpr(0.3989422804014327)
_HALF_LOG2_E: tl.constexpr = tl.constexpr(0.7213475204444817)
_SCALE: tl.constexpr = tl.constexpr(0.375)


@triton.jit
def two_sum(a, b):
    """Return a + b rounded to fp32, and the exact rounding error (0 where the sum is not finite); 8 instructions.

    The algorithm is Knuth's two-sum; it is correct whichever of a and b is larger. The subtractions recover which
    parts of a and of b the rounded total contains; the rest of each was lost.
    """
    total = a + b
    b_in_total = total - a
    a_in_total = total - b_in_total
    lost = (a - a_in_total) + (b - b_in_total)
    return total, tl.where(tl.abs(total) < float("inf"), lost, 0.0)


@triton.jit
def scaled_exp(x, x_low, scale, scale_low):
    """Return (scale + scale_low) * exp(x + x_low) as a pair (high, low) whose sum is the result, for x <= 0.

    Range reduction: with the integer n nearest to x / log(2), exp(x) = 2^n * exp(r), where r = x - n * log(2) is at
    most log(2) / 2 in size. 2^n is made from its bits, and exp(r) - 1 is a polynomial, so high = scale * 2^n and
    low = high * (exp(r) - 1). For x of -88 or less, the result is 0. `x_low` and `scale_low` may be None, which means
    0 and takes fewer instructions.
    """
    x = tl.maximum(x, _LOWEST_EXPONENT, propagate_nan=tl.PropagateNan.ALL)
    # fp32 numbers of the size of _TO_EXPONENT are spaced by 1, so the sum is rounded to an integer: its low bits hold
    # n + 127, which is the exponent field of the number 2^n.
    shifted = tl.fma(x, _LOG2_E, _TO_EXPONENT)
    n = shifted - _TO_EXPONENT
    # log(2) is subtracted in two parts; n times the high part is exact.
    r = tl.fma(n, -_LN2_LOW, tl.fma(n, -_LN2_HIGH, x))
    if x_low is not None:
        r += x_low
    power = (shifted.to(tl.int32, bitcast=True) << _FRACTION_BITS).to(tl.float32, bitcast=True)  # 2^n
    # exp(r) = 1 + r + r^2 series(r), within a relative error of 4e-9 (minimax fit of the weighted error).
    series = tl.fma(tl.fma(r, 0.0013814540579915047, 0.00836874544620514), r, 0.04166838899254799)
    series = tl.fma(tl.fma(series, r, 0.1666652113199234), r, 0.4999999403953552)
    excess = tl.fma(r * r, series, r)  # exp(r) - 1
    high = scale * power
    low = high * excess
    if scale_low is not None:
        low = tl.fma(high, excess, scale_low * power)
    return high, low


@triton.jit
def precise_log(high, low):
    """Return log(high + low) as a pair of numbers whose sum is the result, for high + low of at least 1.

    The first number is an estimate, the logarithm of `high`. The second corrects it by one Newton step for exp(y) =
    high + low: (high + low) * exp(-estimate) - 1.
    """
    estimate = tl.log(high)
    near_one, rest = scaled_exp(-estimate, None, high, low)
    correction = (near_one - 1.0) + rest
    return estimate, correction


@triton.jit
def precise_ratio(a, b, b_low):
    """Return a / (b + b_low) as a pair whose sum is the result: the rounded quotient a / b, and a correction.

    The correction is the remainder of the division, a - ratio * (b + b_low), divided by b. Fused multiply-adds compute
    the remainder without the rounding error of the product.
    """
    ratio = a / b
    remainder = tl.fma(-ratio, b_low, tl.fma(-ratio, b, a))
    return ratio, remainder / b


@triton.jit
def precise_inverse_root(x):
    """Return 1 / sqrt(x) as a pair whose sum is the result: the rounded value, and a correction by one Newton step.

    The correction is root / 2 * (1 - x * root^2). The product x * root is taken with its rounding error, because the
    difference is tiny.
    """
    root = 1.0 / tl.sqrt(x)
    product = x * root
    product_low = tl.fma(x, root, -product)
    correction = 0.5 * root * tl.fma(-product_low, root, tl.fma(-product, root, 1.0))
    return root, correction


@triton.jit
def precise_sum(x, x_low, bound):
    """Return the sum of the elements of x + x_low as a pair (high, low) whose sum is the result.

    `x_low` has the rounding errors of `x`. All elements must be at least 0, and `bound` at least twice their sum.
    Adding and then subtracting `bound` rounds each x to a multiple of the last digit of `bound`. In decimal arithmetic
    of four digits, for example, 1234 + 100000 - 100000 is 1200. The sum of these multiples has so few bits that it is
    exact in any order. What the rounding took from each x is summed separately; that sum is small, so its own error is
    tiny.
    """
    coarse = (x + bound) - bound
    coarse_sum = tl.sum(coarse, 0)
    remainder_sum = tl.sum((x - coarse) + x_low, 0)
    return two_sum(coarse_sum, remainder_sum)


@triton.jit
def reciprocal(x):
    """Return 1 / x with an error of up to 1 unit in the last place."""
    if _IS_INTERPRETED:
        return 1.0 / x
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def power_of_2(x):
    """Return 2 to the power x with an error of up to 2 units in the last place; 0 below the normal numbers."""
    if _IS_INTERPRETED:
        return tl.exp2(x)
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def cdf_and_density(x):
    """Return the cumulative distribution function and the density of the standard normal distribution at fp32 `x`."""
    bell = power_of_2(x * x * -_HALF_LOG2_E)  # exp(-x^2 / 2)
    scaled = tl.abs(x) * _SCALE
    u = scaled * reciprocal(scaled + 1.0)
    # ratio(z), fitted for the least relative error.
    ratio = tl.fma(tl.fma(u, -0.033575233072042465, 0.07351071387529373), u, -0.008061707951128483)
    ratio = tl.fma(tl.fma(ratio, u, -0.01436902116984129), u, -0.13799205422401428)
    ratio = tl.fma(tl.fma(ratio, u, -0.02966390922665596), u, 0.7139135003089905)
    ratio = tl.fma(tl.fma(ratio, u, -1.0638457536697388), u, 0.5)
    cdf = tl.where(x < 0.0, bell * ratio, tl.fma(-bell, ratio, 1.0))
    return cdf, bell * _DENSITY_AT_0


@triton.jit
def gelu_slope(x, cdf, density):
    """Return the derivative of GELU at x, from the results of `cdf_and_density`."""
    return tl.fma(x, density, cdf)


def fits_fp32(dtype: torch.dtype) -> bool:
    """Return whether fp32 holds the sum of two numbers of `dtype` exactly if they are at most a factor of 2**16 apart.

    This is bf16, whose 8 significant bits leave 16 of fp32's 24; fp16 has 11, which leave room for 2**13 only.
    """
    return dtype == torch.bfloat16
