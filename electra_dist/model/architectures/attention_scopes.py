"""Makes the attention mask of a batch in the form that the layers of an architecture read.

Guarantee: attention never crosses an example. In a local layer of the architecture `modern`, a token sees the tokens
of its example that are at most half a window away, itself included. The pads of a row count as one more example.

Cost: one mask per kind of layer and batch, which all layers of both towers read. As a bias that is [B, 1, S, S]
twice; as blocks of FlexAttention, blocks outside the window are never computed. With a bias, long rows are computed by
blocks of queries against the keys that they can see. On one core, forward and backward at 2,048 tokens with a window
of 128 took 29 ms of processor time by blocks and 181 ms at once, and at 512 tokens 27 ms and 47 ms (4 heads of 64
features, 2,048 tokens in all, fp32).

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
    """Return the attention mask of a batch, one for all layers or, with the architecture `modern`, one for each kind.

    Args:
        model: the architecture and the window of its local layers.
        layout: structure of the rows, from `row_layout.derive`.
        dtype: dtype of a bias; flex ignores it.
        backend: "sdpa" for a bias [B, 1, S, S] of 0 and -inf, "flex" for blocks.
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
    """Return the attention of a local layer without dropout, [B, N, S, D], computed by blocks of 2 x `reach` queries.

    It is the same function as attention with the whole bias, to rounding.

    Args:
        query_BNSD: queries.
        key_BNSD: keys.
        value_BNSD: values.
        bias_B1SS: bias of a local layer, -inf where query and key are more than `reach` tokens apart.
        reach: largest distance in tokens.
    """
    num_tokens = query_BNSD.shape[2]
    blocks = []
    for first in range(0, num_tokens, 2 * reach):
        queries = slice(first, min(first + 2 * reach, num_tokens))
        keys = slice(max(0, first - reach), min(queries.stop + reach, num_tokens))
        block = F.scaled_dot_product_attention(
            query_BNSD[:, :, queries],
            key_BNSD[:, :, keys],
            value_BNSD[:, :, keys],
            attn_mask=bias_B1SS[:, :, queries, keys],
        )
        blocks.append(block)
    return torch.cat(blocks, dim=2)


def _window_bias(bias_B1SS: torch.Tensor, reach: int) -> torch.Tensor:
    """Return an attention bias that is also -inf where query and key are more than `reach` tokens apart."""
    place_S = torch.arange(bias_B1SS.shape[-1], device=bias_B1SS.device)
    distance_SS = (place_S[:, None] - place_S[None, :]).abs()
    return bias_B1SS.masked_fill(distance_SS > reach, float("-inf"))


def _window_blocks(layout: RowLayout, reach: int) -> BlockMask:
    """Return FlexAttention's blocks for tokens of one example that are at most `reach` tokens apart.

    Args:
        layout: structure of the rows.
        reach: largest distance in tokens.
    """
    example_BS = layout.example_BS
    num_rows, num_tokens = example_BS.shape

    def in_window(row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Return whether a query sees a key, as FlexAttention's `mask_mod`, which passes index tensors."""
        is_near = (query - key).abs() <= reach
        return is_near & (example_BS[row, query] == example_BS[row, key])

    return create_block_mask(
        in_window, B=num_rows, H=None, Q_LEN=num_tokens, KV_LEN=num_tokens, device=example_BS.device
    )
