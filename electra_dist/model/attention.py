"""Find the examples of rows, and compute attention inside each; a backend is a class whose objects are masks.

A row holds examples `[CLS] A [SEP] B [SEP]` or `[CLS] A [SEP]`, one after another, then [PAD] to its end. This follows
from the token ids alone (`derive`), so a row needs no second array on disk or on the wire. The pads of a row count as
one more example, so a query on a pad attends to pads and yields numbers, not NaN.

    sdpa   torch's scaled_dot_product_attention with a bias that is -inf between examples. It runs on any device with
           any dropout. On a CPU the same function is computed with plain operations in two cases: with dropout, where
           the dropped probabilities follow from (seed, step, row, layer, position), and for short rows in bf16.
    flash  FlashAttention over the examples as sequences of any length, with dropout and windows. Pairs of tokens from
           different examples are never computed, and no [B, 1, S, S] bias exists. It needs a GPU of compute capability
           8.0 or higher, bf16 or fp16, and heads whose width is a multiple of 8, at most 256.
    flash3 the same by the kernels of the package flash-attn-3, without dropout. It needs a GPU of compute capability
           9.0, which is the H100 and the H200.
    flex   FlexAttention with a mask of 128 x 128 blocks. Blocks that hold no two tokens of one example are never
           computed. It needs a GPU with Triton and has no attention dropout.

Guarantee: all backends compute the same function to rounding, pads included: pads attend to pads. A token never sees a
token of another example. With `bert`, and in the global layers of `modern`, it sees its whole example; in a local
layer, the tokens that are at most `reach` (half a window) away. Tests compare the backends with float64; for flash, a
definition in plain PyTorch then takes the place of torch's operator (`flash_attention.py`).

Cost: a batch has one mask for each kind of layer, which all layers of both towers read. A bias of sdpa, [B, 1, S, S],
has 16 MB at 32 x 512 in bf16.

Limits: the objective `electric` needs one-directional attention, which only the bias can express. Rows must be as the
corpus builder makes them; a [PAD] inside an example is not looked for.

Shapes: B rows, N heads, S tokens, D features of a head, T = B * S, H = N * D, Q blocks of a row.
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import torch
import torch.nn.functional as F
from electra_kernels.operation_types import LayerDropout, SpecialIds
from numpy.typing import NDArray
from torch.nn.attention.flex_attention import BlockMask
from typing_extensions import override

from electra_dist.config import Config, ModelConfig
from electra_dist.model.flash_attention import (
    ExampleBounds,
    example_bounds,
    flash3_limit,
    flash_attention,
    kernel_limit,
    use_kernels,
)
from electra_dist.model.flex_attention import blocks_of_rows, flex_function
from electra_dist.model.plain_attention import (
    attend_in_windows,
    attend_with_plain_operations,
    bf16_is_faster_plain,
    blocks_are_faster,
    keyed_factors,
)


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


class LayerMask(ABC):
    """Which keys the queries of a layer see, in the form that one backend needs; a subclass is a backend."""

    # Subclasses are dataclasses and not tuples, because DeepSpeed's hooks rebuild tuples.

    name: ClassVar[str]  # in `engine.attention`
    title: ClassVar[str]  # in log lines
    advantage: ClassVar[str]  # why `engine.attention: auto` takes it
    sums_bias: ClassVar[bool] = False  # whether the backward pass can compute the gradient of the bias of `qkv`, too

    @classmethod
    def limit(cls, config: Config) -> str:
        """Return why the backend cannot run this config on the current GPU, or "" if nothing but a trial can tell."""
        return ""

    @classmethod
    def switch_on(cls) -> None:
        """Choose the kernels that `attend` needs, for the whole process; the last call counts. May raise anything."""
        use_kernels(None)

    @classmethod
    def bounds(cls, ids_BS: NDArray[Any], special: SpecialIds, device: torch.device) -> ExampleBounds | None:
        """Return where the examples of rows begin, on `device`, if the backend needs that for its masks, or else None.

        `ids_BS` are the rows' token ids on the host; to read them from a GPU would make the host wait.
        """
        return None

    @classmethod
    @abstractmethod
    def of_rows(
        cls, layout: RowLayout, dtype: torch.dtype, bounds: ExampleBounds | None, reach: int | None = None
    ) -> Self:
        """Return the mask for rows of this layout; with `reach`, a token sees only that many tokens to each side.

        `bounds` come from the method `bounds`; `dtype` is that of a mask that is added to attention scores.
        """

    @abstractmethod
    def attend(
        self,
        qkv: torch.Tensor,
        num_heads: int,
        dropout: float,
        dropout_keys: LayerDropout,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return softmax(q k^T / sqrt(D)) v over the keys that the mask allows, contiguous [T, H].

        `qkv`, contiguous [T, 3 H], has query, key and value of each token. `dropout` is the probability of dropping an
        attention probability. `bias` is that of the product that made `qkv`; a backend with `sums_bias` computes its
        gradient.
        """

    @classmethod
    def disorder(cls, deterministic: bool) -> str:
        """Return why attention's gradients on a GPU differ between equal runs, or "" if they do not.

        `deterministic` is the setting `engine.deterministic`.
        """
        return ""

    def dynamic_sizes(self) -> list[tuple[torch.Tensor, int]]:
        """Return (tensor, dimension) of sizes that differ between batches of one shape, for torch.compile."""
        return []


