"""Look up entries of a small table, with a gradient that is a matrix product on a GPU: for positions and token types.

Guarantee: values are those of torch's embedding. On a GPU the gradient is the product of a one-hot matrix with the
upstream gradient: a sum in fp32 (fp64 for fp64) that is rounded once. It has no atomic additions, so it repeats bit
for bit where matrix products do. On a CPU torch's own gradient is used, which repeats in any case.

Why: many tokens share an entry of these tables, most of all the first positions of packed rows, in which positions
restart. A review of torch 2.13 found that torch adds the gradients of these tables with atomic operations. The token
table keeps torch's gradient: according to older sources of torch (Embedding.cu), torch sorts its indices and adds each
segment in a fixed order.

Cost: 34 GFLOP for 32,768 tokens, 512 positions and width 1024; the one-hot matrix has 34 MB in bf16.

Shapes: T tokens, R rows of the table, E width of the table.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable


def table_lookup(table_RE: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the table's entries at int64 indices in [0, R), in the shape of `index` with a last dimension of E.

    On a GPU the gradient is a product with a one-hot matrix of T x R elements, so the table must have few rows. It has
    no second derivative there.
    """
    if index.device.type == "cpu":
        return F.embedding(index, table_RE)
    return lookup_with_product_gradient(table_RE, index)


def lookup_with_product_gradient(table_RE: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Look up entries whose gradient is a matrix product, which avoids atomic additions in an order that may vary."""
    entries: torch.Tensor = _Lookup.apply(table_RE, index)
    return entries


def table_gradient(grad_TE: torch.Tensor, index_T: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return the gradient of a table, [R, E], from the gradients `grad_TE` of the entries that were looked up."""
    row_R = torch.arange(num_rows, device=index_T.device)
    one_hot_TR = (index_T[:, None] == row_R).to(grad_TE.dtype)
    return one_hot_TR.t() @ grad_TE


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table_RE: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.num_rows = len(table_RE)
        return F.embedding(index, table_RE)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (index,) = ctx.saved_tensors
        return table_gradient(grad.flatten(0, -2), index.flatten(), ctx.num_rows), None
