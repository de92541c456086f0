"""Triton kernels of the discriminator tail: one forward, one backward, both over strips of tokens.

Guarantee: `discriminator_tail.rtd_losses_reference` in fp32, and its gradients. Sums over tokens are made in a fixed
order (strip by strip), so every run gives the same bits on the same device.

How: a program takes every P-th tile of tokens and keeps the bias and the output weight in registers. Backward forms
the activation again from the dense output, uses the logits that forward stored, writes the gradient of the dense
output and keeps the parameters' gradients of its strip in registers; the P partial sums are added afterwards.

Cost at T = 32768, H = 1024 bf16: 67 MB read forward; 67 MB read and 67 MB written backward, and 8 MB of partial sums.

Where it stops: H up to 8192 (a row lives in registers); fp64 is computed in fp32.

Shapes: T tokens, H hidden, P programs.
"""

# Kernels are in Triton's language: their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

NUM_PROGRAMS = 1024  # about eight for each of an H100's 132 processors
NUM_WARPS = 4
_CELLS = 2048  # of a tile: 16 for each thread


@triton.jit
def gelu_cdf(a):
    """The normal distribution function, the factor of the exact GELU."""
    return 0.5 * (1.0 + tl.erf(a * 0.7071067811865476))


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
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Masked loss and logit of every token of a strip."""
    column = tl.arange(0, BLOCK_H)
    bias = tl.load(bias_ptr + column, mask=column < hidden, other=0.0).to(tl.float32)
    out_weight = tl.load(out_weight_ptr + column, mask=column < hidden, other=0.0).to(tl.float32)
    out_bias = tl.load(out_bias_ptr).to(tl.float32)
    for begin in range(tl.program_id(0) * BLOCK_T, num_tokens, tl.num_programs(0) * BLOCK_T):
        token = begin + tl.arange(0, BLOCK_T)
        live = token < num_tokens
        cell = token.to(tl.int64)[:, None] * hidden + column[None, :]
        inside = live[:, None] & (column < hidden)[None, :]
        a = tl.load(dense_ptr + cell, mask=inside, other=0.0).to(tl.float32) + bias[None, :]
        logit = tl.sum(a * gelu_cdf(a) * out_weight[None, :], 1) + out_bias
        label = tl.load(label_ptr + token, mask=live, other=0.0)
        mask = tl.load(mask_ptr + token, mask=live, other=0.0)
        # softplus(logit) - label * logit without overflow and without losing small terms
        softplus = tl.maximum(logit, 0.0) + log_of_one_plus(tl.exp(-tl.abs(logit)))
        tl.store(loss_ptr + token, (softplus - label * logit) * mask, mask=live)
        tl.store(logits_ptr + token, logit, mask=live)


@triton.jit
def log_of_one_plus(x):
    """log(1 + x) for 0 <= x <= 1 with relative error of a few 1e-7 (corrected for the rounding of the sum)."""
    excess = (1.0 + x) - 1.0
    return tl.where(excess == 0.0, x, tl.log(1.0 + x) * (x / tl.where(excess == 0.0, 1.0, excess)))


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
    """Gradient of the dense output of a strip, and the strip's share of the parameters' gradients."""
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
        grad_logit = (tl.sigmoid(logit) - label) * mask * upstream
        cell = token.to(tl.int64)[:, None] * hidden + column[None, :]
        inside = live[:, None] & (column < hidden)[None, :]
        a = tl.load(dense_ptr + cell, mask=inside, other=0.0).to(tl.float32) + bias[None, :]
        cdf = gelu_cdf(a)
        slope = cdf + a * 0.3989422804014327 * tl.exp(-0.5 * a * a)
        grad_a = grad_logit[:, None] * out_weight[None, :] * slope
        tl.store(grad_dense_ptr + cell, grad_a.to(grad_dense_ptr.dtype.element_ty), mask=inside)
        grad_bias += tl.sum(grad_a, 0)
        grad_out_weight += tl.sum(grad_logit[:, None] * a * cdf, 0)
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
    """Masked loss and logit of every token, fp32."""
    num_tokens, hidden = dense_TH.shape
    loss_T, logits_T = torch.empty_like(label_T), torch.empty_like(label_T)
    grid, blocks = _launch_shape(num_tokens, hidden)
    inputs = (dense_TH, bias_H, out_weight_H, out_bias, label_T, mask_T)
    tail_forward_kernel[grid](*inputs, loss_T, logits_T, num_tokens, hidden, **blocks)
    return loss_T, logits_T


def backward_pass(
    dense_TH: torch.Tensor,
    bias_H: torch.Tensor,
    out_weight_H: torch.Tensor,
    label_T: torch.Tensor,
    mask_T: torch.Tensor,
    logits_T: torch.Tensor,
    upstream_T: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of the dense output, its bias, the output weight and the output bias."""
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
    return grad_dense_TH, partial_bias_PH.sum(0), partial_weight_PH.sum(0), partial_out_bias_P.sum()


def _launch_shape(num_tokens: int, hidden: int) -> tuple[tuple[int], dict[str, Any]]:
    width = triton.next_power_of_2(hidden)
    height = max(1, _CELLS // width)
    grid = (max(1, min(NUM_PROGRAMS, triton.cdiv(num_tokens, height))),)
    return grid, {"BLOCK_T": height, "BLOCK_H": width, "num_warps": NUM_WARPS, "enable_fp_fusion": True}
