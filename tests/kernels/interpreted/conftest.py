"""These tests run Triton's interpreter, which must be chosen before Triton is imported: a process of their own.

`tests/kernels/test_interpreter.py` starts it. By hand: `TRITON_INTERPRET=1 pytest tests/kernels/interpreted`.
"""

import os
from collections.abc import Callable

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Inputs are the same in every run: a comparison of rounding errors must not be a lottery."""
    torch.manual_seed(20)


@pytest.fixture
def assert_no_worse() -> Callable[..., None]:
    """`assert_no_worse([(kernel, reference, exact), ...], stored)`: errors against float64, pooled over the triples.

    The kernel's root-mean-square error may exceed the reference's by one rounding of the result: half a unit in the
    last place of the stored type, and a whole one for bf16, which the interpreter truncates.
    """

    def check(triples: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], stored: torch.dtype) -> None:
        def norm(tensors: list[torch.Tensor]) -> float:
            return torch.cat([t.double().flatten() for t in tensors]).norm().item()

        rounding = torch.finfo(stored).eps * (1.0 if stored == torch.bfloat16 else 0.5)
        kernel_error, reference_error = (norm([t[i] - t[2] for t in triples]) for i in (0, 1))
        assert kernel_error <= reference_error + rounding * norm([t[2] for t in triples])

    return check
