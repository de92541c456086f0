"""Run the discriminator tail in Triton: one forward and one backward kernel.

The tail is everything after the matrix product of the discriminator's dense layer: bias, GELU, output unit and loss.

Guarantee: the kernels compute `discriminator_tail.rtd_losses_reference` in fp32, and its gradients. Sums over tokens
are computed in a fixed order, so every run gives the same bits on the same device.

How: tokens are grouped in tiles of at most 8. Program (thread block) p of P handles tiles p, p + P, p + 2 P and so on,
which together are its strip, and keeps the bias and the output weight in registers. Backward computes the activation
again from the dense output, uses the logits that forward stored, writes the gradient of the dense output, and sums the
strip's gradients of the parameters in registers. The P partial sums are added afterwards, in fp64.

Exactness: `sigmoid - label` is one quotient, and softplus is split into two terms, so that a token predicted correctly
with confidence keeps its gradient and its loss. A tile has few tokens, so no sum within it has many terms. The
additional cost is some fifty instructions for each token, not for each of its H elements.

Limits: H up to 8192, because all H elements of a token are held in registers; fp64 is computed in fp32. All tensors
are contiguous; labels, masks, logits and upstream gradients are fp32.

Shapes: T tokens, H hidden, P programs, C columns of the partial sums.
"""

# Kernels are in Triton's language: their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from electra_kernels.triton.arithmetic import (
    cdf_and_density,
    fits_fp32,
    gelu_slope,
    precise_log,
    precise_ratio,
    scaled_exp,
    two_sum,
)
from electra_kernels.triton.strip_sums import sum_of_strips

NUM_PROGRAMS = 1024  # about eight for each of an H100's 132 processors
NUM_WARPS = 4
_ELEMENTS_PER_TILE = 2048  # 16 for each thread
_OUT_BIAS_COLUMNS = 16  # of the partial sums; the first is used, the others keep the rows aligned
_MAX_ROWS_PER_TILE = 8  # they are added one after another, so few rows keep rounding errors small


@triton.jit
def exp_of_minus_abs(logit):
    """Return exp(-abs(logit)), in (0, 1], rounded about once; the GPU's own exp has an error of two roundings."""
    high, low = scaled_exp(-tl.abs(logit), None, 1.0, None)
    return high + low


@triton.jit
def sigmoid_minus(logit, label):
    """Return sigmoid(logit) - label as one quotient over the common denominator 1 + e, with e = exp(-abs(logit)).

    The plain difference would round to 0 for a token that is predicted correctly with confidence. The numerator is
    (1 - label) - label * e for a logit of at least 0, and (1 - label) * e - label for a negative one.
    """
    small = exp_of_minus_abs(logit)
    is_positive = logit >= 0.0
    factor = tl.where(is_positive, -label, 1.0 - label)
    constant = tl.where(is_positive, 1.0 - label, -label)
    numerator = tl.fma(factor, small, constant)
    denominator, denominator_low = two_sum(1.0, small)
    quotient, quotient_low = precise_ratio(numerator, denominator, denominator_low)
    return quotient + quotient_low


