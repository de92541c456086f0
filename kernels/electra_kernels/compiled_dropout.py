"""Wraps keyed dropout in custom operators, for layers that run under torch.compile.

Guarantee: the operators return the values of the eager functions, and cause no graph break.

How: torch.compile treats a custom operator as opaque. A key is an int64 tensor on the host (seed, step, number of the
layer), so that one compiled graph serves every layer of a tower and every step. A Python integer would become a
constant of the graph.

Limits: on a CPU, the backward pass of `dropout_add_norm` computes the sum before the norm again.

Shapes: B rows, S tokens, H hidden, T = B * S.
"""

from __future__ import annotations

from typing import Any

import torch

from electra_kernels.backend_choice import resolve_without_cuda
from electra_kernels.dropout_add_norm import dropout_add_norm_reference, keep_scale
from electra_kernels.keyed_random import Purpose, keep_grid
from electra_kernels.operation_types import DropoutKey

SITES = 2  # number of places in a layer that call `dropout_add_norm`


def dropout_key(key_3: torch.Tensor, site: int, probability: float) -> DropoutKey:
    """Return the key of one dropout site, a place in a layer that drops elements.

    Sites are numbered through all layers, so that no two sites of a tower share a key.

    Args:
        key_3: int64 [3] on the host: seed, step and number of the layer.
        site: Place within the layer, in [0, SITES).
        probability: Chance of an element to be dropped, in [0, 1).
    """
    seed, step, layer = key_3.tolist()
    return DropoutKey(probability, seed, step, SITES * layer + site)


@torch.library.custom_op("electra::keep_attention", mutates_args=())
def keep_attention(key_3: torch.Tensor, row_B: torch.Tensor, size: int, probability: float) -> torch.Tensor:
    """Return the factors of attention dropout for each row, fp32 [B, size], as a custom operator.

    The factor is 0 for a dropped attention probability, and 1 / (1 - probability) for the others.

    Args:
        key_3: int64 [3] on the host: seed, step and number of the layer.
        row_B: int64 row numbers within the global batch.
        size: Number of attention probabilities of a row in this layer, a multiple of 4.
        probability: Chance of an element to be dropped, in [0, 1).
    """
    seed, step, layer = key_3.tolist()
    return keep_grid(seed, Purpose.ATTENTION_DROPOUT, step, row_B, size, layer * size, probability)


@keep_attention.register_fake
def _keep_attention_shape(key_3: torch.Tensor, row_B: torch.Tensor, size: int, probability: float) -> torch.Tensor:
    """Return an empty tensor with the shape and dtype of `keep_attention`'s result, for tracing."""
    return row_B.new_empty(len(row_B), size, dtype=torch.float32)


