"""Compute dropout, residual addition and LayerNorm in one pass, with dropout keyed by (seed, step, row, place).

Guarantee: the result is `layer_norm(residual + dropout(x))`, computed in fp32 and rounded once. Which elements are
dropped depends on the seed (the model passes one for each tower), the step, the row's number in the global batch, the
site (which sub-layer of the tower), and the position and column in the row. It does not depend on batch split, rank or
restart, whereas torch's dropout draws the elements of a whole micro-batch from one random stream. Backward draws the
same bits again, so no mask is stored.

Why it is fused, in bytes moved for each element in bf16, forward and backward together: eager torch moves 30 (dropout
5 and 5, add 6, LayerNorm 4 and 10). torch.compile moves 22 (9 and 13), because it stores a byte of mask and reads the
gradients once more to sum those of the parameters. This operation moves 16 (6 and 10).

In Triton, backward computes residual + dropout(x) again from both inputs. To keep the inputs costs no more memory than
to keep that sum, because the sub-layer keeps its residual in any case. The reference keeps the sum and the factors of
dropout, which take longer to compute again on a CPU.

Cost at 32768 x 1024 in bf16: 201 MB forward, 336 MB backward. On a CPU: 1 ns an element for the bits.

Limits: H is a multiple of 4; site * S * H is below 2**34.

Shapes: B rows, S tokens, H hidden.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from electra_kernels.backend_choice import resolve_without_cuda
from electra_kernels.keyed_random import Purpose, keep_grid
from electra_kernels.operation_types import DropoutKey, LayerDropout


def dropout_add_norm(
    x_BSH: torch.Tensor,
    residual_BSH: torch.Tensor,
    weight_H: torch.Tensor,
    bias_H: torch.Tensor,
    *,
    eps: float,
    dropout: DropoutKey,
    row_B: torch.Tensor,
    backend: str = "auto",
) -> torch.Tensor:
    """Return LayerNorm(residual + dropout(x)), [B, S, H] in the dtype of `x_BSH`.

    The computation is in fp32 (fp64 for fp64 input). `x_BSH` is the output of a sub-layer and `residual_BSH` its
    input, of one dtype. The first four arguments have gradients, but no second derivatives. `row_B` are int64 row
    numbers within the global batch. Pass probability 0 in evaluation.
    """
    if resolve_without_cuda(backend, x_BSH.device.type) == "triton":
        layer_dropout = LayerDropout.of_key(dropout, x_BSH.device)
        return _DropoutAddNorm.apply(x_BSH, residual_BSH, weight_H, bias_H, row_B, eps, layer_dropout)
    return dropout_add_norm_reference(x_BSH, residual_BSH, weight_H, bias_H, row_B, eps, dropout)


def dropout_add_norm_reference(
    x_BSH: torch.Tensor,
    residual_BSH: torch.Tensor,
    weight_H: torch.Tensor,
    bias_H: torch.Tensor,
    row_B: torch.Tensor,
    eps: float,
    dropout: DropoutKey,
) -> torch.Tensor:
    """Return LayerNorm(residual + dropout(x)) in plain PyTorch; this is the definition of `dropout_add_norm`."""
    compute_dtype = torch.promote_types(x_BSH.dtype, torch.float32)
    dropped_BSH = x_BSH.to(compute_dtype)
    if dropout.probability:
        dropped_BSH = dropped_BSH * keep_scale(x_BSH.shape, row_B, dropout).to(compute_dtype)
    summed_BSH = dropped_BSH + residual_BSH.to(compute_dtype)
    normed_shape = x_BSH.shape[-1:]
    normed_BSH = F.layer_norm(summed_BSH, normed_shape, weight_H.to(compute_dtype), bias_H.to(compute_dtype), eps)
    return normed_BSH.to(x_BSH.dtype)


class KeptForBackward(NamedTuple):
    """Tensors of the forward pass that `reference_backward` needs, in the precision of the computation."""

    summed: torch.Tensor  # residual + dropout(x), [..., H]
    mean: torch.Tensor  # of each token, [..., 1]
    inverse_deviation: torch.Tensor  # 1 / sqrt(variance + eps) of each token, [..., 1]
    keep: torch.Tensor | None  # factors of dropout, [..., H]; None if nothing is dropped


def reference_forward(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight_H: torch.Tensor,
    bias_H: torch.Tensor,
    row_B: torch.Tensor,
    eps: float,
    dropout: DropoutKey,
) -> tuple[torch.Tensor, KeptForBackward]:
    """Return LayerNorm(residual + dropout(x)) in the dtype of `x`, and what `reference_backward` needs.

    Arguments and values are those of `dropout_add_norm`, but the shape may be [B * S, H], too. For an autograd
    function of a whole layer: autograd does not record the computation.
    """
    hidden = x.shape[-1]
    compute_dtype = torch.promote_types(x.dtype, torch.float32)
    dropped = x.to(compute_dtype)
    keep = None
    if dropout.probability:
        num_rows = len(row_B)
        shape_BSH = torch.Size((num_rows, x.numel() // (num_rows * hidden), hidden))
        keep = keep_scale(shape_BSH, row_B, dropout).to(compute_dtype).view(x.shape)
        dropped = dropped * keep
    summed = dropped + residual.to(compute_dtype)
    weight_H = weight_H.to(compute_dtype)
    bias_H = bias_H.to(compute_dtype)
    normed, mean, inverse_deviation = torch.native_layer_norm(summed, [hidden], weight_H, bias_H, eps)
    return normed.to(x.dtype), KeptForBackward(summed, mean, inverse_deviation, keep)


def reference_backward(
    grad: torch.Tensor, kept: KeptForBackward, weight_H: torch.Tensor, bias_H: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of x, the residual, the weight and the bias, in the precision of the computation.

    Without dropout, those of x and of the residual are one tensor.
    """
    compute_dtype = kept.summed.dtype
    wanted_grads = [True, True, True]  # input, weight, bias
    # The gradient of the LayerNorm's input is also the gradient of the residual.
    grad_residual, grad_weight_H, grad_bias_H = torch.ops.aten.native_layer_norm_backward(
        grad.to(compute_dtype),
        kept.summed,
        list(weight_H.shape),
        kept.mean,
        kept.inverse_deviation,
        weight_H.to(compute_dtype),
        bias_H.to(compute_dtype),
        wanted_grads,
    )
    grad_x = grad_residual if kept.keep is None else grad_residual * kept.keep
    return grad_x, grad_residual, grad_weight_H, grad_bias_H


