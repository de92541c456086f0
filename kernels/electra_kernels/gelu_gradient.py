"""Compute the gradient of GELU's input and its sum over the tokens, the gradient of the bias before GELU, in one pass.

A layer's own autograd function (`electra_dist/model/fused_layer.py`) calls it between its matrix products.

Guarantee: the gradient is that of the exact GELU (erf), and the sum over the tokens is in fp32 or wider. The Triton
kernel (`triton/gelu_gradient.py`) adds the values before they are rounded to the dtype of the gradient, the reference
the rounded ones.

Why: torch's GELU gradient and a sum for the bias read and write 2 * 3 + 2 bytes an element in bf16. In Triton, one
kernel moves 6 and writes the gradient over its input, so no memory of that size is allocated. cublasLt could apply
GELU while it writes the product, but it computes the approximation by tanh, and the paper's GELU is exact.

Shapes: T tokens, I width of GELU.
"""

from __future__ import annotations

import torch

from electra_kernels.partial_sums import TokenSums


def gelu_gradient(grad_TI: torch.Tensor, x_TI: torch.Tensor, sums: TokenSums) -> torch.Tensor:
    """Return the gradient of GELU's input, [T, I], and collect its sum over the tokens.

    `grad_TI`, contiguous, is the gradient of GELU's output and may be overwritten.
    """
    if sums.partials_PC is None:
        grad_x_TI, sum_I = gelu_gradient_reference(grad_TI, x_TI)
        sums.add(sum_I)
        return grad_x_TI
    from electra_kernels.triton.gelu_gradient import gradient_strips

    return gradient_strips(grad_TI, x_TI, sums.partials_PC, sums.take_columns(grad_TI.shape[1]))


def gelu_gradient_reference(grad_TI: torch.Tensor, x_TI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of GELU's input, [T, I], and its sum over the tokens, [I], which is fp32 or wider."""
    compute_dtype = torch.promote_types(x_TI.dtype, torch.float32)
    grad_x_TI = torch.ops.aten.gelu_backward(grad_TI, x_TI)
    return grad_x_TI, grad_x_TI.sum(0, dtype=compute_dtype)
