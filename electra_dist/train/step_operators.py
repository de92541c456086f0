"""Count and sort the operators of a training step, and time its matrix products alone.

Guarantee: the counts depend neither on the load of the machine nor on its speed. The time of the products alone is a
lower bound of the step's time on this machine.

How: a dispatch mode of torch counts each operator of the forward pass, the backward pass and the update, including
views and allocations. A function mode counts the calls that read the value of a tensor; on a GPU the host waits for
the device in each of them.

Limits: on a CPU every tensor counts as a tensor on the device. Reads by C++ code are counted only for the operators in
`_READING_OPERATORS`.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# Methods of a tensor that return its value to Python.
_READING_METHODS = {
    "item",
    "tolist",
    "cpu",
    "numpy",
    "__bool__",
    "__float__",
    "__int__",
    "__index__",
    "__contains__",
}
# Operators whose result or whose shape the host needs, so that it waits for the device.
_READING_OPERATORS = {"nonzero", "equal", "is_nonzero", "masked_select"}


class OperatorCounter:
    """Context manager that counts all torch operators, and all reads of a tensor's value by the host, in its block."""

    def __init__(self) -> None:
        self.operators: Counter[str] = Counter()  # such as "aten.add_.Tensor" -> number of its calls
        self.host_reads: Counter[str] = Counter()  # method or operator that reads values, such as "item" -> calls
        self._modes = (_CountedOperators(self), _CountedMethods(self))

    @property
    def num_operators(self) -> int:
        """Return the number of calls of all operators."""
        return self.operators.total()

    @property
    def num_host_reads(self) -> int:
        """Return how often the host read a tensor's value from the device."""
        return self.host_reads.total()

    def __enter__(self) -> OperatorCounter:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(kind, error, trace)


class _CountedOperators(TorchDispatchMode):
    """Mode that counts every operator that torch dispatches, in the forward and backward pass and the update."""

    def __init__(self, counter: OperatorCounter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._counter.operators[str(func)] += 1
        name = func.overloadpacket.__name__
        if name in _READING_OPERATORS:
            self._counter.host_reads[name] += 1
        return func(*args, **(kwargs or {}))


class _CountedMethods(TorchFunctionMode):
    """Mode that counts the tensor methods that return values to Python, such as `item`."""

    def __init__(self, counter: OperatorCounter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _READING_METHODS:
            self._counter.host_reads[name] += 1
        return func(*args, **(kwargs or {}))


_PATTERNS = {
    "optimizer": r"_foreach|Adam|Lamb|multi_tensor|clip|linalg_vector_norm",
    "attention": r"attention|flash|fmha|flex|cudnn.*sdpa",
    "heads and sampling": r"MlmHead|row_kernel|RtdLoss|tail_(forward|backward)|sample_kernel|electra_row_pass",
    "dropout + add + norm": r"norm|Dropout|keep_grid",
    "matrix products": r"mm\b|addmm|bmm|linear|gemm|cutlass|xmma|nvjet",
    "GELU": r"gelu",
    "softmax": r"softmax",
    "embeddings and gather": r"embedding|gather|scatter|index|replace_kernel",
    "communication": r"c10d|nccl|gloo|all_reduce|all_gather|reduce_scatter|broadcast|barrier",
    "random numbers and masks": r"philox|sort|topk|cumsum|cummax|searchsorted|bitwise|shift__|random|uniform|^mask_k",
    "copies": r"copy|clone|cat|stack|contiguous|memcpy|memset|zero_|fill_|to_copy",
    "element-wise": r"elementwise|reduce_kernel|\b(add|mul|r?sub|div|sum|mean|where|sigmoid|pow|sqrt|neg|eq|ne)_?\b",
}
_COMPILED = {part: re.compile(pattern, re.IGNORECASE) for part, pattern in _PATTERNS.items()}

OTHER = "other operators"
PARTS = (*_PATTERNS, OTHER)


def part_of(operator: str) -> str:
    """Return the part of a step (one of `PARTS`) to which an operator, such as "aten::addmm", or a kernel belongs."""
    for part, pattern in _COMPILED.items():
        if pattern.search(operator):
            return part
    return OTHER


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
    """Return the seconds that matrix products take one after another with nothing between them.

    `shapes` says how often each product occurs: its fastest time out of three is multiplied by this number.
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
