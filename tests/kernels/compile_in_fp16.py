"""Compiles every Triton kernel in fp16 for the architectures on the command line, and prints JSON, one row a kernel.

The kernels and sizes are those of `electra_kernels.triton.compile_without_gpu`, which compiles them in bf16.
"""

from __future__ import annotations

import json
import sys

from electra_kernels.triton.compile_without_gpu import cases, compile_case, in_dtype

rows = []
for architecture in map(int, sys.argv[1:]):
    for case in cases():
        if "*bf16" in case.types.values():
            rows.append(compile_case(in_dtype(case, "fp16"), architecture)._asdict())
print(json.dumps(rows))
