"""Run the row pass of the generator's head in Triton: one program per row of logits.

The row pass computes, from a row of logits, the cross-entropy loss, the most likely token, a sampled token and the
gradient of the logits.

Guarantee: the kernel computes `mlm_head.row_pass_reference` and `mlm_head.sample_reference` in fp32, with the same
bits of noise. The results of a row do not depend on other rows, nor on which rows are computed in one launch.

How: the program reads its row twice. The first time, it goes through blocks of 2048 tokens, adds the bias and updates
the log-sum-exp, the most likely token and the best Gumbel score (logit / temperature + noise). Every lane (column of
the block) keeps its own maxima and its own sum. They are merged once at the end, so that a block costs no reduction,
and a token costs one exponential. The second time, mostly from the L2 cache, it overwrites the logits by (softmax -
onehot) * weight. One Philox call gives the bits of the four tokens 4q .. 4q + 3, which are neighbours in memory, so
that loads stay 16 bytes wide. There is no `tl.dot`.

Exactness: the merged sum, its logarithm and weight / sum are each held as a rounded value plus a correction (see
`arithmetic.py`). So the loss and each gradient are rounded about once, where the plain formula rounds five
times. The exponential of the second reading is a polynomial that includes the factor weight / sum (16 instructions; an
approximate one has 7). logit + bias is kept with its rounding error as well, except for bf16 logits, where fp32 almost
always holds the sum exactly.

Registers and shared memory are in the compile snapshot (tests/kernels). The time has not been measured.

Limits: fp64 is computed in fp32; rows must be contiguous (stride 1 between tokens).

Shapes: M rows, V padded vocabulary.
"""

# Kernels are in Triton's language: their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from electra_kernels.keyed_random import Purpose, device_keys
from electra_kernels.operation_types import SERIES_BELOW, RowOptions, RowStats
from electra_kernels.triton.arithmetic import (
    fits_fp32,
    precise_log,
    precise_ratio,
    precise_sum,
    scaled_exp,
    two_sum,
)
from electra_kernels.triton.philox import four_way_bits, load_key

BLOCK = 2048
NUM_WARPS = 8
_BLOCK_INTERPRETED = 32768  # the interpreter's cost is per operation, not per element
_SERIES_BELOW: tl.constexpr = tl.constexpr(SERIES_BELOW)
_PURPOSE: tl.constexpr = tl.constexpr(int(Purpose.SAMPLE))
_LOWEST: tl.constexpr = tl.constexpr(-3.0e38)  # below the logits; starting from -inf would give inf - inf
_LARGEST_INT32: tl.constexpr = tl.constexpr(0x7FFFFFFF)
_LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
_UNIT: tl.constexpr = tl.constexpr(2.0**-32)  # width of the interval of u that one value of the bits stands for


@triton.jit
def noise_log(x, APPROXIMATE: tl.constexpr):
    """Return the natural logarithm of x for Gumbel noise, with an absolute error of 2e-7 or a relative one of 2.4e-7.

    With APPROXIMATE it takes one instruction of the GPU instead of 20. That instruction is inline assembly, which
    Triton's interpreter cannot run.
    """
    if APPROXIMATE:
        log2 = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
        return _LN_2 * log2
    return tl.log(x)


