"""Rotary position embeddings: queries and keys are rotated by angles that are proportional to their position.

Guarantee: the angles are those of Hugging Face's ModernBERT, computed in fp32 by the same operations. The score of a
query and a key depends on the distance of their positions only (Su et al. 2021, arXiv 2104.09864).

Shapes: B rows, S tokens, N heads, D features of a head, F = D / 2 frequencies.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Rotation(NamedTuple):
    """Cosines and sines of the angles by which pairs of features of each token are rotated."""

    cos_BSF: torch.Tensor  # fp32, for B rows, S tokens and F pairs of features
    sin_BSF: torch.Tensor  # fp32, as above


def rotation_of(position_BS: torch.Tensor, head_width: int, theta: float) -> Rotation:
    """Return each token's rotation in fp32: pair f of features turns by position * theta ** (-2 f / head_width)."""
    with torch.autocast(position_BS.device.type, enabled=False):
        exponent_F = torch.arange(0, head_width, 2, device=position_BS.device).float() / head_width
        frequency_F = 1.0 / (theta**exponent_F)
        angle_BSF = position_BS.float()[:, :, None] * frequency_F
        return Rotation(cos_BSF=angle_BSF.cos(), sin_BSF=angle_BSF.sin())


def rotate_query_and_key(qkv_BS3ND: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotate query and key in fp32 or wider, and leave the value; features f and f + D / 2 of a head form a pair."""
    query_and_key, value = qkv_BS3ND.split((2, 1), dim=2)
    compute_dtype = torch.promote_types(qkv_BS3ND.dtype, torch.float32)
    cos = rotation.cos_BSF[:, :, None, None]
    sin = rotation.sin_BSF[:, :, None, None]
    first, second = query_and_key.to(compute_dtype).chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([rotated.to(value.dtype), value], dim=2)
