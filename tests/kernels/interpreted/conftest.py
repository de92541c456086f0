"""These tests run Triton's interpreter, which must be chosen before Triton is imported: a process of their own.

`tests/kernels/test_interpreter.py` starts it. By hand: `TRITON_INTERPRET=1 pytest tests/kernels/interpreted`.

What is shown of a kernel in fp16 or bf16: the values that it rounds for the store are in fp32 no further from float64
than the reference's (its launch with fp32 tensors that hold the same values), and what it stores is their rounding.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch


@pytest.fixture(
    params=[
        pytest.param(torch.float32, id="fp32", marks=pytest.mark.sample),
        pytest.param(torch.float16, id="fp16", marks=pytest.mark.drill),
        pytest.param(torch.bfloat16, id="bf16"),
    ]
)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Each dtype of a kernel's rows."""
    return request.param


if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
else:
    import triton.language as tl
    from triton.runtime import interpreter

    # The interpreter exchanges the language's functions in every call of a device function; once for each launch and
    # set of modules is enough, and five times as fast.
    _exchange, _launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    _exchanged: set[frozenset[int]] = set()

    def _exchange_once(function: Any) -> Any:
        modules = frozenset(id(value) for value in function.__globals__.values() if value in (tl, tl.core))
        if modules in _exchanged:
            return None
        _exchanged.add(modules)
        return _exchange(function)

    def _launch_afresh(executor: Any, *arguments: Any, **more: Any) -> None:
        _exchanged.clear()
        _launch(executor, *arguments, **more)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = _exchange_once, _launch_afresh


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Inputs are the same in every run: a comparison of rounding errors must not be a lottery."""
    torch.manual_seed(20)


@pytest.fixture
def assert_no_worse() -> Callable[[list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]], None]:
    """`assert_no_worse([(kernel, reference, exact), ...])`: no tolerance.

    The root-mean-square error against float64 over all triples: independent draws are pooled, because on a handful of
    numbers, where both are a rounding from the truth, whose error is smaller is a matter of luck.
    """

    def check(triples: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> None:
        for kernel, reference, exact in triples:
            assert kernel.dtype == reference.dtype == torch.float32
            assert exact.dtype == torch.float64

        def error(which: int) -> float:
            return torch.cat([(t[which].double() - t[2]).flatten() for t in triples]).norm().item()

        assert error(0) <= error(1)

    return check


@pytest.fixture
def assert_rounded() -> Callable[[torch.Tensor, torch.Tensor], None]:
    """`assert_rounded(stored, values)`: the stored numbers are the fp32 values to the nearest of their type.

    Exactly so, but for bf16: the interpreter truncates where hardware rounds, so 1 unit in the last place is allowed.
    """

    def check(stored: torch.Tensor, values: torch.Tensor) -> None:
        assert values.dtype == torch.float32
        if stored.dtype == torch.bfloat16:
            bits, expected = (t.contiguous().view(torch.int16).int() for t in (stored, values.bfloat16()))
            assert (bits - expected).abs().max() <= 1
        else:
            assert torch.equal(stored, values.to(stored.dtype))

    return check
