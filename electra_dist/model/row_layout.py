"""Derive the examples, positions, token types and padding of rows from their token ids.

Guarantee: the structure follows from the ids alone, so a row needs no second array on disk or on the wire. A row holds
examples `[CLS] A [SEP] B [SEP]` or `[CLS] A [SEP]`, one after another, then [PAD] to its end. Attention never crosses
an example. The pads of a row count as one more example, so a query on a pad attends to pads and yields numbers, not
NaN.

Cost: one bias [B, 1, S, S] per batch (16 MB at 32 x 512 in bf16), shared by all layers of both towers. Shapes are
static, and nothing waits for the device.

Limits: rows must be as the corpus builder makes them; a [PAD] inside an example is not looked for.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from electra_kernels.operation_types import SpecialIds
from numpy.typing import NDArray

_LEAST_SEQUENCES_PER_ROW = 2  # room for one example and the pads in every row


class RowLayout(NamedTuple):
    """Structure of a batch of rows, one entry per token; pads have example -1, position 0 and token type 0."""

    example_BS: torch.Tensor  # int64, number of the example within its row, from 0
    position_BS: torch.Tensor  # int64, restarts at 0 in every example
    token_type_BS: torch.Tensor  # int64, 1 after the first [SEP] of an example, up to and including its second
    is_real_BS: torch.Tensor  # bool, False on [PAD]


def derive(ids_BS: torch.Tensor, special: SpecialIds) -> RowLayout:
    """Return examples, positions, token types and padding of rows, from their original token ids, int64, not masked.

    For a row of two examples, the first with two segments (C is [CLS], S is [SEP], P is [PAD]):

        token       C  a  S  b  S  C  d  S  P
        example     0  0  0  0  0  1  1  1 -1
        position    0  1  2  3  4  0  1  2  0
        token type  0  0  0  1  1  0  0  0  0
    """
    is_real = ids_BS != special.pad
    is_cls = ids_BS == special.cls
    is_sep = ids_BS == special.sep

    # Every [CLS] starts an example, so a token's example is the number of [CLS]s up to it, counted from 0.
    example = is_cls.cumsum(1) - 1
    index_in_row = torch.arange(ids_BS.shape[1], device=ids_BS.device).expand_as(ids_BS)
    start_of_example = torch.where(is_cls, index_in_row, 0).cummax(1).values

    # A token's type is the number of [SEP]s before it in its example, at most 1: those before it in the row, minus
    # those before its example.
    seps_before = is_sep.cumsum(1) - is_sep.long()
    token_type = (seps_before - seps_before.gather(1, start_of_example)).clamp(max=1)
    return RowLayout(
        example_BS=torch.where(is_real, example, -1),
        position_BS=torch.where(is_real, index_in_row - start_of_example, 0),
        token_type_BS=torch.where(is_real, token_type, 0),
        is_real_BS=is_real,
    )


def attention_bias(layout: RowLayout, dtype: torch.dtype) -> torch.Tensor:
    """Return the additive attention bias [B, 1, S, S]: 0 where query and key are of one example, -inf elsewhere."""
    same_example_BSS = layout.example_BS[:, :, None] == layout.example_BS[:, None, :]
    bias_BSS = torch.zeros(same_example_BSS.shape, dtype=dtype, device=same_example_BSS.device)
    bias_BSS.masked_fill_(~same_example_BSS, float("-inf"))
    return bias_BSS[:, None]  # the new dimension broadcasts over the attention heads


class ExampleBounds(NamedTuple):
    """Where each example begins in the T = B * S tokens of all rows, one row after another, for FlashAttention."""

    cu_seqlens: torch.Tensor  # int32 [L + 1]: first token of each of L sequences in the line, then T; never decreases
    longest: int  # upper bound of the tokens of a sequence: the row length

    def to(self, device: torch.device) -> ExampleBounds:
        """Return the bounds on a device; the host does not wait for the copy to a GPU."""
        cu_seqlens = self.cu_seqlens
        if device.type == "cuda":
            cu_seqlens = cu_seqlens.pin_memory()  # from pageable memory the copy would wait for the queued work
        return ExampleBounds(cu_seqlens.to(device, non_blocking=True), self.longest)


def example_bounds(ids_BS: NDArray[Any], special: SpecialIds) -> ExampleBounds:
    """Return where the examples of rows begin, from their original token ids in host memory.

    Empty sequences are added at the end until their number is the number of rows times a power of two. So most batches
    have tensors of one size, which compiled code needs.
    """
    num_rows, row_length = ids_BS.shape
    is_pad_BS = ids_BS == special.pad
    begins_BS = ids_BS == special.cls
    begins_BS[:, 0] = True  # no sequence crosses the border of two rows
    begins_BS[:, 1:] |= is_pad_BS[:, 1:] & ~is_pad_BS[:, :-1]  # the first pad of a row
    first_tokens = np.flatnonzero(begins_BS)

    # A fixed upper bound would be too large: a row may hold an example for every 5 tokens, and each empty sequence
    # costs idle thread blocks and 128 tokens of workspace in every backward pass of attention.
    sequences_per_row = _LEAST_SEQUENCES_PER_ROW
    while num_rows * sequences_per_row < len(first_tokens):
        sequences_per_row *= 2
    num_sequences = num_rows * sequences_per_row
    cu_seqlens = np.full(num_sequences + 1, ids_BS.size, np.int32)
    cu_seqlens[: len(first_tokens)] = first_tokens
    return ExampleBounds(torch.from_numpy(cu_seqlens), longest=row_length)
