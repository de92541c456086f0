"""Rotate queries and keys and compute GeGLU, in Triton, in both directions.

Guarantee: the kernels compute `modern_layer.rotate_query_and_key`, `modern_layer.geglu_reference` and their gradients
in fp32, and round each result once.

How: one program (thread block) rotates one token. Query and key of a token are neighbours, so that it reads and writes
2 N heads as one block; the value is not touched. For GeGLU the columns are cut into blocks. Program (t, c) handles
block c of token t. The backward kernel writes the gradients of inner values and gates over the numbers that it read.

Exactness: the rounding error of a product that enters a result is computed and added (`product_and_error`), so that a
result has about the error of one rounding. The kernels wait for memory, so that this costs nothing.

Shapes: T tokens, N heads, D features of a head, H = N * D, F = D / 2 frequencies, I width of the feed-forward network.
"""

# Kernels are in Triton's language: their arguments have no Python types.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from electra_kernels.triton.arithmetic import cdf_and_density, gelu_slope

_PAIRS_PER_WARP = 256  # 8 for each thread: loads of 16 bytes in bf16
_MOST_WARPS = 8
GEGLU_BLOCK = 1024  # columns of a program, 8 for each thread: one load of 16 bytes in bf16
NUM_WARPS = 4  # of GeGLU


@triton.jit
def product_and_error(a, b):
    """Return a * b rounded, and the rounding error, which is exact."""
    product = a * b
    return product, tl.fma(a, b, -product)


@triton.jit
def sum_of_products(a, b, c, d):
    """Return a * b + c * d with the error of about one rounding."""
    product, product_low = product_and_error(c, d)
    return tl.fma(a, b, product) + product_low


