"""Sort the operators that torch's profiler reports into the parts of a training step."""

from __future__ import annotations

import re

# Part of the step -> names of its operators and kernels. The first part that matches takes an operator, so that, for
# example, the copies that an attention kernel makes for itself do not count as copies.
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
