"""The towers' matrix products.

Guarantee: torch's `F.linear`. In bf16 on a CPU without bf16 products (AMX, AVX512-BF16) the same products are summed
in fp32 from the same bf16 operands and rounded once, forward and backward: torch's own are 4 to 20 times slower there
than in fp32 (2 cores of an AMD EPYC 7003: a step of ELECTRA-Small 45 s instead of 3).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

HAS_BF16_PRODUCTS: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()  # this CPU


class Linear(nn.Linear):
    """nn.Linear by `linear`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        return linear(x, self.weight, self.bias)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """[..., in] times [out, in] transposed, in `x`'s precision or that of autocast."""
    if x.device.type != "cpu" or not in_bf16(x) or HAS_BF16_PRODUCTS:
        return F.linear(x, weight, bias)
    with torch.autocast("cpu", enabled=False):
        x, weight = x.bfloat16().float(), weight.bfloat16().float()
        return F.linear(x, weight, None if bias is None else bias.bfloat16().float()).bfloat16()


def in_bf16(x: torch.Tensor) -> bool:
    """Whether a product of `x` is one of bf16 numbers, by autocast or by itself."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type) == torch.bfloat16
    return x.dtype == torch.bfloat16
