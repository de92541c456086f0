"""Compute query, key and value by one product, and add up the two gradients of a layer's input inside a product.

A layer reads its input twice: this product and the residual connection. As separate operations, autograd would add
the two gradients in a pass of its own over memory. This function returns its input as a second result, so that its
backward pass computes `residual's gradient + product's gradient x W` as one product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from electra_dist.model.matrix_products import input_gradient, linear, product_dtype, weight_gradient


def qkv_product(
    hidden_TH: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return query, key and value, [T, 3 H], and the input for the residual, [T, H], both in the product's dtype."""
    result: tuple[torch.Tensor, torch.Tensor] = _QkvProduct.apply(hidden_TH, weight, bias)
    return result


class _QkvProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TH: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = product_dtype(hidden_TH)
        # The first layer's input is fp32 under autocast; the residual connection continues in the product's dtype.
        residual_TH = hidden_TH.to(dtype)
        ctx.save_for_backward(residual_TH, weight)
        return linear(residual_TH, weight.to(dtype), bias.to(dtype)), residual_TH

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_qkv: torch.Tensor, grad_residual_TH: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden_TH, weight = ctx.saved_tensors
        grad_hidden_TH = input_gradient(grad_qkv, weight.to(grad_qkv.dtype), grad_residual_TH)
        return grad_hidden_TH, weight_gradient(grad_qkv, hidden_TH), grad_qkv.sum(0)
