"""Compiles every Triton kernel in fp16 for the architectures on the command line, and prints JSON, one row a kernel.

The kernels and sizes are those of `electra_kernels.triton.compile_without_gpu`, which compiles them in bf16.
"""

from __future__ import annotations

import json
import sys

from electra_kernels.triton.compile_without_gpu import KernelCase, cases, compile_case


def in_fp16(case: KernelCase) -> KernelCase:
    """Return the case with fp16 in place of bf16, as the launches do: sums of two numbers are kept as pairs."""
    types = {argument: triton_type.replace("bf16", "fp16") for argument, triton_type in case.types.items()}
    constants = dict(case.constants)
    if "PAIR" in constants:
        constants["PAIR"] = True
    return case._replace(types=types, constants=constants)


rows = []
for architecture in map(int, sys.argv[1:]):
    for case in cases():
        if "*bf16" in case.types.values():
            rows.append(compile_case(in_fp16(case), architecture)._asdict())
print(json.dumps(rows))
