"""Run the forward passes of a layer's norms and the backward passes of its norms and GELU, outside autograd.

A layer's own autograd function (`electra_dist/model/fused_layer.py`) calls them between its matrix products.
Beside the gradients of their inputs, the backward passes give sums over all tokens: the gradients of each LayerNorm's
weight and bias, and of the bias of the matrix product before each norm and before GELU. Under Triton all kernels of a
layer write their partial sums, one for each strip of tokens, into one buffer, and one sum over the strips then gives
all of these gradients.

Guarantee: the values are those of `dropout_add_norm`, whose reference defines them, and of `gelu_gradient_reference`:
the gradient of the exact GELU (erf), and its sum over the tokens in fp32 or wider. The Triton kernel
(`triton/gelu_gradient.py`) adds the values before they are rounded to the dtype of the gradient, the reference the
rounded ones.

Why: torch's GELU gradient and a sum for the bias read and write 2 * 3 + 2 bytes an element in bf16. In Triton, one
kernel moves 6 and writes the gradient over its input, so no memory of that size is allocated. cublasLt could apply
GELU while it writes the product, but it computes the approximation by tanh, and the paper's GELU is exact.

Shapes: T tokens, H hidden, I width of GELU, P strips (tokens of one program), C columns of the partial sums.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence

import torch
from typing_extensions import override

from electra_kernels import dropout_add_norm
from electra_kernels.operation_types import LayerDropout
from electra_kernels.partial_sums import sum_of_strips


def gelu_gradient_reference(grad_TI: torch.Tensor, x_TI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of GELU's input, [T, I], and its sum over the tokens, [I], which is fp32 or wider."""
    compute_dtype = torch.promote_types(x_TI.dtype, torch.float32)
    grad_x_TI = torch.ops.aten.gelu_backward(grad_TI, x_TI)
    return grad_x_TI, grad_x_TI.sum(0, dtype=compute_dtype)


Kept = tuple[torch.Tensor | None, ...]  # what a norm's forward pass keeps for its backward pass


def norm_forward(
    x_TH: torch.Tensor,
    residual_TH: torch.Tensor,
    weight_H: torch.Tensor,
    bias_H: torch.Tensor,
    row_B: torch.Tensor,
    eps: float,
    dropout: LayerDropout,
    backend: str,
) -> tuple[torch.Tensor, Kept]:
    """Return LayerNorm(residual + dropout(x)), [T, H] in the dtype of `x_TH`, and what the backward pass needs.

    The inputs are contiguous and of one dtype. The T tokens are those of B rows of equal length; `row_B` are int64 row
    numbers within the global batch. The backend is "triton" or "reference".
    """
    if backend == "triton":
        from electra_kernels.triton.dropout_add_norm import forward_pass

        normed_TH, statistics_2T = forward_pass(x_TH, residual_TH, weight_H, bias_H, row_B, eps, dropout)
        return normed_TH, (x_TH, residual_TH, statistics_2T)
    return dropout_add_norm.reference_forward(x_TH, residual_TH, weight_H, bias_H, row_B, eps, dropout.on_host())


