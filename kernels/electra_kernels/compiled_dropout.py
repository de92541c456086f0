"""Wrap keyed dropout in custom operators, for layers that run under torch.compile.

Keyed dropout computes which elements to drop from (seed, step, row, place in the model), whereas torch's dropout draws
them from a generator with a state.

Guarantee: the operators return the values of the eager functions, and cause no graph break.

How: torch.compile treats a custom operator as opaque. Its key is an int64 tensor [3]: seed, step, and number of the
layer; on the device where a Triton kernel reads it, on the host otherwise. The values of a tensor are not part of a
compiled graph, so one graph serves every layer of a tower and every step. Python integers would become constants of
the graph.

Limits: on a CPU, the backward pass of `dropout_add_norm` computes the input of the LayerNorm again.

Shapes: B rows, S tokens, H hidden, T = B * S.
"""

from __future__ import annotations

from typing import Any

import torch

from electra_kernels.backend_choice import resolve_without_cuda
from electra_kernels.dropout_add_norm import dropout_add_norm_reference, reference_backward, reference_forward
from electra_kernels.keyed_random import Purpose, keep_grid
from electra_kernels.operation_types import LayerDropout

SITES = 2  # number of places in a layer that call `dropout_add_norm`


def layer_dropout(key_3: torch.Tensor, site: int, probability: float) -> LayerDropout:
    """Return the dropout at one site of a layer, in [0, SITES); no two sites of a tower share random numbers."""
    return LayerDropout(probability, key_3, site, SITES)


@torch.library.custom_op("electra::keep_attention", mutates_args=())
def keep_attention(key_3: torch.Tensor, row_B: torch.Tensor, size: int, probability: float) -> torch.Tensor:
    """Return the dropout factors of the attention probabilities of B rows, fp32 [B, size]: 0 or 1 / (1 - probability).

    Layer i uses the random numbers i * size to (i + 1) * size - 1 of a row, so no two layers share one. `size` is a
    multiple of 4. The key is read on the host.
    """
    seed, step, layer = key_3.tolist()
    return keep_grid(
        seed,
        Purpose.ATTENTION_DROPOUT,
        step,
        row_B,
        num_positions=size,
        first_position=layer * size,
        drop=probability,
    )


@keep_attention.register_fake
def _keep_attention_shape(key_3: torch.Tensor, row_B: torch.Tensor, size: int, probability: float) -> torch.Tensor:
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values of `dropout_add_norm.dropout_add_norm`, contiguous, and statistics for the backward pass.

    The statistics are mean and variance (with eps) of each token, fp32 [2, T]; the reference keeps none and returns
    [2, 0]. `site` is the place within the layer, in [0, SITES).
    """
    dropout = layer_dropout(key_3, site, probability)
    if _uses_triton(backend, x_BSH):
        from electra_kernels.triton.dropout_add_norm import forward_pass

        return forward_pass(
            x_BSH.contiguous(), residual_BSH.contiguous(), weight_H, bias_H, row_B.contiguous(), eps, dropout
        )
    out_BSH = dropout_add_norm_reference(x_BSH, residual_BSH, weight_H, bias_H, row_B, eps, dropout.on_host())
    return out_BSH.contiguous(), _empty_statistics(x_BSH, backend)


@dropout_add_norm.register_fake
def _dropout_add_norm_shapes(x_BSH: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    backend = rest[-1]
    out_BSH = torch.empty_like(x_BSH, memory_format=torch.contiguous_format)
    return out_BSH, _empty_statistics(x_BSH, backend)


@torch.library.custom_op("electra::dropout_add_norm_backward", mutates_args=())
def _backward(
    grad_BSH: torch.Tensor,
    x_BSH: torch.Tensor,
    residual_BSH: torch.Tensor,
    statistics_2T: torch.Tensor,
    weight_H: torch.Tensor,
    bias_H: torch.Tensor,
    row_B: torch.Tensor,
    key_3: torch.Tensor,
    site: int,
    probability: float,
    eps: float,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of x, residual, weight and bias, contiguous, in their dtypes, with storage of their own."""
    dropout = layer_dropout(key_3, site, probability)
    if _uses_triton(backend, x_BSH):
        from electra_kernels.triton.dropout_add_norm import backward_pass

        grad_x, grad_residual, grad_weight, grad_bias = backward_pass(
            grad_BSH.contiguous(),
            x_BSH.contiguous(),
            residual_BSH.contiguous(),
            statistics_2T,
            weight_H,
            row_B.contiguous(),
            dropout,
        )
    else:
        # Autograd records nothing inside a custom operator, so the sum before the norm is computed again.
        _, kept = reference_forward(x_BSH, residual_BSH, weight_H, bias_H, row_B, eps, dropout.on_host())
        grad_x, grad_residual, grad_weight, grad_bias = reference_backward(grad_BSH, kept, weight_H, bias_H)
    grad_x = grad_x.to(x_BSH.dtype).contiguous()
    grad_residual = grad_residual.to(residual_BSH.dtype).contiguous()
    grad_weight = grad_weight.to(weight_H.dtype).contiguous()
    grad_bias = grad_bias.to(bias_H.dtype).contiguous()
    if grad_x.data_ptr() == grad_residual.data_ptr():
        # Without dropout both gradients are one tensor, but outputs of an operator must not share storage.
        grad_residual = grad_residual.clone()
    return grad_x, grad_residual, grad_weight, grad_bias


@_backward.register_fake
def _backward_shapes(
    grad_BSH: torch.Tensor,
    x_BSH: torch.Tensor,
    residual_BSH: torch.Tensor,
    statistics_2T: torch.Tensor,
    weight_H: torch.Tensor,
    bias_H: torch.Tensor,
    *rest: Any,
) -> tuple[torch.Tensor, ...]:
    inputs = (x_BSH, residual_BSH, weight_H, bias_H)
    return tuple(torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in inputs)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x_BSH, residual_BSH, weight_H, bias_H, row_B, key_3, site, probability, eps, backend = inputs
    _, statistics_2T = output
    # Both are in the order in which `_backward` takes them.
    ctx.save_for_backward(x_BSH, residual_BSH, statistics_2T, weight_H, bias_H, row_B, key_3)
    ctx.options = (site, probability, eps, backend)


def _autograd_backward(ctx: Any, grad_BSH: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
    """Ignore the gradient of the statistics, because no loss depends on them."""
    grad_x, grad_residual, grad_weight, grad_bias = _backward(grad_BSH, *ctx.saved_tensors, *ctx.options)
    no_grads = [None] * 6  # row_B, key_3, site, probability, eps, backend
    return grad_x, grad_residual, grad_weight, grad_bias, *no_grads


dropout_add_norm.register_autograd(_autograd_backward, setup_context=_setup_context)


def _uses_triton(backend: str, x_BSH: torch.Tensor) -> bool:
    return resolve_without_cuda(backend, x_BSH.device.type) == "triton"


def _empty_statistics(x_BSH: torch.Tensor, backend: str) -> torch.Tensor:
    """Return [2, T] for Triton, else [2, 0]: a custom operator must return the same number of tensors."""
    num_rows, seq_len, _ = x_BSH.shape
    num_tokens = num_rows * seq_len if _uses_triton(backend, x_BSH) else 0
    return x_BSH.new_empty(2, num_tokens, dtype=torch.float32)
