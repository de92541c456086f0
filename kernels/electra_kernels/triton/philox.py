"""Philox4x32-10 inside Triton kernels."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def four_way_bits(seed_low, seed_high, first_quad, row, step, purpose, BLOCK: tl.constexpr):
    """The bits of `keyed_random.bits_grid` at positions [4 * first_quad, 4 * first_quad + BLOCK) of a row, as uint32.

    Seed halves and step are int32 with the bits of their unsigned words.
    """
    seed = (seed_high.to(tl.int64) << 32) | (seed_low.to(tl.int64) & 0xFFFFFFFF)
    quad = (first_quad + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    zero = quad * 0
    step_word = step.to(tl.uint32, bitcast=True)
    bits0, bits1, bits2, bits3 = tl.philox(seed, quad, zero + row.to(tl.uint32), zero + step_word, zero + purpose)
    return tl.join(tl.join(bits0, bits2), tl.join(bits1, bits3)).reshape(BLOCK)


def as_int32(word: int) -> int:
    """The low 32 bits as a signed number, so that every launch has one argument type and one compiled kernel."""
    return ((word & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000