def by_heads(qkv: torch.Tensor, num_heads: int, num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return views of query, key and value, [B, N, S, D] each, of `qkv`, [B * S, 3 * N * D]."""
    qkv_BS3ND = qkv.view(num_rows, len(qkv) // num_rows, 3, num_heads, -1)
    query_BSND, key_BSND, value_BSND = qkv_BS3ND.unbind(2)
    return query_BSND.transpose(1, 2), key_BSND.transpose(1, 2), value_BSND.transpose(1, 2)


@dataclass(frozen=True, slots=True, eq=False)
class SdpaMask(LayerMask):
    """A bias for torch's scaled_dot_product_attention: 0 where a query sees a key, -inf elsewhere."""

    name = "sdpa"
    title = "torch's scaled_dot_product_attention"
    advantage = "it runs everywhere"

    bias_B1SS: torch.Tensor
    reach: int | None = None  # the bias is -inf where query and key are farther apart

    @classmethod
    @override
    def of_rows(
        cls, layout: RowLayout, dtype: torch.dtype, bounds: ExampleBounds | None, reach: int | None = None
    ) -> SdpaMask:
        bias_B1SS = attention_bias(layout, dtype)
        if reach is not None:
            index_S = torch.arange(bias_B1SS.shape[-1], device=bias_B1SS.device)
            distance_SS = (index_S[:, None] - index_S[None, :]).abs()
            bias_B1SS = bias_B1SS.masked_fill(distance_SS > reach, float("-inf"))
        return cls(bias_B1SS, reach)

    @override
    def attend(
        self,
        qkv: torch.Tensor,
        num_heads: int,
        dropout: float,
        dropout_keys: LayerDropout,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        query, key, value = by_heads(qkv, num_heads, len(dropout_keys.row_B))
        num_tokens = query.shape[2]
        if dropout and qkv.device.type == "cpu":
            keep_BNSS = keyed_factors(num_heads, num_tokens, dropout, dropout_keys)
            context_BNSD = attend_with_plain_operations(query, key, value, self.bias_B1SS, keep_BNSS)
        elif dropout:
            context_BNSD = F.scaled_dot_product_attention(
                query, key, value, attn_mask=self.bias_B1SS, dropout_p=dropout
            )
        elif qkv.dtype == torch.bfloat16 and bf16_is_faster_plain(qkv.device, num_tokens):
            context_BNSD = attend_with_plain_operations(query, key, value, self.bias_B1SS)
        elif self.reach is not None and blocks_are_faster(num_tokens, self.reach, self.bias_B1SS.dtype):
            context_BNSD = attend_in_windows(query, key, value, self.bias_B1SS, self.reach)
        else:
            context_BNSD = F.scaled_dot_product_attention(query, key, value, attn_mask=self.bias_B1SS, dropout_p=0.0)
        return context_BNSD.transpose(1, 2).reshape(len(qkv), -1)

    @classmethod
    @override
    def disorder(cls, deterministic: bool) -> str:
        return "torch's kernel may add in any order"


@dataclass(frozen=True, slots=True, eq=False)
class FlashMask(LayerMask):
    """Boundaries of the examples in packed rows; FlashAttention computes each example as a sequence of its own."""

    name = "flash"
    title = "FlashAttention"
    advantage = "its kernels have dropout and windows and compute no pairs of tokens from different examples"
    sums_bias = True

    examples: ExampleBounds
    reach: int | None = None

    @classmethod
    @override
    def limit(cls, config: Config) -> str:
        return kernel_limit(config.train.precision, head_widths(config.model))

    @classmethod
    @override
    def bounds(cls, ids_BS: NDArray[Any], special: SpecialIds, device: torch.device) -> ExampleBounds:
        return example_bounds(ids_BS, special).to(device)

    @classmethod
    @override
    def of_rows(
        cls, layout: RowLayout, dtype: torch.dtype, bounds: ExampleBounds | None, reach: int | None = None
    ) -> FlashMask:
        if bounds is None:
            raise ValueError(
                "attention backend flash needs StepInput.bounds; make them from the ids on the host with "
                "flash_attention.example_bounds(ids, special).to(device)"
            )
        return cls(bounds, reach)

    @override
    def attend(
        self,
        qkv: torch.Tensor,
        num_heads: int,
        dropout: float,
        dropout_keys: LayerDropout,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return flash_attention(
            qkv, num_heads, self.examples, dropout, self.reach, bias=bias, backend=dropout_keys.backend
        )

    @classmethod
    @override
    def disorder(cls, deterministic: bool) -> str:
        return "" if deterministic else "engine.deterministic is false"

    @override
    def dynamic_sizes(self) -> list[tuple[torch.Tensor, int]]:
        return [(self.examples.cu_seqlens, 0)]


class Flash3Mask(FlashMask):
    """Bounds of the examples for FlashAttention 3, whose kernels torch's operators then run in place of its own."""

    name = "flash3"
    title = "FlashAttention 3"
    advantage = "its kernels are made for this GPU and compute no pairs of tokens from different examples"

    __slots__ = ()

    @classmethod
    @override
    def limit(cls, config: Config) -> str:
        return flash3_limit(config.model.largest_attention_dropout) or super().limit(config)

    @classmethod
    @override
    def switch_on(cls) -> None:
        use_kernels("FA3")


@dataclass(frozen=True, slots=True, eq=False)
class FlexMask(LayerMask):
    """Blocks of queries and keys for FlexAttention, which computes only those that the mask does not rule out."""

    name = "flex"
    title = "FlexAttention"
    advantage = "skips blocks of tokens from different examples"

    blocks: BlockMask

    @classmethod
    @override
    def limit(cls, config: Config) -> str:
        dropout = config.model.largest_attention_dropout
        if dropout:
            key = "attention_dropout" if config.model.attention_dropout else "generator_dropout"
            return f"it has no dropout, and model.{key} is {dropout:g}"
        if importlib.util.find_spec("triton") is None:
            return "it needs the package triton, which is not installed"
        return ""

    @classmethod
    @override
    def of_rows(
        cls, layout: RowLayout, dtype: torch.dtype, bounds: ExampleBounds | None, reach: int | None = None
    ) -> FlexMask:
        return cls(blocks_of_rows(layout.example_BS, reach))

    @override
    def attend(
        self,
        qkv: torch.Tensor,
        num_heads: int,
        dropout: float,
        dropout_keys: LayerDropout,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if dropout:
            raise ValueError(
                f"FlexAttention cannot drop attention probabilities (asked for {dropout}); set "
                f"model.attention_dropout: 0 or engine.attention: flash"
            )
        query, key, value = by_heads(qkv, num_heads, len(dropout_keys.row_B))
        context_BNSD = flex_function(qkv.is_cuda)(query, key, value, block_mask=self.blocks)
        return context_BNSD.transpose(1, 2).reshape(len(qkv), -1)


BACKENDS: dict[str, type[LayerMask]] = {mask.name: mask for mask in (SdpaMask, FlashMask, Flash3Mask, FlexMask)}


@dataclass(frozen=True, slots=True, eq=False)
class AttentionScopes:
    """Masks of a batch for an architecture with global and local attention layers, and the positions of the tokens."""

    global_mask: LayerMask  # for global layers, in which a token sees its whole example
    local_mask: LayerMask  # for local layers, in which a token sees a window of its example
    position_BS: torch.Tensor  # int64 position of each token within its example

    def dynamic_sizes(self) -> list[tuple[torch.Tensor, int]]:
        """Return (tensor, dimension) of sizes that differ between batches of one shape, for torch.compile."""
        return [*self.global_mask.dynamic_sizes(), *self.local_mask.dynamic_sizes()]


# Masks of a whole network: one for all layers, or one for each kind of layer.
AttentionMask = LayerMask | AttentionScopes


def new_attention_mask(
    model: ModelConfig,
    layout: RowLayout,
    dtype: torch.dtype,
    backend: type[LayerMask] = SdpaMask,
    bounds: ExampleBounds | None = None,
) -> AttentionMask:
    """Return the attention mask for rows of this layout, in the form that the encoders of `model.architecture` expect.

    `bounds` come from `LayerMask.bounds` of the backend; `dtype` is that of a mask that is added to attention scores.
    """
    global_mask = backend.of_rows(layout, dtype, bounds)
    if model.architecture == "bert":
        return global_mask
    local_mask = backend.of_rows(layout, dtype, bounds, reach=model.local_window // 2)
    return AttentionScopes(global_mask=global_mask, local_mask=local_mask, position_BS=layout.position_BS)


def head_widths(model: ModelConfig) -> list[int]:
    """Return the different widths of the heads of both towers, in ascending order."""
    return sorted({tower.hidden_size // tower.num_heads for tower in (model.discriminator, model.generator)})
