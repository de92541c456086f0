"""Compile torch's FlexAttention, and find the blocks of queries and keys that it must compute for packed rows.

Guarantee: a token sees the tokens of its example, or only those within a window. Blocks of 128 x 128 that hold no such
pair are never computed, and no mask of all pairs exists.

Limits: it needs a GPU with Triton, and has no attention dropout.

Shapes: B rows, S tokens, Q blocks of a row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from electra_dist.model.compile_options import compile_options
from electra_dist.store.user_cache import keep_compiled_code, user_cache_folder

_BLOCK_TOKENS = 128


@functools.cache
def flex_function(compiled: bool) -> Callable[..., Any]:
    """Return torch's flex_attention, compiled; if not, for tests on a CPU, it has no backward pass."""
    if not compiled:
        return flex_attention
    keep_compiled_code(user_cache_folder() / "compiled")
    function: Callable[..., Any] = torch.compile(flex_attention, **compile_options())
    return function


def blocks_of_rows(example_BS: torch.Tensor, reach: int | None) -> BlockMask:
    """Return which pairs of query block and key block FlexAttention must compute, partly or wholly.

    A query sees a key if both are of one example and at most `reach` tokens apart (None: at any distance).
    `example_BS` has the number of each token's example in its row. torch's own `create_block_mask` would need a mask
    of all pairs of tokens, [B, 1, S, S].
    """
    num_tokens = example_BS.shape[1]

    def is_seen(row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        in_same_example = example_BS[row, query] == example_BS[row, key]
        return in_same_example if reach is None else in_same_example & ((query - key).abs() <= reach)

    seen_BQQ, all_seen_BQQ = _block_pairs(example_BS, reach)
    return BlockMask.from_kv_blocks(
        *_counts_and_numbers(seen_BQQ & ~all_seen_BQQ),
        *_counts_and_numbers(all_seen_BQQ),
        BLOCK_SIZE=_BLOCK_TOKENS,
        mask_mod=is_seen,
        seq_lengths=(num_tokens, num_tokens),
    )


def _block_pairs(example_BS: torch.Tensor, reach: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return in which pairs of blocks a query sees a key, and in which every query sees every key, bool [B, Q, Q].

    The first and the last token of each block suffice, because the tokens of an example are adjacent.
    """
    num_tokens = example_BS.shape[1]
    first_Q = torch.arange(0, num_tokens, _BLOCK_TOKENS, device=example_BS.device)
    last_Q = (first_Q + _BLOCK_TOKENS - 1).clamp(max=num_tokens - 1)
    is_whole_Q = last_Q - first_Q == _BLOCK_TOKENS - 1  # the last block of a row may be shorter
    example_of_first_BQ = example_BS[:, first_Q]
    example_of_last_BQ = example_BS[:, last_Q]

    # A block sees a later one if its last token sees the first token of the later one, and every block sees itself.
    sees_later_BQQ = example_of_last_BQ[:, :, None] == example_of_first_BQ[:, None, :]
    # Every token of a block sees every token of a later one, or of its own, if its first sees the last of the other.
    sees_all_BQQ = example_of_first_BQ[:, :, None] == example_of_last_BQ[:, None, :]
    sees_all_BQQ = sees_all_BQQ & is_whole_Q[:, None] & is_whole_Q
    if reach is not None:
        sees_later_BQQ = sees_later_BQQ & (first_Q - last_Q[:, None] <= reach)
        sees_all_BQQ = sees_all_BQQ & (last_Q - first_Q[:, None] <= reach)
    sees_later_BQQ = sees_later_BQQ.triu(1)
    sees_all_BQQ = sees_all_BQQ.triu()
    itself_QQ = torch.eye(len(first_Q), dtype=torch.bool, device=example_BS.device)
    seen_BQQ = sees_later_BQQ | sees_later_BQQ.transpose(1, 2) | itself_QQ
    return seen_BQQ, sees_all_BQQ | sees_all_BQQ.transpose(1, 2)


def _counts_and_numbers(block_BQQ: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return for each query block how many key blocks it sees, [B, 1, Q], and their order, [B, 1, Q, Q].

    The order has the indices of all key blocks, those seen first. `block_BQQ` is True where a block sees another.
    """
    flag_B1QQ = block_BQQ[:, None].int()
    number_B1QQ = flag_B1QQ.argsort(dim=-1, descending=True, stable=True)
    return flag_B1QQ.sum(-1, dtype=torch.int32), number_B1QQ.int()
