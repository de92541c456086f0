"""Keyed dropout as custom operators, for layers under torch.compile, which must not look into them.

Guarantee: the same functions as eager's, without a graph break. Keys are int64 tensors on the host (seed, step, number
of the layer), so that one graph serves every layer of a tower and every step: a Python integer would be compiled in.

Where it stops: on a CPU the backward pass of `dropout_add_norm` computes the sum before the norm again.

Shapes: B rows, S tokens, H hidden, T = B * S.
"""

from __future__ import annotations

from typing import Any

import torch

from electra_kernels.backend import resolve_without_cuda
from electra_kernels.dropout_add_norm import dropout_add_norm_reference, keep_scale
from electra_kernels.keyed_random import Purpose, keep_grid
from electra_kernels.op_types import DropoutKey

SITES = 2  # places of a layer that drop


def dropout_key(key_3: torch.Tensor, site: int, probability: float) -> DropoutKey:
    """Of the place `site` of a layer, in [0, SITES)."""
    seed, step, layer = key_3.tolist()
    return DropoutKey(probability, seed, step, SITES * layer + site)


@torch.library.custom_op("electra::keep_attention", mutates_args=())
def keep_attention(key_3: torch.Tensor, row_B: torch.Tensor, size: int, probability: float) -> torch.Tensor:
    """fp32 [B, size]: what the attention probabilities of a layer are multiplied with; `size` a multiple of 4."""
    seed, step, layer = key_3.tolist()
    return keep_grid(seed, Purpose.ATTENTION_DROPOUT, step, row_B, size, layer * size, probability)


@keep_attention.register_fake
def _(key_3: torch.Tensor, row_B: torch.Tensor, size: int, probability: float) -> torch.Tensor:
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
    """`electra_kernels.dropout_add_norm`, and what its backward pass keeps: mean and variance (empty on a CPU)."""
    dropout = dropout_key(key_3, site, probability)
    if _by_triton(backend, x_BSH):
        from electra_kernels.triton.dropout_add_norm import forward_pass

        x_BSH, residual_BSH, row_B = x_BSH.contiguous(), residual_BSH.contiguous(), row_B.contiguous()
        out_BSH, mean_T, variance_T = forward_pass(x_BSH, residual_BSH, weight_H, bias_H, row_B, eps, dropout)
        return out_BSH, mean_T.clone(), variance_T.clone()  # an operator's outputs share no storage
    out_BSH = dropout_add_norm_reference(x_BSH, residual_BSH, weight_H, bias_H, row_B, eps, dropout)
    return out_BSH.contiguous(), *_statistics(x_BSH, backend)


@dropout_add_norm.register_fake
def _(x_BSH: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(x_BSH, memory_format=torch.contiguous_format), *_statistics(x_BSH, rest[-1])


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
    dropout = dropout_key(key_3, site, probability)
    given = (x_BSH, residual_BSH, weight_H, bias_H)
    grads: tuple[torch.Tensor, ...]
    if _by_triton(backend, x_BSH):
        from electra_kernels.triton.dropout_add_norm import backward_pass

        grad_BSH, x_BSH, residual_BSH = grad_BSH.contiguous(), x_BSH.contiguous(), residual_BSH.contiguous()
        grads = backward_pass(grad_BSH, x_BSH, residual_BSH, mean_T, variance_T, weight_H, row_B.contiguous(), dropout)
    else:
        grads = _reference_backward(grad_BSH, x_BSH, residual_BSH, weight_H, bias_H, row_B, eps, dropout)
    grad_x, grad_residual, *parameters = [grad.to(each.dtype).contiguous() for grad, each in zip(grads, given)]
    if grad_x.data_ptr() == grad_residual.data_ptr():  # nothing was dropped
        grad_residual = grad_residual.clone()
    return grad_x, grad_residual, parameters[0], parameters[1]


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
    """Of `dropout_add_norm_reference`, written out: nothing is recorded for autograd inside an operator."""
    compute = torch.promote_types(x_BSH.dtype, torch.float32)
    keep = (
        keep_scale(x_BSH.shape, row_B, dropout).to(compute) if dropout.probability else torch.ones((), dtype=compute)
    )
    summed, shape = x_BSH.to(compute) * keep + residual_BSH.to(compute), list(x_BSH.shape[-1:])
    weight, bias = weight_H.to(compute), bias_H.to(compute)
    _, mean, root = torch.native_layer_norm(summed, shape, weight, bias, eps)
    given = (grad_BSH.to(compute), summed, shape, mean, root, weight, bias, [True, True, True])
    grad_summed, grad_weight, grad_bias = torch.ops.aten.native_layer_norm_backward(*given)
    return grad_summed * keep, grad_summed, grad_weight, grad_bias


@_backward.register_fake
def _(
    grad_BSH: torch.Tensor,
    x_BSH: torch.Tensor,
    residual_BSH: torch.Tensor,
    mean_T: torch.Tensor,
    variance_T: torch.Tensor,
    weight_H: torch.Tensor,
    bias_H: torch.Tensor,
    *rest: Any,
) -> tuple[torch.Tensor, ...]:
    like = (x_BSH, residual_BSH, weight_H, bias_H)
    return tuple(torch.empty_like(each, memory_format=torch.contiguous_format) for each in like)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x_BSH, residual_BSH, weight_H, bias_H, row_B, key_3, *ctx.how = inputs
    ctx.save_for_backward(x_BSH, residual_BSH, *output[1:], weight_H, bias_H, row_B, key_3)


def _autograd(ctx: Any, grad_BSH: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
    return *_backward(grad_BSH, *ctx.saved_tensors, *ctx.how), *[None] * (2 + len(ctx.how))


dropout_add_norm.register_autograd(_autograd, setup_context=_setup)


def _by_triton(backend: str, x_BSH: torch.Tensor) -> bool:
    return resolve_without_cuda(backend, x_BSH.device.type) == "triton"


def _statistics(x_BSH: torch.Tensor, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for mean and variance."""
    count = x_BSH.shape[0] * x_BSH.shape[1] if _by_triton(backend, x_BSH) else 0
    return x_BSH.new_empty(count, dtype=torch.float32), x_BSH.new_empty(count, dtype=torch.float32)
