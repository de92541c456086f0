"""Draw keyed random bits (Philox4x32-10) inside Triton kernels, equal to those of `keyed_random.bits_grid`.

Keyed means that the bits are a function of (seed, purpose, step, row, position), without any state. The seed is int64
and the step int32, each with the bits of the unsigned word; `load_key` reads them.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

_SIGN_BIT = 0x80000000  # of a 32-bit word


@triton.jit
def four_way_bits(seed, first_quad, row, step, purpose, BLOCK: tl.constexpr):
    """Return 32 random bits for each of BLOCK neighbouring positions of a row, as uint32 [BLOCK].

    One call of Philox gives four numbers, those of the positions 4 * quad to 4 * quad + 3. `first_quad` is the first
    position, divided by 4; BLOCK is a power of 2 and at least 4.
    """
    quad = (first_quad + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    zero = quad * 0
    step_word = step.to(tl.uint32, bitcast=True)
    bits0, bits1, bits2, bits3 = tl.philox(seed, quad, zero + row.to(tl.uint32), zero + step_word, zero + purpose)
    # tl.join adds a last axis of 2, so the joined tensor has the numbers of a quad in the order 0, 1, 2, 3.
    return tl.join(tl.join(bits0, bits2), tl.join(bits1, bits3)).reshape(BLOCK)


@triton.jit
def bits_at(seed, position, row, step, purpose):
    """Return 32 random bits for int32 positions of a row in any order, as uint32 of the positions' shape.

    Each position takes one call of Philox, which makes four numbers. For neighbours, `four_way_bits` is cheaper.
    """
    quad = (position // 4).to(tl.uint32)
    zero = quad * 0
    step_word = step.to(tl.uint32, bitcast=True)
    bits0, bits1, bits2, bits3 = tl.philox(seed, quad, zero + row.to(tl.uint32), zero + step_word, zero + purpose)
    lane = position % 4
    return tl.where(lane < 2, tl.where(lane == 0, bits0, bits1), tl.where(lane == 2, bits2, bits3))


@triton.jit
def load_key(key_ptr):
    """Load a key, two int64, from device memory; return seed and step."""
    return tl.load(key_ptr), tl.load(key_ptr + 1).to(tl.int32)


def as_int32(word: int) -> int:
    """Return the low 32 bits of `word` as a signed number: 5 gives 5, and 2**32 - 1 gives -1.

    Triton chooses the type of an integer argument by its size; with this, every launch has the same argument type and
    uses the same compiled kernel.
    """
    low = word & 0xFFFFFFFF
    # Flipping the top bit and subtracting its value makes numbers of 2**31 and more negative.
    return (low ^ _SIGN_BIT) - _SIGN_BIT
