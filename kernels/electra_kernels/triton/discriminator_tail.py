"""Runs the discriminator tail in Triton: one forward and one backward kernel, both over strips of tokens.

Guarantee: the kernels compute `discriminator_tail.rtd_losses_reference` in fp32, and its gradients. Sums over tokens
are computed in a fixed order (strip by strip), so every run gives the same bits on the same device.

How: a program handles every P-th tile of tokens (a strip) and keeps the bias and the output weight in registers.
Backward computes the activation again from the dense output, uses the logits that forward stored, writes the gradient
of the dense output, and keeps the strip's gradients of the parameters in registers. The P partial sums are added
afterwards, in fp64.

Exactness: `sigmoid - label` is one quotient, and softplus is split into two terms, so that a token predicted correctly
with confidence keeps its gradient and its loss. GELU times a factor has two roundings instead of four, in fewer
instructions. A tile has at most 8 rows, so no sum in registers is long. The additional cost is some fifty instructions
a token, not an element.

Cost at T = 32768, H = 1024 bf16: 67 MB read forward; 67 MB read and 67 MB written backward, and 8 MB of partial sums.

Limits: H up to 8192, because a row is held in registers; fp64 is computed in fp32.

Shapes: T tokens, H hidden, P programs.
"""

# Kernels are in Triton's language: their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from electra_kernels.partial_sums import sum_of_strips
from electra_kernels.triton.compensated_arithmetic import fits_fp32, precise_log, precise_ratio, scaled_exp, two_sum

NUM_PROGRAMS = 1024  # about eight for each of an H100's 132 processors
NUM_WARPS = 4
_CELLS = 2048  # elements of a tile: 16 for each thread
_ROOT_HALF: tl.constexpr = tl.constexpr(0.7071067811865476)
_DENSITY_AT_0: tl.constexpr = tl.constexpr(0.3989422804014327)  # of the normal distribution
_MOST_ROWS = 8  # rows of a tile, which are added one after another


@triton.jit
def gelu_times(a, erf, factor):
    """Return factor * gelu(a) = factor * a / 2 * (1 + erf), with two roundings; `erf` is erf(a / sqrt(2))."""
    half = a * (0.5 * factor)
    return tl.fma(half, erf, half)


@triton.jit
def gelu_slope(a, erf):
    """Return the derivative of GELU at a, cdf(a) + a * density(a) of the normal distribution.

    `erf` is erf(a / sqrt(2)).
    """
    return tl.fma(a * _DENSITY_AT_0, tl.exp(-0.5 * a * a), tl.fma(erf, 0.5, 0.5))


@triton.jit
def exp_of_minus_abs(logit):
    """Return exp(-abs(logit)) with an error of about one rounding."""
    high, low = scaled_exp(-tl.abs(logit), None, 1.0, None)
    return high + low


@triton.jit
def sigmoid_minus(logit, label):
    """Return sigmoid(logit) - label as one quotient over the common denominator.

    The plain difference would round to 0 for a token that is predicted correctly with confidence.
    """
    small, positive = exp_of_minus_abs(logit), logit >= 0.0
    numerator = tl.fma(tl.where(positive, -label, 1.0 - label), small, tl.where(positive, 1.0 - label, -label))
    quotient, quotient_low = precise_ratio(numerator, *two_sum(1.0, small))
    return quotient + quotient_low


