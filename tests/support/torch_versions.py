"""What supported versions of torch lack or do otherwise than the pinned one, for the tests that meet it."""

from __future__ import annotations

import re

import pytest
import torch

IS_2_8 = torch.__version__.startswith("2.8.")
needs_products_on_meta = pytest.mark.skipif(
    IS_2_8, reason="torch 2.8 has no product of bf16 matrices with an fp32 result on meta"
)
needs_other_kernels = pytest.mark.skipif(IS_2_8, reason="torch 2.8 cannot run the kernels of flash-attn-3")


def without_gloo_lines(output: str) -> str:
    """Return what a process has printed without the lines on connected ranks that gloo prints in torch 2.8."""
    return re.sub(r"\[Gloo\] Rank .*\n", "", output)
