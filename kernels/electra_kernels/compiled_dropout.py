"""Wrap keyed dropout in custom operators, for layers that run under torch.compile.

Keyed dropout computes which elements to drop from (seed, step, row, place in the model), whereas torch's dropout draws
them from a generator with a state.

Guarantee: the operators return the values of the eager functions, and cause no graph break.

How: torch.compile treats a custom operator as opaque. Its key is an int64 tensor: seed, step, and number of the layer;
on the device where a Triton kernel reads it, on the host otherwise. The values of a tensor are not part of a compiled
graph, so one graph serves every layer of a tower and every step. Python integers would become constants of the graph.

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
    """Return the dropout at one site, a place in a layer that applies dropout.

    Every layer has `SITES` sites.

    Args:
        key_3: int64 [3]: seed, step and number of the layer.
        site: Place within the layer, in [0, SITES).
        probability: Chance of an element to be dropped, in [0, 1).
    """
    return LayerDropout(probability, key_3, site, SITES)


@torch.library.custom_op("electra::keep_attention", mutates_args=())
def keep_attention(key_3: torch.Tensor, row_B: torch.Tensor, size: int, probability: float) -> torch.Tensor:
    """Return the factors that dropout multiplies the attention probabilities of B rows by, fp32 [B, size].

    The factor is 0 for a dropped attention probability, and 1 / (1 - probability) for the others.

    Args:
        key_3: int64 [3]: seed, step and number of the layer. The function reads it on the host.
        probability: Chance of an attention probability to be dropped, in [0, 1).
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
    """Return LayerNorm(residual + dropout(x)) and the statistics for the backward pass, as a custom operator.

    The values are those of `electra_kernels.dropout_add_norm.dropout_add_norm`.

    Args:
        key_3: int64 [3]: seed, step and number of the layer; on the device under Triton, otherwise on the host.
        site: Place within the layer, in [0, SITES).
        probability: Chance of an element to be dropped, in [0, 1).

    Returns:
        The norm, contiguous, in `x_BSH`'s dtype; then mean and variance (with eps) of each token, fp32 [2, T]. Under
        the reference, which keeps no statistics, the second is empty.
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
    """Return the gradients of x, the residual, the weight and the bias of `dropout_add_norm`, as a custom operator."""
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
    """Return a gradient, or None, for each of the ten arguments of `dropout_add_norm`."""
    grad_x, grad_residual, grad_weight, grad_bias = _backward(grad_BSH, *ctx.saved_tensors, *ctx.options)
    no_grads = [None] * 6  # row_B, key_3, site, probability, eps, backend
    return grad_x, grad_residual, grad_weight, grad_bias, *no_grads


dropout_add_norm.register_autograd(_autograd_backward, setup_context=_setup_context)


def _uses_triton(backend: str, x_BSH: torch.Tensor) -> bool:
    return resolve_without_cuda(backend, x_BSH.device.type) == "triton"


def _empty_statistics(x_BSH: torch.Tensor, backend: str) -> torch.Tensor:
    """Return an uninitialised fp32 tensor for the statistics of the forward pass: mean and variance of each token."""
    num_rows, seq_len, _ = x_BSH.shape
    num_tokens = num_rows * seq_len if _uses_triton(backend, x_BSH) else 0
    return x_BSH.new_empty(2, num_tokens, dtype=torch.float32)
