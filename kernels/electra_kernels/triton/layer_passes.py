"""Run the fused passes of a layer in Triton: LayerNorm(residual + dropout(x)) forward and backward, GELU's gradient.

Guarantee: the kernels compute the references of `layer_passes.py` in fp32, with the same random bits, and round each
result once. Gradients of parameters are summed in a fixed order.

How, norm forward: one program (thread block) handles one token. It holds the token's H elements in registers, draws
four random numbers with each call of Philox (none at probability 0), and computes mean and variance in two reductions.

How, norm backward: program p of P handles tokens p, p + P, p + 2 P and so on, which are its strip. It draws the same
bits again and computes residual + dropout(x) again from both inputs. To read that sum in bf16 from memory instead
would cost the same traffic, and would add its rounding error to every gradient. The program sums its strip's gradients
of weight and bias in registers and writes them once. On request it also sums the gradient of x over its tokens: that
is the gradient of the bias of the matrix product that made x, which then needs no pass of its own.

How, GELU: the columns are cut into blocks. Program (p, c) handles its strip, tokens p, p + P, p + 2 P and so on, in
block c of the columns. It writes the gradient over the one that it read, and keeps the strip's sum in registers. The P
partial sums are added afterwards, together with those of the layer's other kernels.

The key of the random numbers (seed, step, layer) is read from device memory.

Exactness: multiplications and the additions that follow them are fused. 1 / sqrt(variance) is held as a rounded value
plus a correction (see `arithmetic.py`). That costs six instructions a token and avoids the error of
`sqrt.approx`.

Cost of the norm beside that of the operation, at 32768 x 1024: 6 or 10 MB of partial sums (P = 792, on an H200). Cost
of GELU's gradient at 32768 x 4096 in bf16: 805 MB, of which 268 MB are written.

All tensors are contiguous. Shapes: T = B * S tokens, H hidden, I width of GELU, P programs, C columns of the partial
sums.
"""

# Kernels are in Triton's language: their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from electra_kernels.keyed_random import Purpose, drop_threshold
from electra_kernels.operation_types import SITES, LayerDropout
from electra_kernels.triton.arithmetic import cdf_and_density, gelu_slope, precise_inverse_root
from electra_kernels.triton.philox import as_int32, four_way_bits, load_key

_H200_PROCESSORS = 132
_RESIDENT_WARPS = 24  # of the backward kernel on one processor
NUM_WARPS = 4
_TOKENS_PER_STRIP = 8
GELU_BLOCK = 1024  # columns of a program of GELU's gradient, 8 for each thread: one load of 16 bytes in bf16
_PURPOSE: tl.constexpr = tl.constexpr(int(Purpose.DROPOUT))