@triton.jit
def exponential(bits, APPROXIMATE: tl.constexpr):
    """Turn uint32 random bits into draws from Exp(1) by the formula of `mlm_head.gumbel_from_bits`."""
    u = (bits.to(tl.float32) + 0.5) * _UNIT
    series = ((((u * (1 / 5) + 1 / 4) * u + 1 / 3) * u + 1 / 2) * u + 1.0) * u
    # The complement of the bits gives 1 - u without a subtraction, which would cancel digits where u is near 1.
    one_minus_u = ((bits ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * _UNIT
    return tl.where(bits < _SERIES_BELOW, series, -noise_log(one_minus_u, APPROXIMATE))


@triton.jit
def gumbel_block(seed, row, step, start, BLOCK: tl.constexpr, APPROXIMATE: tl.constexpr):
    """Return standard Gumbel noise for the tokens [start, start + BLOCK) of a row, fp32 [BLOCK].

    It is a function of seed, step, row number and token. `start` is a multiple of 4.
    """
    bits = four_way_bits(seed, start // 4, row, step, _PURPOSE, BLOCK)
    return -noise_log(exponential(bits, APPROXIMATE), APPROXIMATE)


@triton.jit
def merge_best(value, index):
    """Return the largest element of `value` and its entry in `index`; among equal values, the lowest index."""
    best = tl.max(value, 0)
    best_index = tl.min(tl.where(value == best, index, _LARGEST_INT32), 0)
    return best, best_index


@triton.jit
def biased(logit, bias, PAIR: tl.constexpr):
    """Return logit + bias in fp32, and with PAIR the rounding error of the sum, which bf16 cannot hold; else 0."""
    z, z_low = two_sum(logit.to(tl.float32), bias.to(tl.float32))
    return z, z_low if PAIR else 0.0


@triton.jit
def add_to_sums(z, z_low, index, top, top_index, total):
    """Add a logit to the online softmax state (top, top_index, total) of each lane, and return the new state.

    A lane is a column of the block. Its state is its largest logit so far (top), that logit's index, and the sum of
    exp(logit - top) over its logits so far (total). One exponential per logit is enough: exp(-abs(z - top)) rescales
    the old sum where z is the new maximum, and is the new term of the sum elsewhere. `z_low` is the rounding error of
    z; exp(z_low) = 1 + z_low to first order.
    """
    is_new_top = z > top
    decay = tl.exp(-tl.abs(z - top))
    correction = 1.0 + z_low
    total = tl.where(is_new_top, total * decay + correction, decay * correction + total)
    top = tl.where(is_new_top, z, top)
    top_index = tl.where(is_new_top, index, top_index)
    return top, top_index, total


@triton.jit
def merge_sums(top, total, row_top, WIDTH: tl.constexpr):
    """Return the sum of exp(logit - row_top) over a row of WIDTH logits, as two numbers whose sum is the result.

    Each lane (column of the block) has seen some of the logits: `top` is their maximum, and `total` the sum of their
    exp(logit - top). The totals are first rescaled to the row's maximum. No term is then above 1, so the sum is at
    most WIDTH; `precise_sum` needs a bound of twice that.
    """
    gap, gap_low = two_sum(top, -row_top)
    lane_total, lane_total_low = scaled_exp(gap, gap_low, total, None)
    lane_total, lane_total_low = two_sum(lane_total, lane_total_low)
    return precise_sum(lane_total, lane_total_low, 2.0 * WIDTH)


@triton.jit
def cross_entropy(row_top, row_total, row_total_low, z_target, z_target_low):
    """Return log(sum of exp(logit)) - logit of the true token, fp32, rounded about once.

    `row_total` is the sum of exp(logit - row_top); each `_low` is the rounding error of its number.
    """
    log_total, log_total_low = precise_log(row_total, row_total_low)
    gap, gap_low = two_sum(row_top, -z_target)
    loss, loss_low = two_sum(gap, log_total)
    # The small terms are added first, so that only the last addition rounds at the size of the loss.
    loss_low += log_total_low + gap_low
    return loss + (loss_low - z_target_low)


@triton.jit
def scaled_softmax(z, z_low, top, scale, scale_low, PAIR: tl.constexpr):
    """Return softmax * weight of logits z, (scale + scale_low) * exp(z + z_low - top), as a pair to be added.

    `top` is the row's largest logit, and scale is weight / sum of exp(logit - top). A name with `_low` is the rounding
    error of the number before it; without PAIR that of z counts as 0.
    """
    if PAIR:
        difference, difference_low = two_sum(z, -top)
        softmax, softmax_low = scaled_exp(difference, difference_low + z_low, scale, scale_low)
    else:
        softmax, softmax_low = scaled_exp(z - top, None, scale, scale_low)
    return softmax, softmax_low


@triton.jit(do_not_specialize=["inverse_temperature"])
def row_kernel(
    logits_ptr,  # [M, stride] in place
    bias_ptr,  # [WIDTH], -inf on tokens that do not exist
    target_ptr,  # [M] int64
    weight_ptr,  # [M] fp32
    row_ptr,  # [M] int64: numbers within the global batch, which key the sampling noise
    loss_ptr,  # [M] fp32
    best_ptr,  # [M] int64
    sampled_ptr,  # [M] int64
    key_ptr,  # int64 seed, step
    stride,  # elements from one row of logits to the next
    inverse_temperature,
    WIDTH: tl.constexpr,  # logits of a row, padding included
    WITH_GRADIENT: tl.constexpr,
    DISALLOW_CORRECT: tl.constexpr,
    PAIR: tl.constexpr,  # whether logit + bias is held as two numbers, the rounded sum and its rounding error
    BLOCK: tl.constexpr,
    APPROXIMATE: tl.constexpr,  # whether the noise uses the GPU's approximate logarithm; False in the interpreter
):
    """Write loss, most likely token and sample of one row of logits; program m handles row m of the M rows.

    Pass 1 reads the row in blocks; each lane (column of the block) keeps its own results, which are merged at the end.
    Pass 2, only with WITH_GRADIENT, overwrites each logit by its gradient, (softmax - onehot) * weight.

    With DISALLOW_CORRECT, the true token is not sampled.
    """
    m = tl.program_id(0).to(tl.int64)
    logits_ptr += m * stride
    row = tl.load(row_ptr + m)  # number within the global batch, a part of the noise's key
    seed, step = load_key(key_ptr)
    lane = tl.arange(0, BLOCK)
    target = tl.load(target_ptr + m).to(tl.int32)
    z_target, z_target_low = biased(tl.load(logits_ptr + target), tl.load(bias_ptr + target), PAIR)

    # Pass 1: statistics and sample.
    top = tl.full((BLOCK,), _LOWEST, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    top_index = tl.zeros((BLOCK,), tl.int32)
    score = tl.full((BLOCK,), float("-inf"), tl.float32)
    score_index = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, WIDTH, BLOCK):
        index = start + lane
        z = tl.load(logits_ptr + index, mask=index < WIDTH, other=float("-inf"))
        z, z_low = biased(z, tl.load(bias_ptr + index, mask=index < WIDTH, other=0.0), PAIR)
        top, top_index, total = add_to_sums(z, z_low, index, top, top_index, total)
        noise = gumbel_block(seed, row, step, start, BLOCK, APPROXIMATE)
        candidate = z * inverse_temperature + noise
        if DISALLOW_CORRECT:
            candidate = tl.where(index == target, float("-inf"), candidate)
        better = candidate > score
        score = tl.where(better, candidate, score)
        score_index = tl.where(better, index, score_index)

    # Merge the lanes, and store the results of the row.
    _, sampled = merge_best(score, score_index)
    tl.store(sampled_ptr + m, sampled.to(tl.int64))
    row_top, best = merge_best(top, top_index)
    tl.store(best_ptr + m, best.to(tl.int64))
    row_total, row_total_low = merge_sums(top, total, row_top, WIDTH)
    loss = cross_entropy(row_top, row_total, row_total_low, z_target, z_target_low)
    tl.store(loss_ptr + m, loss)

    # Pass 2: the gradient.
    if WITH_GRADIENT:
        # No thread may overwrite the target's logit before every thread has read it.
        tl.debug_barrier()
        weight = tl.load(weight_ptr + m)
        scale, scale_low = precise_ratio(weight, row_total, row_total_low)
        # softmax * weight - weight, with its rounding errors: the true token's gradient is small where the row is
        # predicted with confidence, and a plain difference would lose it.
        softmax, softmax_low = scaled_softmax(z_target, z_target_low, row_top, scale, scale_low, PAIR)
        target_gradient, target_gradient_low = two_sum(softmax, -weight)
        target_gradient += target_gradient_low + softmax_low
        for start in range(0, WIDTH, BLOCK):
            index = start + lane
            z = tl.load(logits_ptr + index, mask=index < WIDTH, other=float("-inf"))
            z, z_low = biased(z, tl.load(bias_ptr + index, mask=index < WIDTH, other=0.0), PAIR)
            high, low = scaled_softmax(z, z_low, row_top, scale, scale_low, PAIR)
            gradient = tl.where(index == target, target_gradient, high + low)
            tl.store(logits_ptr + index, gradient.to(logits_ptr.dtype.element_ty), mask=index < WIDTH)


def row_pass(
    logits_MV: torch.Tensor,
    bias_V: torch.Tensor,
    target_M: torch.Tensor,
    weight_M: torch.Tensor,
    row_M: torch.Tensor,
    options: RowOptions,
) -> RowStats:
    """Return loss, most likely token and sample of each of M rows of logits, in one kernel launch.

    With `options.with_gradient`, the logits are overwritten by their gradient. Columns of the logits are adjacent in
    memory. `mlm_head.row_pass_reference` defines the results.
    """
    num_rows, num_columns = logits_MV.shape
    # The bias gets the width of the logits: a mask that ends within 16 bytes would make every load 2 bytes wide.
    padded_bias_V = F.pad(bias_V, (0, num_columns - len(bias_V)), value=-torch.inf)
    loss_M = torch.empty(num_rows, dtype=torch.float32, device=logits_MV.device)
    best_M = torch.empty_like(target_M)
    sampled_M = torch.empty_like(target_M)
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    block = BLOCK
    if interpreted:
        block = min(_BLOCK_INTERPRETED, triton.next_power_of_2(num_columns))
    grid: Any = (num_rows,)
    row_kernel[grid](
        logits_MV,
        padded_bias_V,
        target_M.contiguous(),
        weight_M.float().contiguous(),
        row_M.contiguous(),
        loss_M,
        best_M,
        sampled_M,
        device_keys(options.seed, options.step, logits_MV.device),
        stride=logits_MV.stride(0),
        inverse_temperature=1.0 / options.temperature,
        WIDTH=num_columns,
        WITH_GRADIENT=options.with_gradient,
        DISALLOW_CORRECT=options.disallow_correct,
        PAIR=not fits_fp32(logits_MV.dtype),
        BLOCK=block,
        APPROXIMATE=not interpreted,
        num_warps=NUM_WARPS,
        enable_fp_fusion=True,
    )
    return RowStats(loss_M.to(weight_M.dtype), best_M, sampled_M)
