"""Rotate queries and keys, and multiply GELU by gates: what a layer of `model.architecture: modern` adds to products.

Rotary positions: queries and keys are rotated by angles that are proportional to their positions. The angles are those
of Hugging Face's ModernBERT, computed in fp32 by the same operations. The score of a query and a key then depends on
the distance of their positions only (Su et al. 2021, arXiv 2104.09864). The gradient of a rotation is the rotation by
the opposite angle, so nothing but the angles is kept for the backward pass.

GeGLU: GELU of the inner values times the gates (Shazeer 2020, arXiv 2002.05202).

Guarantee: rotations are computed in fp32 or wider and rounded once. The kernel of GeGLU computes in fp32 and rounds
each result once; its reference, which runs on a CPU, rounds GELU's result as well.

Cost at 8,192 tokens of width 1,024, with I = 2,624, in bf16: a rotation moves 67 MB in place and in one launch; GeGLU
moves 129 MB forward and 215 MB backward, by one launch each. Separate operations move the values too, make six
launches for a rotation, and move 215 and 473 MB for GeGLU, whose result of GELU they keep.

Shapes: B rows, S tokens, T = B * S, N heads, D features of a head, H = N * D, F = D / 2 frequencies, I width of the
feed-forward network.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable


class Rotation(NamedTuple):
    """Cosines and sines of the angles by which pairs of features of each token are rotated."""

    cos_BSF: torch.Tensor  # fp32, for B rows, S tokens and F pairs of features; contiguous
    sin_BSF: torch.Tensor  # fp32, as above


def rotation_of(position_BS: torch.Tensor, head_width: int, theta: float) -> Rotation:
    """Return each token's rotation in fp32: pair f of features turns by position * theta ** (-2 f / head_width)."""
    exponent_F = torch.arange(0, head_width, 2, device=position_BS.device).float() / head_width
    frequency_F = 1.0 / (theta**exponent_F)
    angle_BSF = position_BS.float()[:, :, None] * frequency_F
    return Rotation(cos_BSF=angle_BSF.cos(), sin_BSF=angle_BSF.sin())


def rotate_query_and_key(qkv_BS3ND: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Return query and key rotated by their positions, and the value as it is, all in one tensor [B, S, 3, N, D].

    Features f and f + D / 2 of a head form the pair that is rotated. This is the definition of `rotate_in_place` in
    plain PyTorch. Its gradients come from autograd.
    """
    query_and_key, value = qkv_BS3ND.split((2, 1), dim=2)
    compute_dtype = torch.promote_types(qkv_BS3ND.dtype, torch.float32)
    cos = rotation.cos_BSF[:, :, None, None]
    sin = rotation.sin_BSF[:, :, None, None]
    first, second = query_and_key.to(compute_dtype).chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([rotated.to(value.dtype), value], dim=2)


def rotate_in_place(qkv: torch.Tensor, num_heads: int, rotation: Rotation, is_gradient: bool = False) -> None:
    """Overwrite query and key in `qkv`, contiguous [T, 3 H], by their rotations, with Triton and outside autograd.

    With `is_gradient`, `qkv` has the gradients of rotated queries and keys, which become those of the original ones.
    """
    from electra_kernels.triton.modern_layer import rotate

    num_rows, seq_len, num_pairs = rotation.cos_BSF.shape
    shape = (num_rows * seq_len, 6 * num_heads * num_pairs)
    assert qkv.shape == shape, f"query, key and value have the shape {tuple(qkv.shape)}: make it {shape}"
    for tensor in (qkv, *rotation):
        assert tensor.is_contiguous(), "the kernel reads contiguous tensors only"
    rotate(qkv, num_heads, rotation.cos_BSF, rotation.sin_BSF, is_gradient)


def geglu(expanded: torch.Tensor, backend: str) -> torch.Tensor:
    """Return gelu(inner) * gate, [..., I]; the first half of `expanded`, [..., 2 I], is inner, the second is gate.

    With backend "triton", the backward pass writes the gradient over `expanded`, which nothing else may read then.
    Under torch.compile the plain-PyTorch reference is traced, and the compiler fuses it.
    """
    if backend == "triton" and not torch.compiler.is_compiling():
        gated: torch.Tensor = _Geglu.apply(expanded)
        return gated
    return geglu_reference(expanded)


def geglu_reference(expanded: torch.Tensor) -> torch.Tensor:
    """Return gelu(inner) * gate in plain PyTorch; this is the definition of `geglu`."""
    inner, gate = expanded.chunk(2, dim=-1)
    return F.gelu(inner) * gate


class _Geglu(torch.autograd.Function):
    """GeGLU by Triton kernels; only its input is kept."""

    @staticmethod
    def forward(ctx: Any, expanded: torch.Tensor) -> torch.Tensor:
        from electra_kernels.triton.modern_layer import geglu_forward

        assert expanded.shape[-1] % 2 == 0, f"{expanded.shape[-1]} columns are no pairs of inner values and gates"
        ctx.save_for_backward(expanded)
        return geglu_forward(expanded.contiguous())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        from electra_kernels.triton.modern_layer import overwrite_by_geglu_gradient

        (expanded,) = ctx.saved_tensors
        return overwrite_by_geglu_gradient(grad.contiguous(), expanded.contiguous())
