"""Compute attention inside each example of a row with one of three backends.

    sdpa   torch's scaled_dot_product_attention with a bias that is -inf between examples. It runs on any device with
           any dropout. On a CPU the same function is computed with plain operations in two cases: with dropout, where
           the dropped probabilities follow from (seed, step, row, layer, position), and for short rows in bf16.
    flash  FlashAttention over the examples as sequences of any length, with dropout (`flash_attention.py`). Pairs of
           tokens from different examples are never computed, and no [B, 1, S, S] bias exists. It needs a GPU, and
           bf16 or fp16.
    flex   FlexAttention with a mask of 128 x 128 blocks. Blocks that hold no two tokens of one example are never
           computed. It needs a GPU with Triton and has no attention dropout.

Guarantee: all backends compute the same function to rounding, pads included: pads attend to pads. Tests compare them
with float64; for flash, a definition in plain PyTorch then takes the place of torch's operator.

How: the type of the attention mask selects the backend: a bias, `ExampleBounds` or a `BlockMask`.

Limits: the objective `electric` needs one-directional attention, which only the bias can express.

Shapes: B rows, N heads, S tokens, D features of a head, T = B * S.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from electra_dist.model.compile_options import compile_options
from electra_dist.model.matrix_products import HAS_BF16_PRODUCTS
from electra_dist.model.row_layout import ExampleBounds, RowLayout, SpecialIds, attention_bias, example_bounds
from electra_dist.store.user_cache import keep_compiled_code, user_cache_folder

# Longest rows in bf16 for which a CPU uses plain operations. The backward pass of torch's fused attention is slow
# there: on one core of an Intel Xeon with AMX, forward and backward take about 2 times as long at 64 tokens, 1.7 at
# 128, and 0.7 at 512, where the probabilities of a row do not fit into the cache (2026-11-23, docs/results.md).
_MAX_PLAIN_TOKENS = 128


@dataclass(frozen=True, slots=True)
class AttentionScopes:
    """Masks of a batch for an architecture with global and local attention layers, and the positions of the tokens."""

    global_mask: torch.Tensor | BlockMask  # for global layers, in which a token sees its whole example
    local_mask: torch.Tensor | BlockMask  # for local layers, in which a token sees a window of its example
    position_BS: torch.Tensor  # int64 position of each token within its example


# Which keys a query of a layer sees: a bias [B, 1, S, S] for sdpa, blocks for flex, bounds of the examples for flash.
LayerMask = torch.Tensor | BlockMask | ExampleBounds
# Masks of a whole network: one for all layers, or one for each kind of layer.
AttentionMask = LayerMask | AttentionScopes


class AttentionChoice(NamedTuple):
    """Attention backend of a run, with the reason for the choice, which the run writes to its log."""

    backend: str  # "sdpa", "flash" or "flex"
    reason: str

    def bounds(self, ids_BS: NDArray[Any], special: SpecialIds, device: torch.device) -> ExampleBounds | None:
        """Return where the examples of a micro-batch begin, on `device`; None unless the backend is "flash".

        `ids_BS` are on the host, so that the device is not waited for.
        """
        if self.backend != "flash":
            return None
        return example_bounds(ids_BS, special).to(device)


SDPA = AttentionChoice("sdpa", "default")


def same_example(layout: RowLayout, dtype: torch.dtype, backend: str) -> torch.Tensor | BlockMask:
    """Return the mask for `backend` "sdpa" or "flex" that restricts attention to tokens of the same example."""
    if backend == "sdpa":
        return attention_bias(layout, dtype)
    assert backend == "flex", backend
    example_BS = layout.example_BS
    num_rows, num_tokens = example_BS.shape

    def in_same_example(row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return example_BS[row, query] == example_BS[row, key]

    return create_block_mask(
        in_same_example,
        B=num_rows,
        H=None,  # all heads use one mask
        Q_LEN=num_tokens,
        KV_LEN=num_tokens,
        device=example_BS.device,
    )


def attend(
    query_BNSD: torch.Tensor,
    key_BNSD: torch.Tensor,
    value_BNSD: torch.Tensor,
    attention_mask: torch.Tensor | BlockMask,
    dropout: float = 0.0,
    keep_BNSS: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return softmax(q k^T / sqrt(D)) v over the keys that the mask allows, [B, N, S, D].

    `dropout` is the probability of dropping an attention probability. If `keep_BNSS` is given, the probabilities are
    instead multiplied by these factors, 0 or 1 / (1 - p). This is for CPUs, where torch has no fused attention with
    dropout. ValueError: `dropout` is not 0 and the mask is a BlockMask, because flex has no dropout.
    """
    if keep_BNSS is not None:
        assert isinstance(attention_mask, torch.Tensor)
        return attend_with_plain_operations(query_BNSD, key_BNSD, value_BNSD, attention_mask, keep_BNSS)
    if isinstance(attention_mask, torch.Tensor):
        if not dropout and _is_short_bf16_on_cpu(query_BNSD):
            return attend_with_plain_operations(query_BNSD, key_BNSD, value_BNSD, attention_mask)
        return F.scaled_dot_product_attention(
            query_BNSD, key_BNSD, value_BNSD, attn_mask=attention_mask, dropout_p=dropout
        )
    if dropout:
        raise ValueError(
            f"FlexAttention cannot drop attention probabilities (asked for {dropout}); set model.attention_dropout: 0 "
            f"or engine.attention: flash"
        )
    flex = _flex_function(query_BNSD.is_cuda)
    out_BNSD: torch.Tensor = flex(query_BNSD, key_BNSD, value_BNSD, block_mask=attention_mask)
    return out_BNSD


def _is_short_bf16_on_cpu(query_BNSD: torch.Tensor) -> bool:
    """Return whether plain operations are faster than torch's fused attention: on a CPU, for short rows in bf16."""
    return (
        HAS_BF16_PRODUCTS
        and query_BNSD.device.type == "cpu"
        and query_BNSD.dtype == torch.bfloat16
        and query_BNSD.shape[2] <= _MAX_PLAIN_TOKENS
    )


def attend_with_plain_operations(
    query_BNSD: torch.Tensor,
    key_BNSD: torch.Tensor,
    value_BNSD: torch.Tensor,
    bias_B1SS: torch.Tensor,
    keep_BNSS: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return what `attend` returns, by two matrix products and a softmax over scores in fp32 or wider."""
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


@functools.cache
def _flex_function(compiled: bool) -> Callable[..., Any]:
    """Return FlexAttention. If not compiled, for tests on a CPU, it stores all scores and has no backward pass."""
    if not compiled:
        return flex_attention
    keep_compiled_code(user_cache_folder() / "compiled")
    function: Callable[..., Any] = torch.compile(flex_attention, **compile_options())
    return function
