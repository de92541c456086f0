"""Runs dropout + add + LayerNorm in Triton: one forward kernel over tokens, one backward over strips of tokens.

Guarantee: the kernels compute `dropout_add_norm.dropout_add_norm_reference` in fp32, with the same random bits.
Gradients of the parameters are summed in a fixed order.

How: a program of the forward pass holds a token's H elements in registers, makes one Philox call for each four
neighbours (none at probability 0), and computes mean and variance in two reductions. Backward draws the same bits
again and computes the sum before the norm from both inputs, as forward does: a sum stored in bf16 would cost the same
traffic and add its rounding to every gradient. A program of the backward pass handles every P-th token (a strip) and
keeps the strip's gradients of the parameters in registers.

Exactness (`compensated_arithmetic.py`): products are fused with the sums that follow. The inverse deviation is a sum
of two numbers, computed from the stored variance; it costs six instructions a token and avoids the error of
`sqrt.approx`.

Cost at 32768 x 1024 in bf16: 201 MB forward, 336 MB backward, 8 MB of partial sums.

Shapes: T = B * S tokens, H hidden, P programs.
"""

# Kernels are in Triton's language: their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from electra_kernels.keyed_random import Purpose, drop_threshold
from electra_kernels.operation_types import DropoutKey
from electra_kernels.partial_sums import sum_of_strips
from electra_kernels.triton.compensated_arithmetic import precise_inverse_root
from electra_kernels.triton.philox import as_int32, four_way_bits

NUM_PROGRAMS = 1024
NUM_WARPS = 4
_PURPOSE: tl.constexpr = tl.constexpr(int(Purpose.DROPOUT))


