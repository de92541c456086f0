"""Sum parameters' gradients over tokens: kernels write partial sums, one for each strip, which are then added.

A strip is the tokens of one program (thread block) of a backward kernel. There are no atomic additions, so the order
of additions, and with it the result, is the same in every run.

Shapes: P strips, C columns of the partial sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def sum_of_strips(partials: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Add up the partial sums of P strips, fp32 [P, ...], in fp64, by two launches; return the total in `dtype`."""
    return partials.sum(0, dtype=torch.float64).to(dtype)


class TokenSums:
    """Sums over all tokens that the backward passes of a layer collect one after another, each a parameter's gradient.

    Under Triton the kernels write their partial sums into one buffer, so that one sum over the strips gives them all.
    """

    partials_PC: torch.Tensor | None  # fp32 buffer of the kernels; None for the plain-PyTorch reference

    def __init__(self, backend: str, grad: torch.Tensor, widths: Sequence[int]) -> None:
        """Allocate the buffer; `widths` are those of the sums in the order of collection, `grad` a norm's gradient."""
        self._widths = list(widths)
        self._sums: list[torch.Tensor] = []
        self._next_column = 0
        self.partials_PC = None
        if backend == "triton":
            from electra_kernels.triton.dropout_add_norm import num_strips

            self.partials_PC = torch.empty(num_strips(grad), sum(widths), device=grad.device)

    def add(self, *sums: torch.Tensor) -> None:
        """Collect sums that the reference has computed."""
        self._sums += sums

    def take_columns(self, width: int) -> int:
        """Reserve the next `width` columns of the buffer for a kernel, and return the index of the first."""
        first_column = self._next_column
        self._next_column += width
        return first_column

    def totals(self, dtype: torch.dtype) -> Sequence[torch.Tensor]:
        """Return all sums in `dtype`, in the order of collection; under Triton they share memory."""
        if self.partials_PC is None:
            return [each.to(dtype) for each in self._sums]
        assert self._next_column == sum(self._widths), (
            f"{self._next_column} of {sum(self._widths)} columns are written"
        )
        return sum_of_strips(self.partials_PC, dtype).split(self._widths)