@triton.jit
def sigmoid_cross_entropy(logit, logit_low, label):
    """Return the loss softplus(z) - label * z of the logit z = logit + logit_low, rounded about once.

    softplus(z) = max(z, 0) + log(1 + exp(-abs(z))). For a label of 0 or 1, the part without the logarithm, max(logit,
    0) - label * logit, is exact. `logit_low`, the rounding error of the logit, changes the loss by `logit_low` times
    the loss's derivative, sigmoid(logit) - label.
    """
    one_plus_exp, one_plus_exp_low = two_sum(1.0, exp_of_minus_abs(logit))
    log, log_low = precise_log(one_plus_exp, one_plus_exp_low)
    without_log = tl.fma(-label, logit, tl.maximum(logit, 0.0))
    loss, loss_low = two_sum(without_log, log)
    slope = sigmoid_minus(logit, label)
    loss_low += log_low + logit_low * slope
    return loss + loss_low


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
    PAIR: tl.constexpr,  # whether dense + bias is kept with its rounding error
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Write each token's logit, out_weight . gelu(dense + bias) + out_bias, and its loss times its mask.

    Program p of P handles every P-th tile of BLOCK_T tokens, from tile p on. With PAIR, the rounding errors of
    dense + bias are added to the logit to first order. BLOCK_H is a power of 2 and at least H.
    """
    column = tl.arange(0, BLOCK_H)
    bias = tl.load(bias_ptr + column, mask=column < hidden, other=0.0).to(tl.float32)
    out_weight = tl.load(out_weight_ptr + column, mask=column < hidden, other=0.0).to(tl.float32)
    out_bias = tl.load(out_bias_ptr).to(tl.float32)
    for begin in range(tl.program_id(0) * BLOCK_T, num_tokens, tl.num_programs(0) * BLOCK_T):
        token = begin + tl.arange(0, BLOCK_T)
        exists = token < num_tokens
        offset = token.to(tl.int64)[:, None] * hidden + column[None, :]
        inside = exists[:, None] & (column < hidden)[None, :]
        # The activation of a tile of tokens [BLOCK_T, BLOCK_H], and the logits [BLOCK_T].
        dense = tl.load(dense_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        a = dense + bias[None, :]
        cdf, density = cdf_and_density(a)
        logit, logit_low = two_sum(tl.sum(a * out_weight[None, :] * cdf, 1), out_bias)
        if PAIR:
            _, a_low = two_sum(dense, bias[None, :])
            correction = tl.sum(a_low * gelu_slope(a, cdf, density) * out_weight[None, :], 1)
            logit, logit_low = two_sum(logit, logit_low + correction)
        # The loss of each token.
        label = tl.load(label_ptr + token, mask=exists, other=0.0)
        mask = tl.load(mask_ptr + token, mask=exists, other=0.0)
        loss = sigmoid_cross_entropy(logit, logit_low, label)
        tl.store(loss_ptr + token, loss * mask, mask=exists)
        tl.store(logits_ptr + token, logit, mask=exists)


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
    partials_ptr,  # [P, C] fp32
    num_tokens,
    hidden,
    num_columns,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Write the dense output's gradient for one program's tokens, and the sums over them for the parameters.

    Program p handles every P-th tile of BLOCK_T tokens and writes row p of the partial sums: H columns for the bias, H
    for the output weight and one for the output bias. `upstream_ptr` has the gradient of each token's masked loss.
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
        exists = token < num_tokens
        # The gradient of each logit; tokens that do not exist have mask 0 and therefore gradient 0.
        logit = tl.load(logits_ptr + token, mask=exists, other=0.0)
        label = tl.load(label_ptr + token, mask=exists, other=0.0)
        mask = tl.load(mask_ptr + token, mask=exists, other=0.0)
        upstream = tl.load(upstream_ptr + token, mask=exists, other=0.0)
        grad_logit = sigmoid_minus(logit, label) * (mask * upstream)
        # The gradient of the dense output, which is also that of dense + bias.
        offset = token.to(tl.int64)[:, None] * hidden + column[None, :]
        inside = exists[:, None] & (column < hidden)[None, :]
        a = tl.load(dense_ptr + offset, mask=inside, other=0.0).to(tl.float32) + bias[None, :]
        cdf, density = cdf_and_density(a)
        grad_a = grad_logit[:, None] * out_weight[None, :] * gelu_slope(a, cdf, density)
        tl.store(grad_dense_ptr + offset, grad_a.to(grad_dense_ptr.dtype.element_ty), mask=inside)
        # The strip's gradients of the parameters stay in registers until the last tile.
        grad_bias += tl.sum(grad_a, 0)
        grad_out_weight += tl.sum(a * cdf * grad_logit[:, None], 0)
        grad_out_bias += tl.sum(grad_logit, 0)
    partial_row_ptr = partials_ptr + program.to(tl.int64) * num_columns
    tl.store(partial_row_ptr + column, grad_bias, mask=column < hidden)
    tl.store(partial_row_ptr + hidden + column, grad_out_weight, mask=column < hidden)
    tl.store(partial_row_ptr + 2 * hidden, grad_out_bias)


def forward_pass(
    dense_TH: torch.Tensor,
    bias_H: torch.Tensor,
    out_weight_H: torch.Tensor,
    out_bias: torch.Tensor,
    label_T: torch.Tensor,
    mask_T: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's loss, times its mask, and logit, fp32 [T] each, in one kernel launch.

    `discriminator_tail.rtd_losses_reference` defines both.
    """
    num_tokens, hidden = dense_TH.shape
    loss_T = torch.empty_like(label_T)
    logits_T = torch.empty_like(label_T)
    num_programs, tile_options = _launch_shape(num_tokens, hidden)
    grid: Any = (num_programs,)
    tail_forward_kernel[grid](
        dense_TH,
        bias_H,
        out_weight_H,
        out_bias,
        label_T,
        mask_T,
        loss_T,
        logits_T,
        num_tokens=num_tokens,
        hidden=hidden,
        PAIR=not fits_fp32(dense_TH.dtype),
        **tile_options,
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

    The first is in the dtype of the dense output, the others are fp32. `logits_T` comes from `forward_pass`;
    `upstream_T` is the gradient of each token's masked loss.
    """
    num_tokens, hidden = dense_TH.shape
    num_programs, tile_options = _launch_shape(num_tokens, hidden)
    grad_dense_TH = torch.empty_like(dense_TH)
    # Each program writes one row of partial sums; they are added afterwards, in a fixed order.
    partials_PC = torch.empty(num_programs, 2 * hidden + _OUT_BIAS_COLUMNS, device=dense_TH.device)
    grid: Any = (num_programs,)
    tail_backward_kernel[grid](
        dense_TH,
        bias_H,
        out_weight_H,
        label_T,
        mask_T,
        logits_T,
        upstream_T,
        grad_dense_TH,
        partials_PC,
        num_tokens=num_tokens,
        hidden=hidden,
        num_columns=partials_PC.shape[1],
        **tile_options,
    )
    grad_bias_H, grad_out_weight_H, grad_out_bias = sum_of_strips(partials_PC).split(
        [hidden, hidden, _OUT_BIAS_COLUMNS]
    )
    return grad_dense_TH, grad_bias_H, grad_out_weight_H, grad_out_bias[0]


def _launch_shape(num_tokens: int, hidden: int) -> tuple[int, dict[str, Any]]:
    """Return how many programs to launch, and the launch options of both kernels, among them the size of a tile."""
    block_h = triton.next_power_of_2(hidden)
    block_t = max(1, min(_MAX_ROWS_PER_TILE, _ELEMENTS_PER_TILE // block_h))
    num_tiles = triton.cdiv(num_tokens, block_t)
    num_programs = max(1, min(NUM_PROGRAMS, num_tiles))
    tile_options = {"BLOCK_T": block_t, "BLOCK_H": block_h, "num_warps": NUM_WARPS, "enable_fp_fusion": True}
    return num_programs, tile_options
