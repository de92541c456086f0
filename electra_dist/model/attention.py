"""Computes attention inside each example of a row with one of two backends, and chooses the backend of a run.

    sdpa   torch's scaled_dot_product_attention with a bias that is -inf between examples. It runs on any device with
           any dropout. With dropout on a CPU the same function is computed with plain operations, and the dropped
           probabilities follow from (seed, step, row, layer, position).
    flex   FlexAttention with a mask of 128 x 128 blocks. Blocks that hold no two tokens of one example are never
           computed, and no [B, 1, S, S] bias exists. It needs a GPU with Triton and has no attention dropout.

Guarantee: both backends compute the same function to rounding, pads included: pads attend to pads. Both forward passes
are tested against float64. flex has a backward pass on a GPU only; the trial below and benchmarks/gpu.py compare it
with sdpa's there.

How: `engine.attention: auto` takes flex where it can run and where a forward and a backward pass on this device agree
with sdpa, and takes sdpa otherwise. Rows are packed or padded, so every corpus has blocks to skip. The choice and its
reason are among the first lines of a run's log.

Limits: the objective `electric` needs one-directional attention, which only the bias can express. FlashAttention's
varlen kernels were not chosen: they have no dropout of this kind either and need the lengths on the host.

Shapes: B rows, N heads, S tokens, D features of a head.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from electra_dist.config import Config
from electra_dist.errors import UserError
from electra_dist.model.row_layout import RowLayout, attention_bias

AttentionMask = torch.Tensor | BlockMask  # which keys a query sees: a bias [B, 1, S, S] for sdpa, blocks for flex


class AttentionChoice(NamedTuple):
    """Attention backend of a run, with the reason for the choice, which the run writes to its log."""

    backend: str  # "sdpa" or "flex"
    reason: str


SDPA = AttentionChoice("sdpa", "default")

_TRIAL_SHAPE = (2, 2, 256, 64)  # rows, heads, tokens and width of a head in the trial of FlexAttention
_TRIAL_TOLERANCE = 0.05  # largest difference allowed between sdpa and flex; bf16 numbers near 1 are 0.008 apart


def same_example(layout: RowLayout, dtype: torch.dtype, backend: str) -> AttentionMask:
    """Return the attention mask that lets tokens attend to tokens of the same example only.

    A row may hold several examples, packed one after another. Its pads are treated as one more example, so a pad
    attends to pads. One mask serves all layers of generator and discriminator.

    Args:
        layout: structure of the rows, from `row_layout.derive`.
        dtype: dtype of the bias; flex ignores it.
        backend: "sdpa" for a bias [B, 1, S, S] of 0 and -inf, "flex" for a `BlockMask` of FlexAttention.
    """
    if backend == "sdpa":
        return attention_bias(layout, dtype)
    example_BS = layout.example_BS
    num_rows, num_tokens = example_BS.shape

    def in_same_example(row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Return whether a query and a key are in the same example of a row, as FlexAttention's `mask_mod`.

        FlexAttention passes index tensors: row, attention head (unused), and the positions of query and key.
        """
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
    attention_mask: AttentionMask,
    dropout: float = 0.0,
    keep_BNSS: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return softmax(q k^T / sqrt(D)) v over the keys that the mask allows, [B, N, S, D].

    The type of the mask selects the backend. A tensor is added to the scores by torch's scaled_dot_product_attention
    ("sdpa"); a `BlockMask` selects FlexAttention ("flex").

    Args:
        query_BNSD: queries.
        key_BNSD: keys.
        value_BNSD: values.
        attention_mask: result of `same_example`; a bias may have more entries set to -inf.
        dropout: probability of dropping an attention probability, drawn from torch's generator; must be 0 with flex.
        keep_BNSS: factors by which the attention probabilities are multiplied, 0 or 1 / (1 - p); then `dropout` is
            ignored and the mask must be a bias. They are used on a CPU, where torch has no fused attention with
            dropout and needs 10 ns for each random bit.
    """
    if keep_BNSS is not None:
        assert isinstance(attention_mask, torch.Tensor)
        return _attend_with_factors(query_BNSD, key_BNSD, value_BNSD, attention_mask, keep_BNSS)
    if isinstance(attention_mask, torch.Tensor):
        return F.scaled_dot_product_attention(
            query_BNSD, key_BNSD, value_BNSD, attn_mask=attention_mask, dropout_p=dropout
        )
    assert dropout == 0, "FlexAttention has no dropout"
    flex = _flex_function(query_BNSD.is_cuda)
    out_BNSD: torch.Tensor = flex(query_BNSD, key_BNSD, value_BNSD, block_mask=attention_mask)
    return out_BNSD


def _attend_with_factors(
    query_BNSD: torch.Tensor,
    key_BNSD: torch.Tensor,
    value_BNSD: torch.Tensor,
    bias_B1SS: torch.Tensor,
    keep_BNSS: torch.Tensor,
) -> torch.Tensor:
    """Return attention with given dropout factors, [B, N, S, D], computed with plain operations in fp32 or wider.

    Every attention probability is multiplied by its factor in `keep_BNSS` before it weighs the values.

    Args:
        query_BNSD: queries, not scaled yet.
        key_BNSD: keys.
        value_BNSD: values; the result has their dtype.
        bias_B1SS: added to the scores; -inf where a query must not see a key.
        keep_BNSS: dropout factor of each attention probability, 0 or 1 / (1 - p).
    """
    compute = torch.promote_types(query_BNSD.dtype, torch.float32)
    scale = query_BNSD.shape[-1] ** -0.5
    with torch.autocast(query_BNSD.device.type, enabled=False):
        scaled_query_BNSD = query_BNSD.to(compute) * scale
        score_BNSS = (scaled_query_BNSD @ key_BNSD.to(compute).transpose(-1, -2)).add_(bias_B1SS)
        weight_BNSS = score_BNSS.softmax(-1) * keep_BNSS.to(compute)
        return (weight_BNSS @ value_BNSD.to(compute)).to(value_BNSD.dtype)


def choose_attention(config: Config, device: str) -> AttentionChoice:
    """Choose the attention backend of a run, "sdpa" or "flex", on this rank's device; return it with the reason.

    With `engine.attention: auto` on a GPU this compiles FlexAttention and compares one forward and backward pass with
    sdpa's. Not collective: ranks may come to different results, so the caller must make all ranks use the same one.

    Args:
        config: the run's config; `engine.attention`, the objective, dropout and precision decide.
        device: "cuda" or "cpu".

    Raises:
        UserError: `engine.attention: flex` is set and `device` is not a GPU.
    """
    if config.engine.attention == "flex" and device != "cuda":
        raise UserError(
            "engine.attention: flex needs a GPU, because FlexAttention has no backward pass on a CPU; set "
            "engine.attention to auto or sdpa"
        )
    if config.engine.attention != "auto":
        return AttentionChoice(config.engine.attention, "set by engine.attention")
    if config.objective.name == "electric":
        return AttentionChoice(
            "sdpa", "objective electric reads in two directions, and its one-way masks exist for sdpa only"
        )
    if config.model.attention_dropout:
        return AttentionChoice("sdpa", "model.attention_dropout is not 0, and FlexAttention has no dropout")
    if device != "cuda":
        return AttentionChoice("sdpa", "FlexAttention does not train on a CPU")
    if importlib.util.find_spec("triton") is None:
        return AttentionChoice("sdpa", "FlexAttention needs the package triton, which is not installed")
    dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
    fault = _find_flex_fault(device, dtype)
    if fault:
        return AttentionChoice("sdpa", f"FlexAttention failed its trial: {fault}")
    return AttentionChoice("flex", "skips blocks of tokens from different examples")


def _find_flex_fault(device: str, dtype: torch.dtype) -> str:
    """Return what is wrong with FlexAttention on this device, or "" if it may be used.

    Both backends, sdpa and flex, run forward and backward on the same two rows of random numbers, each of which packs
    several examples. A fault is an exception of either backend, or an absolute difference above 0.05 between their
    outputs or between their gradients of query, key or value.

    Args:
        device: "cuda" or "cpu".
        dtype: dtype of query, key and value.
    """
    num_rows, num_heads, num_tokens, head_width = _TRIAL_SHAPE
    generator = torch.Generator(device).manual_seed(0)
    query, key, value, upstream = torch.randn(
        (4, num_rows, num_heads, num_tokens, head_width), generator=generator, device=device, dtype=dtype
    )

    # Examples of 100, 100 and 56 tokens, so that borders of examples lie inside the blocks of 128 tokens. The mask
    # depends on `example_BS` only; the other fields are placeholders.
    example_BS = torch.arange(num_tokens, device=device).div(100, rounding_mode="floor").expand(num_rows, num_tokens)
    layout = RowLayout(
        example_BS=example_BS, position_BS=example_BS, token_type_BS=example_BS, is_real_BS=example_BS >= 0
    )

    results: dict[str, list[torch.Tensor]] = {}
    try:
        for backend in ("sdpa", "flex"):
            inputs = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
            mask = same_example(layout, dtype, backend)
            out = attend(inputs[0], inputs[1], inputs[2], mask)
            gradients = torch.autograd.grad(out, inputs, upstream)
            results[backend] = [out, *gradients]
    except Exception as error:  # noqa: BLE001  A compiler may raise anything, and sdpa can still run.
        return _first_line(error)

    # One difference for the output, and one for each gradient.
    differences = [(sdpa - flex).abs().max().item() for sdpa, flex in zip(results["sdpa"], results["flex"])]
    largest_difference = max(differences)
    if largest_difference > _TRIAL_TOLERANCE:
        return f"it differs by {largest_difference:.2g} from sdpa, more than {_TRIAL_TOLERANCE}"
    return ""


def _first_line(error: Exception) -> str:
    """Return at most 120 characters of the first line of an error's message, or the type's name if it has none.

    The text becomes part of one line in the run's log, so long compiler output is cut.
    """
    lines = str(error).splitlines()
    first = lines[0] if lines else type(error).__name__
    return first[:120]


@functools.cache
def _flex_function(compiled: bool) -> Callable[..., Any]:
    """Return the function FlexAttention, compiled by torch.compile if `compiled`; cached, so it compiles once.

    The uncompiled function holds all scores in memory and has no backward pass. It is meant for tests of the forward
    pass on a CPU.
    """
    if not compiled:
        return flex_attention
    function: Callable[..., Any] = torch.compile(flex_attention, dynamic=False)
    return function
