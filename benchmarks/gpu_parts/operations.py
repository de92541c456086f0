"""Times the generator's head and every other fused operation against their rivals: two parts of `gpu.py`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from gpu_parts.cases import GpuCase, Sizes, cases, head_inputs, our_head, rival_heads
from gpu_parts.recording import Case, Row, Rows
from gpu_parts.timing import time_and_peak


def head_cases(sizes: Sizes, device: str, backend: str, dtype: torch.dtype) -> Iterator[Case]:
    """Yield forward, sample and backward of our generator head and its rivals at each number of masked rows.

    Args:
        sizes: Sizes of the inputs; `masked` holds the numbers of rows.
        device: Device of the inputs; torch.compile is left out on a CPU.
        backend: Implementation of our head.
        dtype: Type of the inputs.
    """
    heads = {f"ours ({backend})": lambda inputs: our_head(inputs, sizes.vocab, backend)}
    heads |= rival_heads(sizes.vocab, with_compile=device == "cuda")
    for num_rows in sizes.masked:
        operation = f"head M={num_rows}"
        for name, head in heads.items():

            def run(
                name: str = name, head: Callable = head, num_rows: int = num_rows, operation: str = operation
            ) -> Rows:
                inputs = head_inputs(sizes, num_rows, device, dtype)

                def call() -> None:
                    loss, _ = head(inputs)
                    torch.autograd.grad(loss, inputs.differentiable())

                return [{"operation": operation, "by": name, **time_and_peak(call)}]

            yield Case(operation, name, "compiled head" if name == "torch.compile" else "head", run)


def operation_cases(sizes: Sizes, device: str, backends: list[str], dtype: torch.dtype) -> Iterator[Case]:
    """Yield forward and backward of every operation except the head: ours, eager torch and torch.compile.

    A row also has `tb_per_s`: the least memory traffic of the operation divided by its time, in TB/s.

    Args:
        sizes: Sizes of the inputs.
        device: Device of the inputs; torch.compile is left out on a CPU.
        backends: Implementations of ours; only the discriminator tail is timed with all, the others with the first.
        dtype: Type of the inputs.
    """
    for subject in cases(sizes, device, dtype):
        our_backends = backends if subject.name == "discriminator tail" else backends[:1]
        functions: dict[str, Callable[[list[torch.Tensor]], torch.Tensor]] = {
            f"ours ({backend})": functools.partial(_run_ours, subject, backend) for backend in our_backends
        }
        functions["eager"] = subject.eager
        if device == "cuda":
            functions["torch.compile"] = torch.compile(subject.eager, dynamic=False)
        for name, function in functions.items():
            run = functools.partial(_time, subject, name, function)
            yield Case(subject.name, name, "compiled operation" if name == "torch.compile" else "operation", run)


def _time(subject: GpuCase, name: str, function: Callable[[list[torch.Tensor]], torch.Tensor]) -> Rows:
    """Time forward and backward of one implementation of an operation."""
    upstream = torch.ones_like(subject.eager(subject.inputs)) if subject.inputs else None

    def call() -> None:
        out = function(subject.inputs)
        if upstream is not None:
            torch.autograd.grad(out, subject.inputs, upstream.to(out.dtype))

    row: Row = {"operation": subject.name, "by": name, **time_and_peak(call)}
    return [row | {"tb_per_s": subject.num_bytes / row["ms"] / 1e9}]


def _run_ours(subject: GpuCase, backend: str, inputs: list[torch.Tensor]) -> torch.Tensor:
    """Run our implementation of an operation; with the first two arguments bound, it takes inputs as the rivals do."""
    return subject.ours(inputs, backend)