def keep_scale(shape: torch.Size, row_B: torch.Tensor, dropout: DropoutKey) -> torch.Tensor:
    """Return the factors of dropout, fp32 [B, S, H]: 0 for dropped elements, 1 / (1 - probability) for the others.

    Seed, step and row number determine a sequence of random numbers. With n = S * H, which is a multiple of 4, site i
    uses the n numbers from index i * n on, so no two sites with the same seed and step share a random number.
    """
    _, seq_len, hidden = shape
    elements_per_row = seq_len * hidden
    factors = keep_grid(
        dropout.seed,
        Purpose.DROPOUT,
        dropout.step,
        row_B,
        num_positions=elements_per_row,
        first_position=dropout.site * elements_per_row,
        drop=dropout.probability,
    )
    return factors.view(shape)


class _DropoutAddNorm(torch.autograd.Function):
    """Autograd function in Triton; it keeps the inputs and each token's mean and variance, but no dropout mask."""

    @staticmethod
    def forward(
        ctx: Any,
        x_BSH: torch.Tensor,
        residual_BSH: torch.Tensor,
        weight_H: torch.Tensor,
        bias_H: torch.Tensor,
        row_B: torch.Tensor,
        eps: float,
        dropout: LayerDropout,
    ) -> torch.Tensor:
        from electra_kernels.triton.dropout_add_norm import forward_pass

        x_BSH = x_BSH.contiguous()
        residual_BSH = residual_BSH.contiguous()
        row_B = row_B.contiguous()
        out_BSH, statistics_2T = forward_pass(x_BSH, residual_BSH, weight_H, bias_H, row_B, eps, dropout)
        ctx.save_for_backward(x_BSH, residual_BSH, statistics_2T, weight_H, row_B)
        ctx.dropout = dropout
        return out_BSH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        from electra_kernels.triton.dropout_add_norm import backward_pass

        x_BSH, residual_BSH, statistics_2T, weight_H, row_B = ctx.saved_tensors
        grad_x_BSH, grad_residual_BSH, grad_weight_H, grad_bias_H = backward_pass(
            grad_BSH.contiguous(), x_BSH, residual_BSH, statistics_2T, weight_H, row_B, ctx.dropout
        )
        return grad_x_BSH, grad_residual_BSH, grad_weight_H, grad_bias_H, None, None, None  # not rows, eps, key