@triton.jit
def keep_scale(key_ptr, row_ptr, token, layer_quads, site_quads, limit, scale, seq_len, hidden, BLOCK_H: tl.constexpr):
    """Return the factors of `layer_passes.keep_scale` for a token's columns, fp32 [BLOCK_H]: 0 or `scale`.

    An element is dropped if its 32 random bits, read as an unsigned number, are below `limit`.

    Args:
        key_ptr: int64 seed, global step, and number of the layer.
        row_ptr: int64 numbers of the rows within the global batch, one for each `seq_len` tokens.
        token: Number of the token among all rows of this launch.
        layer_quads: How many random numbers of each row a layer uses, divided by 4.
        site_quads: Number of the layer's random numbers that come before those of this dropout, divided by 4.
        limit: Result of `keyed_random.drop_threshold`, an unsigned number passed as the int32 of the same bits.
        scale: 1 / (1 - probability).
        seq_len: Tokens of a row.
        hidden: Columns of a token, a multiple of 4.
        BLOCK_H: A power of 2 and at least `hidden`.
    """
    seed, step = load_key(key_ptr)
    layer = tl.load(key_ptr + 2).to(tl.int32)
    row = tl.load(row_ptr + token // seq_len)
    first_quad = layer * layer_quads + site_quads + ((token % seq_len) * (hidden // 4)).to(tl.int32)
    bits = four_way_bits(seed, first_quad, row, step, _PURPOSE, BLOCK_H)
    return tl.where(bits >= limit.to(tl.uint32, bitcast=True), scale, 0.0)


@triton.jit
def normalised(summed, mean, variance, inside):
    """Return normed = (summed - mean) / sqrt(variance) of a token, and two numbers whose sum is 1 / sqrt(variance).

    `variance` includes eps. `inside` is true for the H columns of the token, and false for those that fill the block
    up to a power of 2, where `normed` is 0. The two numbers are the rounded value and its correction.
    """
    root, root_low = precise_inverse_root(variance)
    centred = tl.where(inside, summed - mean, 0.0)
    normed = tl.fma(centred, root, centred * root_low)
    return normed, root, root_low


@triton.jit(do_not_specialize=["site_quads", "limit", "scale", "eps"])
def norm_forward_kernel(
    x_ptr,  # [T, H]
    residual_ptr,  # [T, H]
    weight_ptr,  # [H]
    bias_ptr,  # [H]
    key_ptr,  # [3] int64
    row_ptr,  # [B] int64
    out_ptr,  # [T, H]
    statistics_ptr,  # [2, T] fp32: mean, and variance with eps included
    num_tokens,
    seq_len,
    hidden,
    eps,
    layer_quads,  # this one and the next three are arguments of `keep_scale`, which draws the factors of dropout
    site_quads,
    limit,
    scale,
    DROP: tl.constexpr,  # false at probability 0, where no bits are drawn
    BLOCK_H: tl.constexpr,  # power of 2, at least H
):
    """Write LayerNorm(residual + dropout(x)), mean and variance of one token; program t handles token t."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_H)
    inside = column < hidden
    # The sum before the norm.
    x = tl.load(x_ptr + token * hidden + column, mask=inside, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + token * hidden + column, mask=inside, other=0.0).to(tl.float32)
    if DROP:
        keep = keep_scale(key_ptr, row_ptr, token, layer_quads, site_quads, limit, scale, seq_len, hidden, BLOCK_H)
        summed = tl.fma(x, keep, residual)
    else:
        summed = x + residual
    # LayerNorm. The columns from H on are 0 in `summed`, but not in `summed - mean`.
    mean = tl.sum(summed, 0) / hidden
    centred = tl.where(inside, summed - mean, 0.0)
    variance = tl.sum(centred * centred, 0) / hidden + eps
    normed, _, _ = normalised(summed, mean, variance, inside)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    out = tl.fma(normed, weight, bias)
    tl.store(out_ptr + token * hidden + column, out.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(statistics_ptr + token, mean)
    tl.store(statistics_ptr + num_tokens + token, variance)


@triton.jit(do_not_specialize=["site_quads", "limit", "scale"])
def norm_backward_kernel(
    grad_ptr,  # [T, H]
    x_ptr,  # [T, H]
    residual_ptr,  # [T, H]
    statistics_ptr,  # [2, T] fp32: mean, and variance with eps included
    weight_ptr,  # [H]
    key_ptr,  # [3] int64
    row_ptr,  # [B] int64
    grad_x_ptr,  # [T, H]
    grad_residual_ptr,  # [T, H]
    partials_ptr,  # [P, C] fp32
    num_tokens,
    seq_len,
    hidden,
    num_columns,
    first_column,
    layer_quads,  # this one and the next three are arguments of `keep_scale`, which draws the factors of dropout
    site_quads,
    limit,
    scale,
    DROP: tl.constexpr,  # false at probability 0: both inputs then have one gradient, written to `grad_residual_ptr`
    SUM_X: tl.constexpr,  # whether the gradient of x is summed, too
    BLOCK_H: tl.constexpr,  # power of 2, at least H
):
    """Write the gradients of x and residual in LayerNorm(residual + dropout(x)) for one program's tokens, and sums.

    Program p of P handles every P-th token and writes its sums to row p of `partials_ptr`, from `first_column` on: H
    columns for the gradient of the LayerNorm's weight, H for that of its bias and, with SUM_X, H for that of x.
    """
    column = tl.arange(0, BLOCK_H)
    inside = column < hidden
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    grad_weight = tl.zeros((BLOCK_H,), tl.float32)
    grad_bias = tl.zeros((BLOCK_H,), tl.float32)
    sum_x = tl.zeros((BLOCK_H,), tl.float32)
    for token in range(tl.program_id(0), num_tokens, tl.num_programs(0)):
        # 64 bits, because T * H can exceed 2**31. `column * 0 + token` is a tensor also where `token` is a Python int.
        offset = (column * 0 + token).to(tl.int64) * hidden + column
        # The sum before the norm, as in the forward pass.
        grad = tl.load(grad_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        residual = tl.load(residual_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        if DROP:
            keep = keep_scale(key_ptr, row_ptr, token, layer_quads, site_quads, limit, scale, seq_len, hidden, BLOCK_H)
            summed = tl.fma(x, keep, residual)
        else:
            summed = x + residual
        mean = tl.load(statistics_ptr + token)
        variance = tl.load(statistics_ptr + num_tokens + token)
        normed, root, root_low = normalised(summed, mean, variance, inside)
        # Gradient of LayerNorm: (g - mean(g) - normed * mean(g * normed)) / sqrt(variance), with g = grad * weight.
        weighted = grad * weight
        mean_weighted = tl.sum(weighted, 0) / hidden
        projection = tl.sum(weighted * normed, 0) / hidden
        grad_centred = tl.fma(-normed, projection, weighted - mean_weighted)
        grad_summed = tl.fma(grad_centred, root, grad_centred * root_low)
        tl.store(grad_residual_ptr + offset, grad_summed.to(grad_residual_ptr.dtype.element_ty), mask=inside)
        grad_x = grad_summed
        if DROP:
            grad_x = grad_summed * keep
            tl.store(grad_x_ptr + offset, grad_x.to(grad_x_ptr.dtype.element_ty), mask=inside)
        # The strip's gradients of the parameters stay in registers until the last token.
        grad_weight = tl.fma(grad, normed, grad_weight)
        grad_bias += grad
        if SUM_X:
            sum_x += grad_x
    partial_row_ptr = partials_ptr + tl.program_id(0).to(tl.int64) * num_columns + first_column
    tl.store(partial_row_ptr + column, grad_weight, mask=inside)
    tl.store(partial_row_ptr + hidden + column, grad_bias, mask=inside)
    if SUM_X:
        tl.store(partial_row_ptr + 2 * hidden + column, sum_x, mask=inside)


def forward_pass(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight_H: torch.Tensor,
    bias_H: torch.Tensor,
    eps: float,
    dropout: LayerDropout,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return LayerNorm(residual + dropout(x)) for x [B, S, H] or [T, H], and its statistics, in one kernel launch.

    The statistics are fp32 [2, T]: each token's mean, and variance with eps.
    """
    hidden = x.shape[-1]
    num_tokens = x.numel() // hidden
    seq_len = num_tokens // len(dropout.row_B)
    out = torch.empty_like(x)
    statistics_2T = torch.empty(2, num_tokens, device=x.device)
    grid: Any = (num_tokens,)
    norm_forward_kernel[grid](
        x,
        residual,
        weight_H,
        bias_H,
        dropout.key_3,
        dropout.row_B,
        out,
        statistics_2T,
        num_tokens=num_tokens,
        seq_len=seq_len,
        hidden=hidden,
        eps=eps,
        **_dropout_arguments(dropout, seq_len, hidden),
        **_launch_options(hidden),
    )
    return out, statistics_2T


def num_strips(num_tokens: int, hidden: int, device: torch.device) -> int:
    """Return how many programs (thread blocks) a backward kernel has for a gradient of T x H elements.

    Each of them sums over a strip of about `_TOKENS_PER_STRIP` tokens or more, so that partial sums take few bytes.
    """
    most_programs = resident_programs(device, _launch_options(hidden)["num_warps"])
    return min(most_programs, triton.cdiv(num_tokens, _TOKENS_PER_STRIP))


def backward_strips(
    grad: torch.Tensor,
    x: torch.Tensor,
    residual: torch.Tensor,
    statistics_2T: torch.Tensor,
    weight_H: torch.Tensor,
    dropout: LayerDropout,
    partials_PC: torch.Tensor,
    first_column: int,
    in_layer: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of x and residual in LayerNorm(residual + dropout(x)), and write sums over tokens.

    Each of P programs sums the gradients of weight and bias over its tokens, and writes one row of `partials_PC`,
    fp32, from `first_column` on. Several kernels may share it, each with its own columns, so that one sum over P
    serves all. With `in_layer`, the gradient of x is summed as well, and it overwrites `x`, which a layer does not
    need any more. At probability 0 both returned gradients are the same tensor.
    """
    hidden = grad.shape[-1]
    num_tokens = grad.numel() // hidden
    seq_len = num_tokens // len(dropout.row_B)
    num_programs, num_columns = partials_PC.shape
    grad_residual = torch.empty_like(grad)
    grad_x = grad_residual
    if dropout.probability:
        grad_x = x if in_layer else torch.empty_like(grad)
    grid: Any = (num_programs,)
    norm_backward_kernel[grid](
        grad,
        x,
        residual,
        statistics_2T,
        weight_H,
        dropout.key_3,
        dropout.row_B,
        grad_x,
        grad_residual,
        partials_PC,
        num_tokens=num_tokens,
        seq_len=seq_len,
        hidden=hidden,
        num_columns=num_columns,
        first_column=first_column,
        SUM_X=in_layer,
        **_dropout_arguments(dropout, seq_len, hidden),
        **_launch_options(hidden),
    )
    return grad_x, grad_residual


def resident_programs(device: torch.device, num_warps: int) -> int:
    """Return how many programs of the backward kernel a GPU runs at the same time; other devices count as an H200.

    If exactly so many are launched, all begin at once, and none waits for a second round, in which most processors
    would be idle. The number follows from the kernel's registers, which leave room for `_RESIDENT_WARPS` warps on each
    processor (measured by compiling for sm_90: 6 programs of 4 warps). It determines the order in which a parameter's
    gradient is added, so the gradients of two kinds of GPU may differ by rounding.
    """
    num_processors = _H200_PROCESSORS
    if device.type == "cuda":
        num_processors = torch.cuda.get_device_properties(device).multi_processor_count
    return num_processors * (_RESIDENT_WARPS // num_warps)


def _dropout_arguments(dropout: LayerDropout, seq_len: int, hidden: int) -> dict[str, Any]:
    """Return the arguments of dropout by which each place in each layer uses other random numbers of a row's sequence.

    `keep_scale` explains them.
    """
    assert hidden % 4 == 0, f"the hidden size is {hidden}: choose a multiple of 4"
    quads_of_a_site = seq_len * hidden // 4
    return {
        "layer_quads": SITES * quads_of_a_site,
        "site_quads": dropout.site * quads_of_a_site,
        "limit": as_int32(drop_threshold(dropout.probability)),
        "scale": 1.0 / (1.0 - dropout.probability),
        "DROP": dropout.probability > 0,
    }


def _launch_options(hidden: int) -> dict[str, Any]:
    width = triton.next_power_of_2(hidden)
    return {
        "BLOCK_H": max(4, width),  # one random call gives four columns
        "num_warps": 1 if width <= 256 else NUM_WARPS,
        "enable_fp_fusion": True,
    }


@triton.jit
def gelu_gradient_kernel(
    grad_ptr,  # [T, I], overwritten
    x_ptr,  # [T, I]
    partials_ptr,  # [P, C] fp32
    num_tokens,
    width,
    num_columns,
    first_column,
    BLOCK: tl.constexpr,
):
    """Overwrite the gradient of GELU's output by that of its input x, and write sums of the new gradient over tokens.

    Program (p, c) of P x C handles every P-th token in block c of the columns. It writes its sums to row p of
    `partials_ptr`, from `first_column` on. `width` is the number of columns of x.
    """
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((BLOCK,), tl.float32)
    for token in range(tl.program_id(0), num_tokens, tl.num_programs(0)):
        # 64 bits, because T * I can exceed 2**31. `column * 0 + token` is a tensor also where `token` is a Python int.
        offset = (column * 0 + token).to(tl.int64) * width + column
        grad = tl.load(grad_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        grad_x = grad * gelu_slope(x, *cdf_and_density(x))
        tl.store(grad_ptr + offset, grad_x.to(grad_ptr.dtype.element_ty), mask=inside)
        total += grad_x
    partial_row_ptr = partials_ptr + tl.program_id(0).to(tl.int64) * num_columns + first_column
    tl.store(partial_row_ptr + column, total, mask=inside)


def gradient_strips(
    grad_TI: torch.Tensor, x_TI: torch.Tensor, partials_PC: torch.Tensor, first_column: int
) -> torch.Tensor:
    """Overwrite `grad_TI`, the contiguous gradient of GELU's output, by the gradient of its input; return `grad_TI`.

    Each of P programs writes the sums of the new gradient over its tokens to one row of `partials_PC`, fp32, into I
    columns from `first_column` on.
    """
    num_tokens, width = grad_TI.shape
    num_strips, num_columns = partials_PC.shape
    block = min(GELU_BLOCK, triton.next_power_of_2(width))
    grid: Any = (num_strips, triton.cdiv(width, block))
    gelu_gradient_kernel[grid](
        grad_TI,
        x_TI,
        partials_PC,
        num_tokens=num_tokens,
        width=width,
        num_columns=num_columns,
        first_column=first_column,
        BLOCK=block,
        num_warps=NUM_WARPS if block == GELU_BLOCK else 1,
        enable_fp_fusion=True,
    )
    return grad_TI
