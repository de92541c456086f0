"""Run GELU's gradient in Triton, in place, with the sums over tokens that the gradient of the bias needs.

Guarantee: the kernel computes `gelu_gradient.gelu_gradient_reference` in fp32 and rounds each gradient once. The
sums are added in a fixed order.

How: the columns are cut into blocks. Program (p, c) handles tokens p, p + P, p + 2 P and so on, its strip, in block c
of the columns. It writes the gradient over the one that it read, and keeps the strip's sum in registers. The P partial
sums are added afterwards, together with those of the layer's other kernels.

Cost at 32768 x 4096 in bf16: 805 MB, of which 268 MB are written.

Shapes: T tokens, I columns, P strips, C columns of the partial sums.
"""

# Kernels are in Triton's language: their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from electra_kernels.triton.discriminator_tail import gelu_slope

NUM_WARPS = 4
BLOCK = 1024  # columns of a program, 8 for each thread: one load of 16 bytes in bf16
_ROOT_HALF: tl.constexpr = tl.constexpr(0.7071067811865476)


@triton.jit
def gelu_gradient_kernel(
    grad_ptr,  # [T, I], overwritten
    x_ptr,  # [T, I]
    partials_ptr,  # [P, C] fp32
    num_tokens,
    width,
    num_columns,
    first_column,
    BLOCK: tl.constexpr,
):
    """Overwrite the gradient of GELU's output by the gradient of its input x, and write the latter's partial sums.

    Program (p, c) handles every P-th token in block c of the columns. It writes the sums over its tokens to row p of
    `partials_ptr`, from `first_column` on. `width` is the number of columns of x.
    """
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((BLOCK,), tl.float32)
    for token in range(tl.program_id(0), num_tokens, tl.num_programs(0)):
        # 64 bits, because T * I can exceed 2**31. `column * 0 + token` is a tensor also where `token` is a Python int.
        offset = (column * 0 + token).to(tl.int64) * width + column
        grad = tl.load(grad_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        grad_x = grad * gelu_slope(x, tl.erf(x * _ROOT_HALF))
        tl.store(grad_ptr + offset, grad_x.to(grad_ptr.dtype.element_ty), mask=inside)
        total += grad_x
    partial_row_ptr = partials_ptr + tl.program_id(0).to(tl.int64) * num_columns + first_column
    tl.store(partial_row_ptr + column, total, mask=inside)


def gradient_strips(
    grad_TI: torch.Tensor, x_TI: torch.Tensor, partials_PC: torch.Tensor, first_column: int
) -> torch.Tensor:
    """Overwrite `grad_TI`, the contiguous gradient of GELU's output, by the gradient of its input; return `grad_TI`.

    Partial sums of the new gradient over the tokens fill I columns of `partials_PC`, fp32, from `first_column` on.
    """
    num_tokens, width = grad_TI.shape
    num_strips, num_columns = partials_PC.shape
    block = min(BLOCK, triton.next_power_of_2(width))
    grid: Any = (num_strips, triton.cdiv(width, block))
    gelu_gradient_kernel[grid](
        grad_TI,
        x_TI,
        partials_PC,
        num_tokens=num_tokens,
        width=width,
        num_columns=num_columns,
        first_column=first_column,
        BLOCK=block,
        num_warps=NUM_WARPS if block == BLOCK else 1,
        enable_fp_fusion=True,
    )
    return grad_TI
