"""Profile of one eager training step: time by kind of kernel, the attention kernel that ran. A part of `gpu.py`."""

from __future__ import annotations

import ast
import functools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from gpu_parts.recording import Case, Rows
from gpu_parts.steps import StepBench, step_input, train
from gpu_parts.timing import profile_kernels

_TRITON = Path(__file__).parents[2] / "kernels" / "electra_kernels" / "triton"
# Kinds of other libraries' kernels, with words of kernel names. A kernel belongs to the first kind that matches.
KINDS = {
    "attention": ("flash", "fmha", "attention", "sdpa", "flex"),
    "optimizer": ("adam", "multi_tensor", "foreach"),
    "matrix products": ("gemm", "gemv", "cutlass", "cublas", "nvjet", "xmma", "_mm", "splitk", "::mm"),
    "dropout + norm": ("layer_norm", "layernorm", "dropout"),
    "GELU": ("gelu",),
    "embeddings, gather, scatter": ("index", "gather", "scatter", "embedding"),
    "sorting": ("sort", "scan"),
    "element-wise and copies": ("elementwise", "copy", "memcpy", "memset", "triton_poi", "fill", "::add", "::mul"),
    "reductions": ("reduce", "triton_red", "triton_per", "sum", "softmax"),
}


@functools.cache
def our_kernels() -> dict[str, str]:
    """Return this project's Triton kernels: lower-case name of the function -> file, such as "mlm_head"."""
    found = {}
    for path in sorted(_TRITON.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(mark) for mark in node.decorator_list):
                found[node.name.lower()] = path.stem
    return found


def kind_of(kernel: str) -> str:
    """Return the kind of a kernel by its name: "ours, FILE" for those of this project, else one of `KINDS`.

    A Triton kernel has the name of its function, with or without a suffix. A kernel of no kind is "the rest".
    """
    lower = kernel.lower()
    # The longest name first: one of our names may be the beginning of another.
    for name in sorted(our_kernels(), key=len, reverse=True):
        if lower.startswith(name):
            return f"ours, {our_kernels()[name]}"
    for kind, words in KINDS.items():
        if any(word in lower for word in words):
            return kind
    return "the rest"


def profile_cases(bench: StepBench) -> Iterator[Case]:
    """Yield one eager step of the benchmark's middle micro-batch: its time, then its kernels."""
    batch = bench.batches[1]
    operation, by = f"step B={batch}", f"ours ({bench.backend})"
    yield bench.case(by, batch, functools.partial(bench.module, bench.backend))
    yield Case(operation, "ours, profile", "step", functools.partial(_profile, bench, batch))


def _profile(bench: StepBench, batch: int) -> Rows:
    """Sum the kernels of one step by kind.

    Returns:
        A row for the step with the numbers of launches and of host operators, one for the attention kernels by name,
        one for each kind of kernel, and one for each of the ten kernels that take the longest.
    """
    module = bench.module(bench.backend)
    given = step_input(module, bench.ids(batch))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5, fused=not bench.smoke)
    for _ in range(3):  # The optimizer's states are made, and kernels compiled, before the profile.
        train(module, optimizer, given)
    spent, launches, host_operators = profile_kernels(lambda: train(module, optimizer, given))
    by_kind: Counter[str] = Counter()
    launches_by_kind: Counter[str] = Counter()
    for kernel, ms in spent.items():
        by_kind[kind_of(kernel)] += ms
        launches_by_kind[kind_of(kernel)] += launches[kernel]
    names = [kernel for kernel, _ in spent.most_common() if kind_of(kernel) == "attention"]
    counts = {"launches": launches.total(), "host_operators": host_operators}
    rows: Rows = [
        {"operation": f"profile B={batch}", "by": "sum of all kernels", "ms": spent.total(), **counts},
        {
            "operation": "attention kernels",
            "by": module.attention.backend,
            "kernels": [name[:120] for name in names],
            "reason": module.attention.reason,
        },
    ]
    for kind, ms in by_kind.most_common():
        rows.append({"operation": "kernels", "by": kind, "ms": ms, "launches": launches_by_kind[kind]})
    for kernel, ms in spent.most_common(10):
        rows.append({"operation": "kernel", "by": kernel[:120], "ms": ms, "launches": launches[kernel]})
    return rows
