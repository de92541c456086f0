"""Compute the normal distribution in Triton, of which GELU and its gradient are made: one exponential for both parts.

GELU is x * cdf(x), and its slope is cdf(x) + x * density(x), with the standard normal distribution's cdf and density.

How: with z = |x|, both parts need exp(-x^2 / 2). The density is 0.399 times it, and cdf(-z) is ratio(z) times it. That
ratio, half of erfcx(z / sqrt(2)), falls smoothly from 0.5, like 0.4 / z. As a polynomial of degree 8 in u = 0.375 z /
(1 + 0.375 z) it has a relative error of at most 1.1e-8 for z up to 7, where cdf(-z) is 1e-12. Near x = 0, where u is
small, the errors of u hardly count. `erf` would take two polynomials and an exponential of its own.

Exactness: in fp32, GELU and its slope are no further from float64 than torch's, which adds 1 to `erf` and so loses the
digits of cdf(x) far below 0. On a GPU, reciprocal and power are instructions with errors of up to 1 and 2 units in the
last place.

Cost: about 20 instructions an element. GELU's gradient with its sum takes half the instructions that it takes with
`erf` and `exp`.

Limits: infinite x gives NaN, and so does GELU's slope in torch. Another result would take one more instruction.
"""

# Kernels are in Triton's language: their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import os

import triton
import triton.language as tl

# The interpreter, which is chosen before Triton is imported, has no inline assembly.
_IS_INTERPRETED: tl.constexpr = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
_DENSITY_AT_0: tl.constexpr = tl.constexpr(0.3989422804014327)
_HALF_LOG2_E: tl.constexpr = tl.constexpr(0.7213475204444817)
_SCALE: tl.constexpr = tl.constexpr(0.375)


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
