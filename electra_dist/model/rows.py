"""What a row of ids says about itself: its examples, positions, token types and padding.

Guarantee: everything is derived from the ids alone, so a row needs no second array on disk or on the wire. A row holds
examples `[CLS] A [SEP] B [SEP]` or `[CLS] A [SEP]`, one after another, then [PAD] to its end. Attention never crosses
an example: `attention_bias` is -inf between two tokens of different examples. Pads count as one example more, so a
fully padded query row attends to pads and gives numbers, not NaN.

Cost: a few cumulative sums over [B, S] and one [B, 1, S, S] bias a batch (16 MB at 32 x 512 in bf16), shared by
all layers of both towers. Static shapes, no host synchronisation.

Where it stops: rows are trusted to be as the corpus builder makes them; a [PAD] inside an example is not looked for.

Shapes: B rows, S tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch


class SpecialIds(NamedTuple):
    """Ids of the five special tokens in the corpus's vocabulary."""

    pad: int
    unk: int
    cls: int
    sep: int
    mask: int

    @classmethod
    def from_tokens(cls, ids: Mapping[str, int]) -> SpecialIds:
        """From the manifest's mapping of `[PAD]`, `[UNK]`, `[CLS]`, `[SEP]` and `[MASK]` to ids."""
        return cls(ids["[PAD]"], ids["[UNK]"], ids["[CLS]"], ids["[SEP]"], ids["[MASK]"])


class RowLayout(NamedTuple):
    """The structure of a batch of rows. All [B, S]; pads have example -1, position 0 and token type 0."""

    example_BS: torch.Tensor  # int64, 0 for the row's first example
    position_BS: torch.Tensor  # int64, restarts at 0 in every example
    token_type_BS: torch.Tensor  # int64, 1 after the first [SEP] of an example up to and with its second
    is_real_BS: torch.Tensor  # bool, False on [PAD]


def derive(ids_BS: torch.Tensor, special: SpecialIds) -> RowLayout:
    """Example, position, token type and realness of every token of `ids_BS` (int64)."""
    is_real = ids_BS != special.pad
    is_cls, is_sep = ids_BS == special.cls, ids_BS == special.sep
    example = is_cls.cumsum(1) - 1
    index = torch.arange(ids_BS.shape[1], device=ids_BS.device).expand_as(ids_BS)
    start = torch.where(is_cls, index, 0).cummax(1).values
    # [SEP]s before this token in the row, less those before its example.
    seps_before = is_sep.cumsum(1) - is_sep.long()
    token_type = (seps_before - seps_before.gather(1, start)).clamp(max=1)
    return RowLayout(
        example_BS=torch.where(is_real, example, -1),
        position_BS=torch.where(is_real, index - start, 0),
        token_type_BS=torch.where(is_real, token_type, 0),
        is_real_BS=is_real,
    )


def attention_bias(layout: RowLayout, dtype: torch.dtype) -> torch.Tensor:
    """[B, 1, S, S]: 0 where query and key are of one example, -inf elsewhere. Every query has itself as a key."""
    same = layout.example_BS[:, :, None] == layout.example_BS[:, None, :]
    bias = torch.zeros(same.shape, dtype=dtype, device=same.device).masked_fill_(~same, float("-inf"))
    return bias[:, None]
