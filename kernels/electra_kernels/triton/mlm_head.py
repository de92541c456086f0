"""Runs the row pass of the generator's head, and `sampling.sample`, in Triton: one program per row of logits.

Guarantee: the kernel computes `mlm_head.row_pass_reference` and `sampling.sample_reference` in fp32, with the same
bits of noise. The results of a program do not depend on other rows, on the chunk or on the launch.

How: the first pass, 2048 tokens at a time, adds the bias and computes online log-sum-exp, most likely token and Gumbel
score. Every lane keeps its own maxima and its own sum, and they are merged once at the end, so that a block costs no
reduction and one exponential a token. The second pass reads from L2 and writes (softmax - onehot) * weight over the
logits. One Philox call gives the bits of the four tokens 4q .. 4q + 3, neighbours in a lane, so that loads stay 16
bytes wide. There is no `tl.dot`.

Exactness, all in registers (`compensated_arithmetic.py`): the merge, the logarithm and weight / sum are sums of two
numbers, so the loss and each gradient are rounded about once, where the plain formula rounds five times. The
exponential of the second pass is a polynomial that includes the scale (16 instructions; an approximate one has 7).
logit + bias is kept as two numbers as well, except for bf16 logits, where fp32 almost always holds the sum exactly.

Cost at 8192 rows of 30592 bf16: 1.5 GB of HBM traffic with the product's write, if the second read hits L2. Registers
and shared memory are in the compile snapshot (tests/kernels). The time has not been measured.

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

from electra_kernels.gumbel_noise import SERIES_BELOW
from electra_kernels.keyed_random import Purpose
from electra_kernels.operation_types import RowOptions, RowStats
from electra_kernels.triton.compensated_arithmetic import (
    fits_fp32,
    precise_log,
    precise_ratio,
    precise_sum,
    scaled_exp,
    two_sum,
)
from electra_kernels.triton.philox import as_int32, four_way_bits

BLOCK = 2048
NUM_WARPS = 8
_BLOCK_INTERPRETED = 32768  # the interpreter's cost is per operation, not per element
_SERIES_BELOW: tl.constexpr = tl.constexpr(SERIES_BELOW)
_PURPOSE: tl.constexpr = tl.constexpr(int(Purpose.SAMPLE))
_LOWEST: tl.constexpr = tl.constexpr(-3.0e38)  # below the logits; starting from -inf would give inf - inf


@triton.jit
def noise_log(x, APPROXIMATE: tl.constexpr):
    """Return the natural logarithm of x, for noise, with an absolute error of 2e-7 or a relative error of 2.4e-7.

    With APPROXIMATE it takes one instruction of the GPU instead of 20. The interpreter needs APPROXIMATE false.
    """
    if APPROXIMATE:
        log2 = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
        return 0.6931471805599453 * log2
    return tl.log(x)


@triton.jit
def exponential(bits, APPROXIMATE: tl.constexpr):
    """Turn 32 random bits into a draw from the distribution Exp(1), which is accurate also where it is small.

    The formula is that of `gumbel.gumbel_from_bits`. APPROXIMATE is as in `noise_log`.
    """
    u = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = ((((u * (1 / 5) + 1 / 4) * u + 1 / 3) * u + 1 / 2) * u + 1.0) * u
    one_minus_u = ((bits ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    return tl.where(bits < _SERIES_BELOW, series, -noise_log(one_minus_u, APPROXIMATE))


@triton.jit
def gumbel_block(seed_low, seed_high, row, step, start, BLOCK: tl.constexpr, APPROXIMATE: tl.constexpr):
    """Return the Gumbel noise of tokens [start, start + BLOCK) of a row, fp32 [BLOCK].

    `start` and BLOCK are multiples of 4; seed halves and step are int32. APPROXIMATE is as in `noise_log`.
    """
    bits = four_way_bits(seed_low, seed_high, start // 4, row, step, _PURPOSE, BLOCK)
    return -noise_log(exponential(bits, APPROXIMATE), APPROXIMATE)


@triton.jit
def merge_best(value, index):
    """Return the largest value over the lanes, and its index; among equal values, the lowest index."""
    best = tl.max(value, 0)
    return best, tl.min(tl.where(value == best, index, 0x7FFFFFFF), 0)


@triton.jit
def biased(logit, bias, PAIR: tl.constexpr):
    """Return logit + bias rounded to fp32, and the rounding error; without PAIR, 0 takes the place of the error."""
    z, z_low = two_sum(logit.to(tl.float32), bias.to(tl.float32))
    return z, z_low if PAIR else 0.0


@triton.jit
def scaled_softmax(z, z_low, top, scale, scale_low, PAIR: tl.constexpr):
    """Return (scale + scale_low) * exp(z + z_low - top) as a pair (high, low) whose sum is the result.

    With scale = weight / sum of exponentials, it is the softmax times the weight. Without PAIR, `z_low` is ignored.
    """
    if PAIR:
        difference, difference_low = two_sum(z, -top)
        softmax, softmax_low = scaled_exp(difference, difference_low + z_low, scale, scale_low)
    else:
        softmax, softmax_low = scaled_exp(z - top, None, scale, scale_low)
    return softmax, softmax_low


@triton.jit(do_not_specialize=["seed_low", "seed_high", "step", "inverse_temperature"])
def row_kernel(
    logits_ptr,  # [M, stride] in place
    bias_ptr,  # [WIDTH], -inf on tokens that do not exist
    target_ptr,  # [M] int64
    weight_ptr,  # [M] fp32
    row_ptr,  # [M] int64
    loss_ptr,  # [M] fp32
    best_ptr,  # [M] int64
    sampled_ptr,  # [M] int64
    stride,
    seed_low,
    seed_high,
    step,
    inverse_temperature,
    WIDTH: tl.constexpr,
    WITH_LOSS: tl.constexpr,
    WITH_GRADIENT: tl.constexpr,
    WITH_TEMPERATURE: tl.constexpr,
    DISALLOW_CORRECT: tl.constexpr,
    PAIR: tl.constexpr,  # logit + bias is kept as a sum of two
    BLOCK: tl.constexpr,
    APPROXIMATE: tl.constexpr,  # the GPU's one-instruction logarithm in the noise; the interpreter has no assembly
):
    """Write loss, most likely token and sample of a row; program m handles row m of the chunk.

    With WITH_GRADIENT, the gradient of the logits overwrites the logits. With WITH_LOSS false, only the sample is
    written, and bias, target and weight are not read.
    """
    m = tl.program_id(0).to(tl.int64)
    logits_ptr += m * stride
    row = tl.load(row_ptr + m)
    lane = tl.arange(0, BLOCK)
    if WITH_LOSS:
        target = tl.load(target_ptr + m).to(tl.int32)
        z_target, z_target_low = biased(tl.load(logits_ptr + target), tl.load(bias_ptr + target), PAIR)

    top = tl.full((BLOCK,), _LOWEST, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    top_index = tl.zeros((BLOCK,), tl.int32)
    score = tl.full((BLOCK,), float("-inf"), tl.float32)
    score_index = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, WIDTH, BLOCK):
        index = start + lane
        z = tl.load(logits_ptr + index, mask=index < WIDTH, other=float("-inf")).to(tl.float32)
        if WITH_LOSS:
            z, z_low = biased(z, tl.load(bias_ptr + index, mask=index < WIDTH, other=0.0), PAIR)
            higher = z > top
            decay = tl.exp(-tl.abs(z - top))
            one = 1.0 + z_low
            total = tl.where(higher, total * decay + one, decay * one + total)
            top = tl.where(higher, z, top)
            top_index = tl.where(higher, index, top_index)
        noise = gumbel_block(seed_low, seed_high, row, step, start, BLOCK, APPROXIMATE)
        candidate = z * inverse_temperature + noise if WITH_TEMPERATURE else z + noise
        if DISALLOW_CORRECT:
            candidate = tl.where(index == target, float("-inf"), candidate)
        better = candidate > score
        score = tl.where(better, candidate, score)
        score_index = tl.where(better, index, score_index)

    _, sampled = merge_best(score, score_index)
    tl.store(sampled_ptr + m, sampled.to(tl.int64))
    if WITH_LOSS:
        row_top, best = merge_best(top, top_index)
        tl.store(best_ptr + m, best.to(tl.int64))
        lane_total, lane_total_low = scaled_exp(*two_sum(top, -row_top), total, None)
        row_total, row_total_low = precise_sum(*two_sum(lane_total, lane_total_low), 2.0 * WIDTH)
        log_total, log_total_low = precise_log(row_total, row_total_low)
        gap, gap_low = two_sum(row_top, -z_target)
        loss, loss_low = two_sum(gap, log_total)
        loss_low += log_total_low + gap_low
        tl.store(loss_ptr + m, loss + (loss_low - z_target_low))
    if WITH_GRADIENT:
        # No thread may overwrite the target's logit before every thread has read it.
        tl.debug_barrier()
        weight = tl.load(weight_ptr + m)
        scale, scale_low = precise_ratio(weight, row_total, row_total_low)
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
    """Return loss, most likely token and sample of each row of a chunk of logits, by one launch of the Triton kernel.

    Arguments and result are those of `mlm_head.row_pass_reference`. With `options.with_gradient`, the gradient of the
    logits overwrites the logits.
    """
    num_rows, num_absent = len(logits_MV), logits_MV.shape[1] - len(bias_V)
    # The bias gets the width of the logits: a mask that ends within 16 bytes would make every load 2 bytes wide.
    bias_V = F.pad(bias_V, (0, num_absent), value=-torch.inf)
    loss_M = torch.empty(num_rows, dtype=torch.float32, device=logits_MV.device)
    best_M, sampled_M = torch.empty_like(target_M), torch.empty_like(target_M)
    _launch(
        logits_MV,
        (bias_V, target_M.contiguous(), weight_M.float().contiguous(), row_M.contiguous()),
        (loss_M, best_M, sampled_M),
        options,
        with_loss=True,
    )
    return RowStats(loss_M.to(weight_M.dtype), best_M, sampled_M)


def sample(logits_MV: torch.Tensor, seed: int, step: int, row_M: torch.Tensor, temperature: float) -> torch.Tensor:
    """Draw one token for each row from softmax(logits / temperature), int64 [M], by one launch of the Triton kernel.

    Arguments are those of `sampling.sample`. Logits whose rows are not contiguous are copied.
    """
    if logits_MV.stride(-1) != 1:
        logits_MV = logits_MV.contiguous()
    sampled_M = torch.empty(len(logits_MV), dtype=torch.int64, device=logits_MV.device)
    options = RowOptions(seed, step, logits_MV.shape[1], temperature, disallow_correct=False, with_gradient=False)
    unused = sampled_M
    _launch(
        logits_MV, (unused, unused, unused, row_M.contiguous()), (unused, unused, sampled_M), options, with_loss=False
    )
    return sampled_M


def _launch(
    logits_MV: torch.Tensor,
    inputs: tuple[torch.Tensor, ...],
    outputs: tuple[torch.Tensor, ...],
    options: RowOptions,
    with_loss: bool,
) -> None:
    """Launch the row kernel with one program per row of logits.

    Args:
        logits_MV: Logits, adjacent columns; overwritten by their gradient with `options.with_gradient`.
        inputs: Bias (of the width of the logits), targets, weights and row numbers, all contiguous.
        outputs: Losses, most likely tokens and samples.
        options: Seed, step and switches.
        with_loss: Whether to compute more than the samples; without it, other inputs than the rows are not read.
    """
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    grid: Any = (len(logits_MV),)
    row_kernel[grid](
        logits_MV,
        *inputs,
        *outputs,
        logits_MV.stride(0),
        as_int32(options.seed),
        as_int32(options.seed >> 32),
        as_int32(options.step),
        1.0 / options.temperature,
        WIDTH=logits_MV.shape[1],
        WITH_LOSS=with_loss,
        WITH_GRADIENT=options.with_gradient,
        WITH_TEMPERATURE=options.temperature != 1.0,
        DISALLOW_CORRECT=options.disallow_correct,
        PAIR=not fits_fp32(logits_MV.dtype),
        BLOCK=min(_BLOCK_INTERPRETED, triton.next_power_of_2(logits_MV.shape[1])) if interpreted else BLOCK,
        APPROXIMATE=not interpreted,
        num_warps=NUM_WARPS,
        enable_fp_fusion=True,
    )
