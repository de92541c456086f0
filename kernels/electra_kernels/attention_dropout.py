"""Dropout of attention probabilities on a CPU, by random numbers keyed by (seed, step, row, place in the model).

It is a custom operator, which torch.compile treats as opaque; see `dropout_add_norm.py`.
"""

from __future__ import annotations

import torch

from electra_kernels.keyed_random import Purpose, keep_grid


@torch.library.custom_op("electra::keep_attention", mutates_args=())
def keep_attention(key_3: torch.Tensor, row_B: torch.Tensor, size: int, probability: float) -> torch.Tensor:
    """Return the dropout factors of the attention probabilities of B rows, fp32 [B, size]: 0 or 1 / (1 - probability).

    `key_3` is seed, step and number of the layer, read on the host. `size`, a row's probabilities in one layer, is a
    multiple of 4. Layer i uses the random numbers i * size to (i + 1) * size - 1 of a row, so no two layers share one.
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
