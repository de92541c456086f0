"""Count the operators that the host launches and its reads of the device; sort operators into the parts of a step.

Guarantee: the counts depend neither on the load of the machine nor on its speed.

How: a dispatch mode of torch counts each operator of the forward pass, the backward pass and the update, including
views and allocations. A function mode counts the calls that read the value of a tensor; on a GPU the host waits for
the device in each of them.

Limits: on a CPU every tensor counts as a tensor on the device. Reads by C++ code are counted only for the operators in
`_READING_OPERATORS`.
"""

from __future__ import annotations

import re
from collections import Counter
from types import TracebackType
from typing import Any

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
    """Context manager that counts all torch operators, and all reads of a tensor's value by the host, in its block.

    Attributes:
        operators: Name of each operator, such as "aten.add_.Tensor" -> number of its calls.
        host_reads: Name of each method or operator that reads values, such as "item" -> number of its calls.
    """

    def __init__(self) -> None:
        self.operators: Counter[str] = Counter()
        self.host_reads: Counter[str] = Counter()
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