@torch.library.custom_op("electra::dropout_add_norm", mutates_args=())
def dropout_add_norm(
    x_BSH: torch.Tensor,
    residual_BSH: torch.Tensor,
    weight_H: torch.Tensor,
    bias_H: torch.Tensor,
    row_B: torch.Tensor,
    key_3: torch.Tensor,
    site: int,
    probability: float,
    eps: float,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return LayerNorm(residual + dropout(x)) and the statistics for the backward pass, as a custom operator.

    The values are those of `electra_kernels.dropout_add_norm.dropout_add_norm`.

    Args:
        x_BSH: Output of a sub-layer.
        residual_BSH: Input of the sub-layer, of the same shape and dtype.
        weight_H: Scale of the LayerNorm.
        bias_H: Shift of the LayerNorm.
        row_B: int64 row numbers within the global batch.
        key_3: int64 [3] on the host: seed, step and number of the layer.
        site: Place within the layer, in [0, SITES).
        probability: Chance of an element to be dropped, in [0, 1).
        eps: Added to the variance.
        backend: See `backend.resolve`; "cuda" means "auto".

    Returns:
        The norm, contiguous, in `x_BSH`'s dtype; then mean and variance (with eps) of each token, fp32 [T]. Under the
        reference, which needs no statistics, the last two are empty.
    """
    dropout = dropout_key(key_3, site, probability)
    if _uses_triton(backend, x_BSH):
        from electra_kernels.triton.dropout_add_norm import forward_pass

        x_BSH, residual_BSH, row_B = x_BSH.contiguous(), residual_BSH.contiguous(), row_B.contiguous()
        out_BSH, mean_T, variance_T = forward_pass(x_BSH, residual_BSH, weight_H, bias_H, row_B, eps, dropout)
        return out_BSH, mean_T.clone(), variance_T.clone()  # outputs of an operator must not share storage
    out_BSH = dropout_add_norm_reference(x_BSH, residual_BSH, weight_H, bias_H, row_B, eps, dropout)
    return out_BSH.contiguous(), *_empty_statistics(x_BSH, backend)


@dropout_add_norm.register_fake
def _dropout_add_norm_shapes(x_BSH: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return empty tensors with the shapes and dtypes of `dropout_add_norm`'s results, for tracing."""
    backend = rest[-1]
    out_BSH = torch.empty_like(x_BSH, memory_format=torch.contiguous_format)
    return out_BSH, *_empty_statistics(x_BSH, backend)


@torch.library.custom_op("electra::dropout_add_norm_backward", mutates_args=())
def _backward(
    grad_BSH: torch.Tensor,
    x_BSH: torch.Tensor,
    residual_BSH: torch.Tensor,
    mean_T: torch.Tensor,
    variance_T: torch.Tensor,
    weight_H: torch.Tensor,
    bias_H: torch.Tensor,
    row_B: torch.Tensor,
    key_3: torch.Tensor,
    site: int,
    probability: float,
    eps: float,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of x, the residual, the weight and the bias of `dropout_add_norm`.

    The dropped elements are drawn again from the key. `mean_T` and `variance_T` are those that the forward pass
    returned. Each gradient is contiguous, in the dtype of its input, and has storage of its own.
    """
    dropout = dropout_key(key_3, site, probability)
    inputs = (x_BSH, residual_BSH, weight_H, bias_H)
    grads: tuple[torch.Tensor, ...]
    if _uses_triton(backend, x_BSH):
        from electra_kernels.triton.dropout_add_norm import backward_pass

        grad_BSH, x_BSH, residual_BSH = grad_BSH.contiguous(), x_BSH.contiguous(), residual_BSH.contiguous()
        grads = backward_pass(grad_BSH, x_BSH, residual_BSH, mean_T, variance_T, weight_H, row_B.contiguous(), dropout)
    else:
        grads = _reference_backward(grad_BSH, x_BSH, residual_BSH, weight_H, bias_H, row_B, eps, dropout)
    grad_x, grad_residual, grad_weight, grad_bias = (
        grad.to(tensor.dtype).contiguous() for grad, tensor in zip(grads, inputs)
    )
    if grad_x.data_ptr() == grad_residual.data_ptr():
        # Without dropout both gradients are one tensor, but outputs of an operator must not share storage.
        grad_residual = grad_residual.clone()
    return grad_x, grad_residual, grad_weight, grad_bias


def _reference_backward(
    grad_BSH: torch.Tensor,
    x_BSH: torch.Tensor,
    residual_BSH: torch.Tensor,
    weight_H: torch.Tensor,
    bias_H: torch.Tensor,
    row_B: torch.Tensor,
    eps: float,
    dropout: DropoutKey,
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of x, the residual, the weight and the bias of `dropout_add_norm_reference`.

    The formulas are written out because autograd records nothing inside a custom operator. The gradients are in the
    precision of the computation: fp32, or fp64 for fp64 input.
    """
    compute = torch.promote_types(x_BSH.dtype, torch.float32)
    if dropout.probability:
        keep = keep_scale(x_BSH.shape, row_B, dropout).to(compute)
    else:
        keep = torch.ones((), dtype=compute)
    summed = x_BSH.to(compute) * keep + residual_BSH.to(compute)
    normed_shape = list(x_BSH.shape[-1:])
    weight, bias = weight_H.to(compute), bias_H.to(compute)
    _, mean, inverse_deviation = torch.native_layer_norm(summed, normed_shape, weight, bias, eps)
    wanted_grads = [True, True, True]  # input, weight, bias
    grad_summed, grad_weight, grad_bias = torch.ops.aten.native_layer_norm_backward(
        grad_BSH.to(compute), summed, normed_shape, mean, inverse_deviation, weight, bias, wanted_grads
    )
    return grad_summed * keep, grad_summed, grad_weight, grad_bias


@_backward.register_fake
def _backward_shapes(
    grad_BSH: torch.Tensor,
    x_BSH: torch.Tensor,
    residual_BSH: torch.Tensor,
    mean_T: torch.Tensor,
    variance_T: torch.Tensor,
    weight_H: torch.Tensor,
    bias_H: torch.Tensor,
    *rest: Any,
) -> tuple[torch.Tensor, ...]:
    """Return empty tensors with the shapes and dtypes of `_backward`'s gradients, for tracing."""
    inputs = (x_BSH, residual_BSH, weight_H, bias_H)
    return tuple(torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in inputs)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    """Save what the backward pass needs: the tensors and the options of `_backward`, in the order of its arguments."""
    x_BSH, residual_BSH, weight_H, bias_H, row_B, key_3, *options = inputs
    _, mean_T, variance_T = output
    ctx.save_for_backward(x_BSH, residual_BSH, mean_T, variance_T, weight_H, bias_H, row_B, key_3)
    ctx.options = options  # site, probability, eps, backend


def _autograd_backward(ctx: Any, grad_BSH: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
    """Return a gradient, or None, for each argument of `dropout_add_norm`; mean and variance have no gradient."""
    grads = _backward(grad_BSH, *ctx.saved_tensors, *ctx.options)
    num_without_grad = 2 + len(ctx.options)  # row_B, key_3 and the options
    return *grads, *[None] * num_without_grad


dropout_add_norm.register_autograd(_autograd_backward, setup_context=_setup_context)


def _uses_triton(backend: str, x_BSH: torch.Tensor) -> bool:
    """Return whether `backend` selects the Triton kernel on the device of `x_BSH`."""
    return resolve_without_cuda(backend, x_BSH.device.type) == "triton"


def _empty_statistics(x_BSH: torch.Tensor, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return uninitialised tensors for mean and variance: fp32 [T] under Triton, [0] under the reference."""
    num_tokens = x_BSH.shape[0] * x_BSH.shape[1] if _uses_triton(backend, x_BSH) else 0
    return x_BSH.new_empty(num_tokens, dtype=torch.float32), x_BSH.new_empty(num_tokens, dtype=torch.float32)
