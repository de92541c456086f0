"""Compute GELU's gradient and its sum over the tokens in one pass.

Guarantee: the gradient is that of the exact GELU (erf). Its sum over the tokens, which is the gradient of the bias
that was added before GELU, is computed in fp32 or wider. The Triton kernel (`triton/gelu_gradient.py`) adds the values
before they are rounded to the dtype of the gradient, the reference the rounded ones.

Why: torch's GELU gradient and a sum for the bias read and write 2 * 3 + 2 bytes an element in bf16. In Triton, one
kernel moves 6 and writes the gradient over its input, so no memory of that size is allocated. cublasLt could apply
GELU while it writes the product, but it computes the approximation by tanh, and the paper's GELU is exact.

Shapes: T tokens, I width of the layer between the two products of the feed-forward network.
"""

from __future__ import annotations

import torch


def gelu_gradient_reference(grad_TI: torch.Tensor, x_TI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of GELU's input, [T, I], and its sum over the tokens, [I], which is fp32 or wider."""
    compute_dtype = torch.promote_types(x_TI.dtype, torch.float32)
    grad_x_TI = torch.ops.aten.gelu_backward(grad_TI, x_TI)
    return grad_x_TI, grad_x_TI.sum(0, dtype=compute_dtype)
