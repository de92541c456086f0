"""Drop elements of a tensor by keyed random numbers, without a fused residual sum or LayerNorm.

The embeddings use it, and the sub-layers of the architecture `modern`. `keep_attention` gives the factors by which
dropout multiplies attention probabilities. It is a custom operator, which torch.compile treats as opaque (see
`layer_passes.py`).

Guarantee: which elements of a row are dropped depends on the key (seed, step), the row's number in the global batch
and the element's place in the row. It does not depend on batch split, rank or device, and torch's generator is not
used. Backward draws the same bits again, so no mask is stored.

Cost at 32768 x 1024 in bf16: 134 MB in each direction, one launch with Triton. On a CPU: 1 ns an element.

Shapes: B rows, S tokens, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from electra_kernels.keyed_random import Purpose, keep_grid
from electra_kernels.operation_types import LayerDropout

_NUMBERS_OF_A_CALL = 4  # random numbers that one call of Philox gives


def keyed_dropout(x_BSH: torch.Tensor, dropout: LayerDropout) -> torch.Tensor:
    """Return `x_BSH` with dropped elements set to 0 and the others multiplied by 1 / (1 - probability), [B, S, H].

    `dropout.probability` must be above 0. The random numbers depend on the seed and step of `dropout` and on each
    row's number in the global batch, but not on the layer and the place in it that `dropout` names.
    """
    if dropout.backend == "triton":
        return _KeyedDropout.apply(x_BSH, dropout.key_3, dropout.row_B.contiguous(), dropout.probability)
    return keyed_dropout_reference(x_BSH, dropout)


def keyed_dropout_reference(x_BSH: torch.Tensor, dropout: LayerDropout) -> torch.Tensor:
    """Return `x_BSH` after dropout, computed in fp32 or wider in plain PyTorch: the definition of `keyed_dropout`."""
    seed, step, _layer = dropout.key_3.tolist()
    num_elements = x_BSH.shape[1] * x_BSH.shape[2]
    num_drawn = -(-num_elements // _NUMBERS_OF_A_CALL) * _NUMBERS_OF_A_CALL
    factors = keep_grid(
        seed,
        Purpose.EMBEDDING_DROPOUT,
        step,
        dropout.row_B,
        num_positions=num_drawn,
        first_position=0,
        drop=dropout.probability,
    )
    factor_BSH = factors[:, :num_elements].view(x_BSH.shape)
    compute_dtype = torch.promote_types(x_BSH.dtype, torch.float32)
    return (x_BSH.to(compute_dtype) * factor_BSH.to(compute_dtype)).to(x_BSH.dtype)


class _KeyedDropout(torch.autograd.Function):
    """Dropout by a Triton kernel; backward draws the same random bits again, from the saved key and row numbers."""

    @staticmethod
    def forward(
        ctx: Any, x_BSH: torch.Tensor, key: torch.Tensor, row_B: torch.Tensor, probability: float
    ) -> torch.Tensor:
        from electra_kernels.triton.keyed_dropout import scale_kept

        ctx.save_for_backward(key, row_B)
        ctx.probability = probability
        return scale_kept(x_BSH.contiguous(), key, row_B, probability)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSH: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        from electra_kernels.triton.keyed_dropout import scale_kept

        key, row_B = ctx.saved_tensors
        return scale_kept(grad_BSH.contiguous(), key, row_B, ctx.probability), None, None, None


@torch.library.custom_op("electra::keep_attention", mutates_args=())
def keep_attention(key_3: torch.Tensor, row_B: torch.Tensor, size: int, probability: float) -> torch.Tensor:
    """Return the dropout factors of the attention probabilities of B rows, fp32 [B, size]: 0 or 1 / (1 - probability).

    `key_3` holds seed, step and number of the layer, and is read on the host; `row_B` are the row numbers within the
    global batch. Layer i uses the random numbers i * size to (i + 1) * size - 1 of each row's sequence, so no two
    layers share one. `size` is a multiple of 4.
    """
    seed, step, layer = key_3.tolist()
    return keep_grid(
        seed,
        Purpose.ATTENTION_DROPOUT,
        step,
        row_B,
        num_positions=size,
        first_position=layer * size,
        drop=probability,
    )


@keep_attention.register_fake
def _keep_attention_shape(key_3: torch.Tensor, row_B: torch.Tensor, size: int, probability: float) -> torch.Tensor:
    return row_B.new_empty(len(row_B), size, dtype=torch.float32)