@triton.jit
def tail_forward_kernel(
    dense_ptr,  # [T, H]
    bias_ptr,  # [H]
    out_weight_ptr,  # [H]
    out_bias_ptr,  # [1]
    label_ptr,  # [T] fp32
    mask_ptr,  # [T] fp32
    loss_ptr,  # [T] fp32
    logits_ptr,  # [T] fp32
    num_tokens,
    hidden,
    PAIR: tl.constexpr,  # dense + bias is kept as a sum of two
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Write masked loss and logit of every token of a strip, the tokens that one program handles.

    Program p of P handles tiles p, p + P and so on, of BLOCK_T tokens each. BLOCK_H is a power of 2 and at least H.
    """
    column = tl.arange(0, BLOCK_H)
    bias = tl.load(bias_ptr + column, mask=column < hidden, other=0.0).to(tl.float32)
    out_weight = tl.load(out_weight_ptr + column, mask=column < hidden, other=0.0).to(tl.float32)
    out_bias = tl.load(out_bias_ptr).to(tl.float32)
    for begin in range(tl.program_id(0) * BLOCK_T, num_tokens, tl.num_programs(0) * BLOCK_T):
        token = begin + tl.arange(0, BLOCK_T)
        live = token < num_tokens
        cell = token.to(tl.int64)[:, None] * hidden + column[None, :]
        inside = live[:, None] & (column < hidden)[None, :]
        dense = tl.load(dense_ptr + cell, mask=inside, other=0.0).to(tl.float32)
        a = dense + bias[None, :]
        erf = tl.erf(a * _ROOT_HALF)
        logit, logit_low = two_sum(tl.sum(gelu_times(a, erf, out_weight[None, :]), 1), out_bias)
        if PAIR:
            _, a_low = two_sum(dense, bias[None, :])
            logit, logit_low = two_sum(logit, logit_low + tl.sum(a_low * gelu_slope(a, erf) * out_weight[None, :], 1))
        label = tl.load(label_ptr + token, mask=live, other=0.0)
        mask = tl.load(mask_ptr + token, mask=live, other=0.0)
        # The loss is softplus(logit) - label * logit. For a label of 0 or 1, the term without logarithm is exact.
        log, log_low = precise_log(*two_sum(1.0, exp_of_minus_abs(logit)))
        loss, loss_low = two_sum(tl.fma(-label, logit, tl.maximum(logit, 0.0)), log)
        loss_low += log_low + logit_low * sigmoid_minus(logit, label)
        tl.store(loss_ptr + token, (loss + loss_low) * mask, mask=live)
        tl.store(logits_ptr + token, logit, mask=live)


@triton.jit
def tail_backward_kernel(
    dense_ptr,  # [T, H]
    bias_ptr,  # [H]
    out_weight_ptr,  # [H]
    label_ptr,  # [T] fp32
    mask_ptr,  # [T] fp32
    logits_ptr,  # [T] fp32
    upstream_ptr,  # [T] fp32
    grad_dense_ptr,  # [T, H]
    grad_bias_ptr,  # [P, H] fp32
    grad_out_weight_ptr,  # [P, H] fp32
    grad_out_bias_ptr,  # [P] fp32
    num_tokens,
    hidden,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Write the gradient of the dense output for a strip of tokens, and the strip's gradients of the parameters.

    Program p of P handles tiles p, p + P and so on, of BLOCK_T tokens each, and writes row p of the partial sums.
    """
    column = tl.arange(0, BLOCK_H)
    bias = tl.load(bias_ptr + column, mask=column < hidden, other=0.0).to(tl.float32)
    out_weight = tl.load(out_weight_ptr + column, mask=column < hidden, other=0.0).to(tl.float32)
    grad_bias = tl.zeros((BLOCK_H,), tl.float32)
    grad_out_weight = tl.zeros((BLOCK_H,), tl.float32)
    grad_out_bias = 0.0
    program = tl.program_id(0)
    for begin in range(program * BLOCK_T, num_tokens, tl.num_programs(0) * BLOCK_T):
        token = begin + tl.arange(0, BLOCK_T)
        live = token < num_tokens
        logit = tl.load(logits_ptr + token, mask=live, other=0.0)
        label = tl.load(label_ptr + token, mask=live, other=0.0)
        mask = tl.load(mask_ptr + token, mask=live, other=0.0)
        upstream = tl.load(upstream_ptr + token, mask=live, other=0.0)
        grad_logit = sigmoid_minus(logit, label) * (mask * upstream)
        cell = token.to(tl.int64)[:, None] * hidden + column[None, :]
        inside = live[:, None] & (column < hidden)[None, :]
        a = tl.load(dense_ptr + cell, mask=inside, other=0.0).to(tl.float32) + bias[None, :]
        erf = tl.erf(a * _ROOT_HALF)
        grad_a = grad_logit[:, None] * out_weight[None, :] * gelu_slope(a, erf)
        tl.store(grad_dense_ptr + cell, grad_a.to(grad_dense_ptr.dtype.element_ty), mask=inside)
        grad_bias += tl.sum(grad_a, 0)
        grad_out_weight += tl.sum(gelu_times(a, erf, grad_logit[:, None]), 0)
        grad_out_bias += tl.sum(grad_logit, 0)
    own = program.to(tl.int64) * hidden + column
    tl.store(grad_bias_ptr + own, grad_bias, mask=column < hidden)
    tl.store(grad_out_weight_ptr + own, grad_out_weight, mask=column < hidden)
    tl.store(grad_out_bias_ptr + program, grad_out_bias)


def forward_pass(
    dense_TH: torch.Tensor,
    bias_H: torch.Tensor,
    out_weight_H: torch.Tensor,
    out_bias: torch.Tensor,
    label_T: torch.Tensor,
    mask_T: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return masked loss and logit of every token, fp32 [T] each, by one launch of the Triton kernel.

    Args:
        dense_TH: Contiguous matrix product of the dense layer, without its bias.
        bias_H: Contiguous bias of the dense layer.
        out_weight_H: Contiguous weights of the output unit.
        out_bias: Bias of the output unit, one element.
        label_T: Contiguous fp32, 1 where the token was replaced and 0 elsewhere.
        mask_T: Contiguous fp32, the weight of each token in the loss.
    """
    num_tokens, hidden = dense_TH.shape
    loss_T, logits_T = torch.empty_like(label_T), torch.empty_like(label_T)
    grid, blocks = _launch_shape(num_tokens, hidden)
    inputs = (dense_TH, bias_H, out_weight_H, out_bias, label_T, mask_T)
    tail_forward_kernel[grid](
        *(*inputs, loss_T, logits_T, num_tokens, hidden), PAIR=not fits_fp32(dense_TH.dtype), **blocks
    )
    return loss_T, logits_T


def backward_pass(
    dense_TH: torch.Tensor,
    bias_H: torch.Tensor,
    out_weight_H: torch.Tensor,
    label_T: torch.Tensor,
    mask_T: torch.Tensor,
    logits_T: torch.Tensor,
    upstream_T: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of the dense output, its bias, the output weight and the output bias.

    Args:
        dense_TH: Contiguous matrix product of the dense layer, without its bias.
        bias_H: Contiguous bias of the dense layer.
        out_weight_H: Contiguous weights of the output unit.
        label_T: Contiguous fp32, as in the forward pass.
        mask_T: Contiguous fp32, as in the forward pass.
        logits_T: Logits that `forward_pass` returned.
        upstream_T: Contiguous fp32 gradient of each token's masked loss.

    Returns:
        The gradients; the first is in the dtype of `dense_TH`, the others are fp32.
    """
    num_tokens, hidden = dense_TH.shape
    grid, blocks = _launch_shape(num_tokens, hidden)
    grad_dense_TH = torch.empty_like(dense_TH)
    partial_bias_PH, partial_weight_PH = torch.empty(2, *grid, hidden, device=dense_TH.device)
    partial_out_bias_P = torch.empty(grid, device=dense_TH.device)
    tail_backward_kernel[grid](
        *(dense_TH, bias_H, out_weight_H, label_T, mask_T, logits_T, upstream_T),
        *(grad_dense_TH, partial_bias_PH, partial_weight_PH, partial_out_bias_P),
        num_tokens,
        hidden,
        **blocks,
    )
    sums = (sum_of_strips(partial) for partial in (partial_bias_PH, partial_weight_PH, partial_out_bias_P))
    return grad_dense_TH, *sums


def _launch_shape(num_tokens: int, hidden: int) -> tuple[tuple[int], dict[str, Any]]:
    """Return how to launch the kernels: the number of programs, and the tile's shape with the launch options."""
    width = triton.next_power_of_2(hidden)
    height = max(1, min(_MOST_ROWS, _CELLS // width))
    grid = (max(1, min(NUM_PROGRAMS, triton.cdiv(num_tokens, height))),)
    return grid, {"BLOCK_T": height, "BLOCK_H": width, "num_warps": NUM_WARPS, "enable_fp_fusion": True}