@triton.jit
def rotary_kernel(
    qkv_ptr,  # [T, 3 H], of which the first 2 H columns are overwritten
    cos_ptr,  # [T, F] fp32
    sin_ptr,  # [T, F] fp32
    width,
    num_rotated,
    direction,
    NUM_PAIRS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """Rotate the heads of one token's query and key; program t handles token t.

    Args:
        width: Columns of `qkv_ptr`, 3 H.
        num_rotated: Heads of query and key together, 2 N.
        direction: 1.0, or -1.0 for the opposite angles.
        NUM_PAIRS: Pairs of features of a head, F.
        BLOCK_N, BLOCK_F: Powers of 2, at least 2 N and F.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_N)
    pair = tl.arange(0, BLOCK_F)
    exists = pair < NUM_PAIRS
    inside = (head < num_rotated)[:, None] & exists[None, :]
    cos = tl.load(cos_ptr + token * NUM_PAIRS + pair, mask=exists, other=0.0)[None, :]
    sin = tl.load(sin_ptr + token * NUM_PAIRS + pair, mask=exists, other=0.0)[None, :] * direction
    first_ptr = qkv_ptr + token * width + head[:, None] * (2 * NUM_PAIRS) + pair[None, :]
    second_ptr = first_ptr + NUM_PAIRS
    first = tl.load(first_ptr, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(second_ptr, mask=inside, other=0.0).to(tl.float32)
    new_first = sum_of_products(first, cos, -second, sin)
    new_second = sum_of_products(second, cos, first, sin)
    tl.store(first_ptr, new_first.to(qkv_ptr.dtype.element_ty), mask=inside)
    tl.store(second_ptr, new_second.to(qkv_ptr.dtype.element_ty), mask=inside)


def rotate(qkv: torch.Tensor, num_heads: int, cos_BSF: torch.Tensor, sin_BSF: torch.Tensor, is_gradient: bool) -> None:
    """Overwrite query and key in `qkv`, contiguous [T, 3 H], by their rotations; gradients are rotated backwards."""
    num_tokens, width = qkv.shape
    num_pairs = cos_BSF.shape[-1]
    block_heads = triton.next_power_of_2(2 * num_heads)
    block_pairs = triton.next_power_of_2(num_pairs)
    grid: Any = (num_tokens,)
    rotary_kernel[grid](
        qkv,
        cos_BSF,
        sin_BSF,
        width=width,
        num_rotated=2 * num_heads,
        direction=-1.0 if is_gradient else 1.0,
        NUM_PAIRS=num_pairs,
        BLOCK_N=block_heads,
        BLOCK_F=block_pairs,
        num_warps=max(1, min(_MOST_WARPS, block_heads * block_pairs // _PAIRS_PER_WARP)),
        enable_fp_fusion=True,
    )


@triton.jit
def gelu_times(x, cdf, factor):
    """Return factor * gelu(x) = factor * x * cdf(x)."""
    product, product_low = product_and_error(x, factor)
    return tl.fma(product, cdf, product_low * cdf)


@triton.jit
def geglu_forward_kernel(
    expanded_ptr,  # [T, 2 I]
    out_ptr,  # [T, I]
    width,
    BLOCK: tl.constexpr,
):
    """Write gelu(inner) * gate for one block of one token; `width` is I."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    inner_ptr = expanded_ptr + token * (2 * width) + column
    inner = tl.load(inner_ptr, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(inner_ptr + width, mask=inside, other=0.0).to(tl.float32)
    cdf, _ = cdf_and_density(inner)
    gated = gelu_times(inner, cdf, gate)
    tl.store(out_ptr + token * width + column, gated.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def geglu_backward_kernel(
    grad_ptr,  # [T, I]
    expanded_ptr,  # [T, 2 I], overwritten
    width,
    BLOCK: tl.constexpr,
):
    """Overwrite inner values and gates by their gradients for one block of one token; `width` is I."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    grad = tl.load(grad_ptr + token * width + column, mask=inside, other=0.0).to(tl.float32)
    inner_ptr = expanded_ptr + token * (2 * width) + column
    inner = tl.load(inner_ptr, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(inner_ptr + width, mask=inside, other=0.0).to(tl.float32)
    cdf, density = cdf_and_density(inner)
    slope = gelu_slope(inner, cdf, density)
    grad_gelu, grad_gelu_low = product_and_error(grad, gate)
    grad_inner = tl.fma(grad_gelu, slope, grad_gelu_low * slope)
    grad_gate = gelu_times(inner, cdf, grad)
    tl.store(inner_ptr, grad_inner.to(expanded_ptr.dtype.element_ty), mask=inside)
    tl.store(inner_ptr + width, grad_gate.to(expanded_ptr.dtype.element_ty), mask=inside)


def geglu_forward(expanded: torch.Tensor) -> torch.Tensor:
    """Return gelu(inner) * gate, [..., I], for contiguous `expanded`, [..., 2 I], in one launch."""
    out = expanded.new_empty(*expanded.shape[:-1], expanded.shape[-1] // 2)
    geglu_forward_kernel[_grid(out)](expanded, out, width=out.shape[-1], **_launch_options(out))
    return out


def overwrite_by_geglu_gradient(grad: torch.Tensor, expanded: torch.Tensor) -> torch.Tensor:
    """Overwrite `expanded`, [..., 2 I], by its gradient in one launch, and return it; both are contiguous."""
    geglu_backward_kernel[_grid(grad)](grad, expanded, width=grad.shape[-1], **_launch_options(grad))
    return expanded


def _grid(out: torch.Tensor) -> Any:
    width = out.shape[-1]
    return out.numel() // width, triton.cdiv(width, _block(width))


def _block(width: int) -> int:
    return min(GEGLU_BLOCK, triton.next_power_of_2(width))


def _launch_options(out: torch.Tensor) -> dict[str, Any]:
    block = _block(out.shape[-1])
    return {"BLOCK": block, "num_warps": NUM_WARPS if block == GEGLU_BLOCK else 1, "enable_fp_fusion": True}