@triton.jit
def keep_scale(
    row_ptr, token, seed_low, seed_high, step, site_quads, limit, scale, seq_len, hidden, BLOCK_H: tl.constexpr
):
    """Return the factor of dropout, 0 or `scale`, for each column of a token, fp32 [BLOCK_H].

    The values are those of `dropout_add_norm.keep_scale`. `site_quads` is the first position of the site divided by 4,
    and `limit` is `keyed_random.drop_threshold` as int32.
    """
    row = tl.load(row_ptr + token // seq_len)
    first_quad = site_quads + (token % seq_len) * (hidden // 4)
    bits = four_way_bits(seed_low, seed_high, first_quad, row, step, _PURPOSE, BLOCK_H)
    return tl.where(bits >= limit.to(tl.uint32, bitcast=True), scale, 0.0)


@triton.jit
def normalised(summed, mean, variance, inside):
    """Return (summed - mean) / sqrt(variance), 0 outside the row, and the inverse root as a pair (high, low).

    `variance` includes eps. `inside` is true for the columns below H.
    """
    root, root_low = precise_inverse_root(variance)
    centred = tl.where(inside, summed - mean, 0.0)
    return tl.fma(centred, root, centred * root_low), root, root_low


@triton.jit(do_not_specialize=["seed_low", "seed_high", "step", "site_quads", "limit", "scale", "eps"])
def norm_forward_kernel(
    x_ptr,  # [T, H]
    residual_ptr,  # [T, H]
    weight_ptr,  # [H]
    bias_ptr,  # [H]
    row_ptr,  # [B] int64
    out_ptr,  # [T, H]
    mean_ptr,  # [T] fp32
    variance_ptr,  # [T] fp32, eps included
    seq_len,
    hidden,
    eps,
    seed_low,
    seed_high,
    step,
    site_quads,
    limit,
    scale,
    DROP: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Write norm, mean and variance of one token; program t handles token t.

    DROP is false at probability 0. BLOCK_H is a power of 2 and at least H.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_H)
    inside = column < hidden
    x = tl.load(x_ptr + token * hidden + column, mask=inside, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + token * hidden + column, mask=inside, other=0.0).to(tl.float32)
    if DROP:
        keep = keep_scale(
            row_ptr, token, seed_low, seed_high, step, site_quads, limit, scale, seq_len, hidden, BLOCK_H
        )
        summed = tl.fma(x, keep, residual)
    else:
        summed = x + residual
    mean = tl.sum(summed, 0) / hidden
    centred = tl.where(inside, summed - mean, 0.0)
    variance = tl.sum(centred * centred, 0) / hidden + eps
    normed, _, _ = normalised(summed, mean, variance, inside)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    out = tl.fma(normed, weight, bias)
    tl.store(out_ptr + token * hidden + column, out.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(mean_ptr + token, mean)
    tl.store(variance_ptr + token, variance)


@triton.jit(do_not_specialize=["seed_low", "seed_high", "step", "site_quads", "limit", "scale"])
def norm_backward_kernel(
    grad_ptr,  # [T, H]
    x_ptr,  # [T, H]
    residual_ptr,  # [T, H]
    mean_ptr,  # [T] fp32
    variance_ptr,  # [T] fp32, eps included
    weight_ptr,  # [H]
    row_ptr,  # [B] int64
    grad_x_ptr,  # [T, H]
    grad_residual_ptr,  # [T, H]
    grad_weight_ptr,  # [P, H] fp32
    grad_bias_ptr,  # [P, H] fp32
    num_tokens,
    seq_len,
    hidden,
    seed_low,
    seed_high,
    step,
    site_quads,
    limit,
    scale,
    DROP: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Write the gradients of both inputs for a strip of tokens, and the strip's gradients of the parameters.

    Program p of P handles tokens p, p + P, p + 2 P and so on. With DROP false, both inputs have the same gradient and
    only `grad_residual_ptr` is written.
    """
    column = tl.arange(0, BLOCK_H)
    inside = column < hidden
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    grad_weight = tl.zeros((BLOCK_H,), tl.float32)
    grad_bias = tl.zeros((BLOCK_H,), tl.float32)
    for token in range(tl.program_id(0), num_tokens, tl.num_programs(0)):
        place = (column * 0 + token).to(tl.int64) * hidden + column
        grad = tl.load(grad_ptr + place, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
        residual = tl.load(residual_ptr + place, mask=inside, other=0.0).to(tl.float32)
        if DROP:
            keep = keep_scale(
                row_ptr, token, seed_low, seed_high, step, site_quads, limit, scale, seq_len, hidden, BLOCK_H
            )
            summed = tl.fma(x, keep, residual)
        else:
            summed = x + residual
        normed, root, root_low = normalised(summed, tl.load(mean_ptr + token), tl.load(variance_ptr + token), inside)
        weighted = grad * weight
        mean_weighted = tl.sum(weighted, 0) / hidden
        projection = tl.sum(weighted * normed, 0) / hidden
        grad_normed = tl.fma(-normed, projection, weighted - mean_weighted)
        grad_summed = tl.fma(grad_normed, root, grad_normed * root_low)
        tl.store(grad_residual_ptr + place, grad_summed.to(grad_residual_ptr.dtype.element_ty), mask=inside)
        if DROP:
            tl.store(grad_x_ptr + place, (grad_summed * keep).to(grad_x_ptr.dtype.element_ty), mask=inside)
        grad_weight = tl.fma(grad, normed, grad_weight)
        grad_bias += grad
    program = tl.program_id(0).to(tl.int64)
    tl.store(grad_weight_ptr + program * hidden + column, grad_weight, mask=inside)
    tl.store(grad_bias_ptr + program * hidden + column, grad_bias, mask=inside)


def forward_pass(
    x_BSH: torch.Tensor,
    residual_BSH: torch.Tensor,
    weight_H: torch.Tensor,
    bias_H: torch.Tensor,
    row_B: torch.Tensor,
    eps: float,
    dropout: DropoutKey,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return LayerNorm(residual + dropout(x)), and mean and variance (with eps) of each token, by one launch.

    Args:
        x_BSH: Contiguous output of a sub-layer; H is a multiple of 4.
        residual_BSH: Contiguous input of the sub-layer.
        weight_H: Scale of the LayerNorm.
        bias_H: Shift of the LayerNorm.
        row_B: Contiguous int64 row numbers within the global batch.
        eps: Added to the variance.
        dropout: Probability and key.

    Returns:
        The norm in the dtype of `x_BSH`; mean and variance, fp32 [B * S] each, two views of one buffer.
    """
    batch, seq_len, hidden = x_BSH.shape
    out_BSH = torch.empty_like(x_BSH)
    mean_T, variance_T = torch.empty(2, batch * seq_len, device=x_BSH.device)
    grid: Any = (batch * seq_len,)
    norm_forward_kernel[grid](
        *(x_BSH, residual_BSH, weight_H, bias_H, row_B, out_BSH, mean_T, variance_T),
        *(seq_len, hidden, eps, *_key_words(dropout, seq_len, hidden)),
        **_options(dropout, hidden),
    )
    return out_BSH, mean_T, variance_T


def backward_pass(
    grad_BSH: torch.Tensor,
    x_BSH: torch.Tensor,
    residual_BSH: torch.Tensor,
    mean_T: torch.Tensor,
    variance_T: torch.Tensor,
    weight_H: torch.Tensor,
    row_B: torch.Tensor,
    dropout: DropoutKey,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of x, the residual, the norm's weight and its bias; dropped elements are drawn again.

    All tensors are contiguous. `mean_T` and `variance_T` are those of `forward_pass`. At probability 0, the gradients
    of x and the residual are one tensor. The gradients of the parameters are fp32.
    """
    batch, seq_len, hidden = grad_BSH.shape
    grid: Any = (min(NUM_PROGRAMS, batch * seq_len),)
    grad_residual_BSH = torch.empty_like(grad_BSH)
    grad_x_BSH = torch.empty_like(grad_BSH) if dropout.probability else grad_residual_BSH
    partial_weight_PH, partial_bias_PH = torch.empty(2, *grid, hidden, device=grad_BSH.device)
    norm_backward_kernel[grid](
        *(grad_BSH, x_BSH, residual_BSH, mean_T, variance_T, weight_H, row_B),
        *(grad_x_BSH, grad_residual_BSH, partial_weight_PH, partial_bias_PH),
        *(batch * seq_len, seq_len, hidden, *_key_words(dropout, seq_len, hidden)),
        **_options(dropout, hidden),
    )
    return grad_x_BSH, grad_residual_BSH, sum_of_strips(partial_weight_PH), sum_of_strips(partial_bias_PH)


def _key_words(dropout: DropoutKey, seq_len: int, hidden: int) -> tuple[int | float, ...]:
    """Return the scalar arguments of both kernels that follow from the dropout key.

    They are seed_low, seed_high, step, site_quads, limit and scale, in this order.
    """
    assert hidden % 4 == 0, f"the hidden size is {hidden}: choose a multiple of 4"
    words = (dropout.seed, dropout.seed >> 32, dropout.step, dropout.site * seq_len * hidden // 4)
    return *map(as_int32, (*words, drop_threshold(dropout.probability))), 1.0 / (1.0 - dropout.probability)


def _options(dropout: DropoutKey, hidden: int) -> dict[str, Any]:
    """Return the compile-time arguments and launch options that both kernels share."""
    width = triton.next_power_of_2(hidden)
    return {
        "DROP": dropout.probability > 0,
        "BLOCK_H": max(4, width),
        "num_warps": 1 if width <= 256 else NUM_WARPS,
        "enable_fp_fusion": True,
    }
