"""Records the matrix products of a training step, and computes them alone: the ceiling of the step's speed.

A product is recorded with the shapes, the strides and the dtype of both factors, because the time of a product depends
on all three. The additions that are part of a product (`addmm`) are left out.

Limits: the factors hold random numbers, and equal products share their factors, which may therefore be in a cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Operator -> position of its first factor among the arguments; the second factor follows.
_FIRST_FACTOR = {
    torch.ops.aten.mm: 0,
    torch.ops.aten.bmm: 0,
    torch.ops.aten.addmm: 1,
    torch.ops.aten.addmm_: 1,
    torch.ops.aten.baddbmm: 1,
}


class Factor(NamedTuple):
    """One factor of a recorded product: what the time of the product depends on."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def random_tensor(self) -> torch.Tensor:
        """Return a tensor of this shape, layout and dtype that holds normal random numbers."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype).normal_()


Product = tuple[Factor, Factor]


class _Recorder(TorchDispatchMode):
    """Records both factors of every matrix product that torch computes in this thread."""

    def __init__(self) -> None:
        """Begin with no products."""
        super().__init__()
        self.products: list[Product] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record the factors if `function` is a matrix product, and compute it in any case."""
        first = _FIRST_FACTOR.get(function.overloadpacket)
        if first is not None:
            left, right = (Factor(x.shape, x.stride(), x.dtype) for x in args[first : first + 2])
            self.products.append((left, right))
        return function(*args, **(kwargs or {}))


def products_of(step: Callable[[], object]) -> list[Product]:
    """Take a step and return its matrix products, forward and backward, in the order in which they are computed.

    Args:
        step: takes one training step in the calling thread.
    """
    with _Recorder() as recorder:
        step()
    return recorder.products


def flops_of(products: list[Product]) -> int:
    """Return the floating-point operations of the products; a multiplication and an addition are two."""
    return sum(2 * torch.Size(left.shape).numel() * right.shape[-1] for left, right in products)


def alone(products: list[Product]) -> Callable[[], None]:
    """Return a function that computes the products one after another, with nothing between them.

    Factors and results are allocated once, before the first call.
    """
    tensors = {product: tuple(factor.random_tensor() for factor in product) for product in set(products)}
    results = {product: torch.matmul(left, right) for product, (left, right) in tensors.items()}

    def compute_all() -> None:
        """Compute every product once, in the recorded order."""
        for product in products:
            left, right = tensors[product]
            torch.matmul(left, right, out=results[product])

    return compute_all
