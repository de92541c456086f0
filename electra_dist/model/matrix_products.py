"""Compute the towers' matrix products, with a faster path for bf16 on CPUs without bf16 instructions.

Guarantee: the result is that of torch's `F.linear`. Without AMX or AVX512-BF16, products of bf16 operands are summed
in fp32 and rounded once, forward and backward, because torch's own bf16 products are 4 to 20 times slower there.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from typing_extensions import override

# Whether this CPU has AMX or AVX512-BF16 and torch uses them. A torch without oneDNN lacks the operator that asks.
HAS_BF16_PRODUCTS: bool = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


class Linear(nn.Linear):
    """nn.Linear, with the same parameter names, that computes its product with `linear` of this module."""

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x W^T + b, [..., out], as `F.linear` does, in the dtype of `x` or of autocast."""
    if not _emulates_bf16(x):
        return F.linear(x, weight, bias)
    with torch.autocast("cpu", enabled=False):
        # Under autocast the operands may be fp32. Rounding them to bf16 first gives the operands of a bf16 product.
        x = x.bfloat16().float()
        weight = weight.bfloat16().float()
        if bias is not None:
            bias = bias.bfloat16().float()
        return F.linear(x, weight, bias).bfloat16()


def input_gradient(
    grad_TO: torch.Tensor,
    weight_OI: torch.Tensor,
    other_grad_TI: torch.Tensor | None = None,
    out_TI: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the gradient of the input of `linear`, [T, in]: `grad_TO` @ `weight_OI` + `other_grad_TI`.

    `other_grad_TI` is a gradient that the input has from elsewhere, such as a residual connection. It is added inside
    the product, and the sum is rounded once. All arguments have one dtype. `out_TI`, if given, may be overwritten by
    the result, so that no memory is allocated.
    """
    if _emulates_bf16(grad_TO):
        with torch.autocast("cpu", enabled=False):
            other_in_fp32 = None if other_grad_TI is None else other_grad_TI.float()
            return input_gradient(grad_TO.float(), weight_OI.float(), other_in_fp32).bfloat16()
    if other_grad_TI is None:
        return torch.mm(grad_TO, weight_OI, out=out_TI)
    return torch.addmm(other_grad_TI, grad_TO, weight_OI, out=out_TI)


def weight_gradient(grad_TO: torch.Tensor, x_TI: torch.Tensor) -> torch.Tensor:
    """Return grad^T x, the gradient of the weight of `linear`, [out, in]. Both arguments have the same dtype."""
    if _emulates_bf16(grad_TO):
        with torch.autocast("cpu", enabled=False):
            return weight_gradient(grad_TO.float(), x_TI.float()).bfloat16()
    return torch.mm(grad_TO.t(), x_TI)


def product_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype in which a matrix product of `x` is computed: that of autocast, or else the dtype of `x`."""
    device_type = x.device.type
    has_autocast = torch.amp.is_autocast_available(device_type)  # `meta` has none
    if has_autocast and torch.is_autocast_enabled(device_type) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(device_type)
    return x.dtype


def _emulates_bf16(x: torch.Tensor) -> bool:
    """Return whether a matrix product of `x` would run in bf16 on a CPU without bf16 instructions."""
    if x.device.type != "cpu" or HAS_BF16_PRODUCTS:
        return False
    if torch.is_autocast_enabled("cpu"):
        return torch.get_autocast_dtype("cpu") == torch.bfloat16
    return x.dtype == torch.bfloat16
