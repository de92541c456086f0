"""Compute attention by plain operations or by windows, where torch's scaled_dot_product_attention is not the best.

Dropout on a CPU drops the probabilities that follow from (seed, step, row, layer, position). Short rows in bf16 are
faster on a CPU by plain operations. Local attention in long rows is computed by blocks of queries against the keys
that they can see.

Shapes: B rows, N heads, S tokens, D features of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from electra_kernels.keyed_dropout import keep_attention
from electra_kernels.operation_types import LayerDropout

from electra_dist.model.fused_layer import HAS_BF16_PRODUCTS

# Longest rows in bf16 for which a CPU uses plain operations. The backward pass of torch's fused attention is slow
# there: on one core of an Intel Xeon with AMX, forward and backward take about 2 times as long at 64 tokens, 1.7 at
# 128, and 0.7 at 512, where the probabilities of a row do not fit into the cache (cpu_attention-20261123.json).
_MAX_PLAIN_TOKENS = 128


def bf16_is_faster_plain(device: torch.device, num_tokens: int) -> bool:
    """Return whether plain operations are faster than torch's fused attention for rows in bf16."""
    has_products = HAS_BF16_PRODUCTS and device.type == "cpu"
    return has_products and num_tokens <= _MAX_PLAIN_TOKENS


def attend_with_plain_operations(
    query_BNSD: torch.Tensor,
    key_BNSD: torch.Tensor,
    value_BNSD: torch.Tensor,
    bias_B1SS: torch.Tensor,
    keep_BNSS: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention by two matrix products and a softmax over scores in fp32 or wider, [B, N, S, D].

    The probabilities are multiplied by the factors `keep_BNSS`, 0 or 1 / (1 - p), if they are given.
    """
    compute = torch.promote_types(query_BNSD.dtype, torch.float32)
    # The operands of this product are rounded to bf16 only where a CPU has instructions for it.
    value_dtype = value_BNSD.dtype if HAS_BF16_PRODUCTS else compute
    scale = query_BNSD.shape[-1] ** -0.5
    with torch.autocast(query_BNSD.device.type, enabled=False):
        scaled_query_BNSD = query_BNSD.to(compute) * scale
        score_BNSS = (scaled_query_BNSD @ key_BNSD.to(compute).transpose(-1, -2)).add_(bias_B1SS)
        weight_BNSS = score_BNSS.softmax(-1)
        if keep_BNSS is not None:
            weight_BNSS = weight_BNSS * keep_BNSS.to(compute)
        return (weight_BNSS.to(value_dtype) @ value_BNSD.to(value_dtype)).to(value_BNSD.dtype)


def keyed_factors(num_heads: int, num_tokens: int, dropout: float, dropout_keys: LayerDropout) -> torch.Tensor:
    """Draw the dropout factor of each attention probability by keys, fp32 [B, N, S, S]: 0 or 1 / (1 - dropout)."""
    num_factors = num_heads * num_tokens * num_tokens
    # The operator draws four numbers at a time, so the number is rounded up and the surplus is cut off.
    num_drawn = (num_factors + 3) // 4 * 4
    drawn = keep_attention(dropout_keys.key_3, dropout_keys.row_B, num_drawn, dropout)
    return drawn[:, :num_factors].view(-1, num_heads, num_tokens, num_tokens)


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
