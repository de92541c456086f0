"""Counts the torch operators that the host starts, and how often the host reads a value from the device.

Guarantee: what is counted does not depend on the load of the machine or on its speed.

How: a dispatch mode of torch counts each operator of the forward pass, the backward pass and the update, views and
allocations among them. A function mode counts the calls that read a tensor's value, for which the host of a GPU waits.

Limits: on a CPU every tensor counts as one of the device. Reads by C++ code are counted for the operators of
`_READING_OPERATORS` only.
"""

from __future__ import annotations

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
    """Context in which every torch operator and every read of a value by the host is counted.

    Attributes:
        operators: Calls of each operator, by its name such as "aten.add_.Tensor".
        host_reads: Reads of each kind, by the name of the method or the operator.
    """

    def __init__(self) -> None:
        """Start at 0."""
        self.operators: Counter[str] = Counter()
        self.host_reads: Counter[str] = Counter()
        self._modes = (_CountedOperators(self), _CountedMethods(self))

    @property
    def num_operators(self) -> int:
        """Return the number of operators that were started."""
        return self.operators.total()

    @property
    def num_host_reads(self) -> int:
        """Return how often the host read a value from the device."""
        return self.host_reads.total()

    def __enter__(self) -> OperatorCounter:
        """Begin to count."""
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop counting; an exception is passed on."""
        for mode in reversed(self._modes):
            mode.__exit__(kind, error, trace)


class _CountedOperators(TorchDispatchMode):
    """Dispatch mode that counts operators in a counter."""

    def __init__(self, counter: OperatorCounter) -> None:
        """Store the counter."""
        super().__init__()
        self._counter = counter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count an operator and run it."""
        self._counter.operators[str(func)] += 1
        name = func.overloadpacket.__name__
        if name in _READING_OPERATORS:
            self._counter.host_reads[name] += 1
        return func(*args, **(kwargs or {}))


class _CountedMethods(TorchFunctionMode):
    """Function mode that counts the methods of tensors that return a value to Python."""

    def __init__(self, counter: OperatorCounter) -> None:
        """Store the counter."""
        super().__init__()
        self._counter = counter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count a read and run it."""
        name = getattr(func, "__name__", "")
        if name in _READING_METHODS:
            self._counter.host_reads[name] += 1
        return func(*args, **(kwargs or {}))