class BackwardPasses(abc.ABC):
    """Backward passes of a layer's norms and GELU; they also collect parameters' gradients, sums over all tokens."""

    @abc.abstractmethod
    def norm(
        self,
        grad_TH: torch.Tensor,
        kept: Kept,
        weight_H: torch.Tensor,
        bias_H: torch.Tensor,
        row_B: torch.Tensor,
        dropout: LayerDropout,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of x and of the residual, [T, H], and collect three sums over the tokens, [H] each.

        The sums are the gradients of the LayerNorm's weight, of its bias, and of a bias added to x. Without dropout,
        the two gradients are the same tensor. `kept` is what `norm_forward` returned and may be overwritten; `grad_TH`
        is contiguous.
        """

    @abc.abstractmethod
    def gelu(self, grad_TI: torch.Tensor, x_TI: torch.Tensor) -> torch.Tensor:
        """Return the gradient of GELU's input, [T, I], and collect its sum over tokens; `grad_TI` may be changed."""

    @abc.abstractmethod
    def sums(self, dtype: torch.dtype) -> Sequence[torch.Tensor]:
        """Return all collected sums in `dtype`, in the order in which they were collected."""


class ReferencePasses(BackwardPasses):
    """Backward passes in plain PyTorch."""

    def __init__(self) -> None:
        self._sums: list[torch.Tensor] = []

    @override
    def norm(
        self,
        grad_TH: torch.Tensor,
        kept: Kept,
        weight_H: torch.Tensor,
        bias_H: torch.Tensor,
        row_B: torch.Tensor,
        dropout: LayerDropout,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kept_for_backward = dropout_add_norm.KeptForBackward(*kept)  # type: ignore[arg-type]
        grad_x_TH, grad_residual_TH, grad_weight_H, grad_bias_H = dropout_add_norm.reference_backward(
            grad_TH, kept_for_backward, weight_H, bias_H
        )
        self._sums += [grad_weight_H, grad_bias_H, grad_x_TH.sum(0)]
        return grad_x_TH.to(grad_TH.dtype), grad_residual_TH.to(grad_TH.dtype)

    @override
    def gelu(self, grad_TI: torch.Tensor, x_TI: torch.Tensor) -> torch.Tensor:
        grad_x_TI, sum_I = gelu_gradient_reference(grad_TI, x_TI)
        self._sums.append(sum_I)
        return grad_x_TI

    @override
    def sums(self, dtype: torch.dtype) -> Sequence[torch.Tensor]:
        return [each.to(dtype) for each in self._sums]


class TritonPasses(BackwardPasses):
    """Backward passes in Triton, whose kernels write their partial sums into one buffer."""

    def __init__(self, grad_TH: torch.Tensor, widths: Sequence[int]) -> None:
        """Allocate the buffer of partial sums; `widths` are the lengths of the sums, in the order of collection."""
        from electra_kernels.triton.dropout_add_norm import num_strips

        self._widths = list(widths)
        self._next_column = 0
        self._partials_PC = torch.empty(num_strips(grad_TH), sum(widths), device=grad_TH.device)

    def norm(
        self,
        grad_TH: torch.Tensor,
        kept: Kept,
        weight_H: torch.Tensor,
        bias_H: torch.Tensor,
        row_B: torch.Tensor,
        dropout: LayerDropout,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one kernel and return both gradients; with dropout, the gradient of x overwrites x."""
        from electra_kernels.triton.dropout_add_norm import backward_strips

        x_TH, residual_TH, statistics_2T = kept
        assert x_TH is not None and residual_TH is not None and statistics_2T is not None
        first_column = self._take_columns(3 * grad_TH.shape[1])
        return backward_strips(
            grad_TH,
            x_TH,
            residual_TH,
            statistics_2T,
            weight_H,
            row_B,
            dropout,
            self._partials_PC,
            first_column,
            in_layer=True,
        )

    def gelu(self, grad_TI: torch.Tensor, x_TI: torch.Tensor) -> torch.Tensor:
        """Overwrite `grad_TI` by the gradient of GELU's input in one kernel launch, and return it."""
        from electra_kernels.triton.gelu_gradient import gradient_strips

        return gradient_strips(grad_TI, x_TI, self._partials_PC, self._take_columns(grad_TI.shape[1]))

    def sums(self, dtype: torch.dtype) -> Sequence[torch.Tensor]:
        """Return all collected sums in `dtype`. Two kernel launches add up the partial sums of all of them at once."""
        assert self._next_column == sum(self._widths), (
            f"{self._next_column} of {sum(self._widths)} columns are written"
        )
        return sum_of_strips(self._partials_PC, dtype=dtype).split(self._widths)

    def _take_columns(self, width: int) -> int:
        """Reserve the next `width` columns of the buffer, and return the index of the first."""
        first_column = self._next_column
        self._next_column += width
        return first_column
