"""Defines an embedding of a small table whose gradient on a GPU is a matrix product, for positions and token types.

Guarantee: values, parameters and their names are those of nn.Embedding. On a GPU the gradient is a product of a
one-hot matrix with the upstream gradient: a sum in fp32 (fp64 for fp64) that is rounded once, without atomic
additions, so it repeats bit for bit where matrix products do. On a CPU torch's own gradient is used, which repeats
anyway.

Why: many tokens share an entry (in packed rows, where positions restart, the first ones most of all). A review of
torch 2.13 found that torch adds the gradients of these two tables with atomic operations. Of the token table, which
keeps torch's gradient, older sources of torch (Embedding.cu) sort the indices and add each segment in a fixed order.

Cost: 34 GFLOP for 32,768 tokens, 512 positions and width 1024; the one-hot matrix has 34 MB in bf16.

Shapes: T tokens, R rows of the table, E width of the table.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable


class SmallEmbedding(nn.Embedding):
    """Embedding of a table with few rows; see the module's docstring for its gradient on a GPU."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the table's entries for int64 indices of any shape, with the width as a last dimension."""
        if input.device.type == "cpu":
            return super().forward(input)
        return _lookup(self.weight, input)


def _lookup(table_RE: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the entries of a table, differentiable once, with the gradient of `table_gradient`."""
    entries: torch.Tensor = _Lookup.apply(table_RE, index)
    return entries


def table_gradient(grad_TE: torch.Tensor, index_T: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return the gradient of a table whose entries were looked up, [R, E] in the dtype of `grad_TE`.

    Args:
        grad_TE: gradients of the looked-up entries.
        index_T: int64 row of the table for each of them, in [0, num_rows).
        num_rows: R.
    """
    row_R = torch.arange(num_rows, device=index_T.device)
    one_hot_TR = (index_T[:, None] == row_R).to(grad_TE.dtype)
    return one_hot_TR.t() @ grad_TE


class _Lookup(torch.autograd.Function):
    """Autograd function of a lookup in a table; it keeps only the indices for backward."""

    @staticmethod
    def forward(ctx: Any, table_RE: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return the entries of the table at the indices, of the indices' shape with E as a last dimension."""
        ctx.save_for_backward(index)
        ctx.num_rows = len(table_RE)
        return nn.functional.embedding(index, table_RE)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the gradient of the table; the indices have none."""
        (index,) = ctx.saved_tensors
        return table_gradient(grad.flatten(0, -2), index.flatten(), ctx.num_rows), None
