"""Measure how long the matrix products of a step take alone, a lower bound of the step's time on this machine."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable

import torch

ProductShape = tuple[tuple[int, ...], tuple[int, ...]]  # shapes of the two factors
# Operator -> number of its first factor. The gradient of the token table is added up in place.
_PRODUCTS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::addmm_": 1, "aten::baddbmm": 1}
_REPEATS = 3


def product_shapes(events: Iterable[torch.autograd.profiler_util.FunctionEvent]) -> Counter[ProductShape]:
    """Count the matrix products in the events of a profile (with `record_shapes`), by the shapes of both factors."""
    shapes: Counter[ProductShape] = Counter()
    for event in events:
        first = _PRODUCTS.get(event.name)
        if first is None:
            continue
        factors: list[list[int]] = event.input_shapes[first : first + 2]  # type: ignore[assignment]
        shapes[tuple(factors[0]), tuple(factors[1])] += 1
    return shapes


def products_alone_s(shapes: Counter[ProductShape], device: torch.device, dtype: torch.dtype) -> float:
    """Return the seconds that the matrix products take one after another with nothing between them.
    Each distinct product is timed `_REPEATS` times; its fastest time counts as often as the product occurs.
    """
    total_s = 0.0
    for (left_shape, right_shape), count in shapes.items():
        left = torch.randn(left_shape, device=device, dtype=dtype)
        right = torch.randn(right_shape, device=device, dtype=dtype)
        torch.matmul(left, right)
        times = [_time_product(left, right) for _ in range(_REPEATS)]
        total_s += count * min(times)
    return total_s


def _time_product(left: torch.Tensor, right: torch.Tensor) -> float:
    _wait_for(left.device)
    begin = time.perf_counter()
    torch.matmul(left, right)
    _wait_for(left.device)
    return time.perf_counter() - begin


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
