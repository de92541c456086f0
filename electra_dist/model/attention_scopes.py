"""Make the attention masks of a batch, and compute attention within a window of tokens.

Guarantee: a token never sees a token of another example. With `bert`, and in the global layers of `modern`, it sees
its whole example; in a local layer, the tokens that are at most half a window away. The pads of a row count as one
more example.

Cost: one mask per kind of layer and batch, which all layers of both towers read. With flex, blocks outside the window
are never computed. With sdpa, local attention in long rows is computed by blocks of queries against the keys that they
can see.

Shapes: B rows, N heads, S tokens, D features of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from electra_dist.config import ModelConfig
from electra_dist.model.attention import AttentionScopes, same_example
from electra_dist.model.row_layout import RowLayout


def new_attention_mask(
    model: ModelConfig, layout: RowLayout, dtype: torch.dtype, backend: str
) -> torch.Tensor | BlockMask | AttentionScopes:
    """Return the attention mask of a batch, in the form that the encoders of the architecture expect.

    For `bert` it is one mask for all layers: with "sdpa" a bias [B, 1, S, S] of 0 and -inf in `dtype`, with "flex" a
    BlockMask. For `modern` it is an AttentionScopes with one such mask for global and one for local layers.
    """
    global_mask = same_example(layout, dtype, backend)
    if model.architecture == "bert":
        return global_mask
    reach = model.local_window // 2
    local_mask: torch.Tensor | BlockMask
    if isinstance(global_mask, torch.Tensor):
        local_mask = _window_bias(global_mask, reach)
    else:
        local_mask = _window_blocks(layout, reach)
    return AttentionScopes(global_mask=global_mask, local_mask=local_mask, position_BS=layout.position_BS)


def attend_in_windows(
    query_BNSD: torch.Tensor, key_BNSD: torch.Tensor, value_BNSD: torch.Tensor, bias_B1SS: torch.Tensor, reach: int
) -> torch.Tensor:
    """Compute attention in which a token sees at most `reach` tokens to each side, without dropout, [B, N, S, D].

    The cost is linear in S. The bias must be -inf where query and key are more than `reach` tokens apart.
    """
    num_tokens = query_BNSD.shape[2]
    block_outputs = []
    for first in range(0, num_tokens, 2 * reach):
        queries = slice(first, min(first + 2 * reach, num_tokens))
        keys = slice(max(0, first - reach), min(queries.stop + reach, num_tokens))
        block_output = F.scaled_dot_product_attention(
            query_BNSD[:, :, queries],
            key_BNSD[:, :, keys],
            value_BNSD[:, :, keys],
            attn_mask=bias_B1SS[:, :, queries, keys],
        )
        block_outputs.append(block_output)
    return torch.cat(block_outputs, dim=2)


# Milliseconds of processor time of forward and backward, measured on one core of an Intel Xeon with AMX, 2026-11-23,
# for a batch of 2,048 tokens with 4 heads of 64 features. A window is 2 x `reach`.
#
# | tokens in a row | window | fp32, one call | fp32, blocks | bf16, one call | bf16, blocks |
# |---|---|---|---|---|---|
# | 64 | 16 | 9.6 | 15.3 | 23.5 | 52.2 |
# | 256 | 64 | 22.5 | 20.7 | 21.1 | 36.8 |
# | 512 | 128 | 39.4 | 29.5 | 30.5 | 40.8 |
# | 1,024 | 128 | 72.0 | 35.9 | 46.1 | 43.6 |
#
# The limits are the first measured lengths with a clear gain in fp32 and with any gain in bf16. fp16 was not measured
# and is treated as bf16.
def blocks_are_faster(num_tokens: int, reach: int, dtype: torch.dtype) -> bool:
    """Return whether, on a CPU, `attend_in_windows` is faster than one attention call over the whole row."""
    fewest_tokens = 512 if dtype == torch.float32 else 1024
    # In rows of at most two windows (2 x 2 x reach), a block of queries would see almost the whole row.
    return num_tokens >= fewest_tokens and num_tokens > 4 * reach


def _window_bias(bias_B1SS: torch.Tensor, reach: int) -> torch.Tensor:
    """Return a copy of the bias with -inf also where query and key are more than `reach` tokens apart."""
    index_S = torch.arange(bias_B1SS.shape[-1], device=bias_B1SS.device)
    distance_SS = (index_S[:, None] - index_S[None, :]).abs()
    return bias_B1SS.masked_fill(distance_SS > reach, float("-inf"))


def _window_blocks(layout: RowLayout, reach: int) -> BlockMask:
    example_BS = layout.example_BS
    num_rows, num_tokens = example_BS.shape

    def in_window(row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        is_near = (query - key).abs() <= reach
        return is_near & (example_BS[row, query] == example_BS[row, key])

    return create_block_mask(
        in_window, B=num_rows, H=None, Q_LEN=num_tokens, KV_LEN=num_tokens, device=example_BS.device
    )
