"""Attention inside each example of a row: how it is computed, and the one place where that is chosen.

    sdpa   torch's scaled_dot_product_attention with a bias that is -inf between examples: any device, any dropout.
           With dropout on a CPU the same in plain operations, dropped by the bits of (seed, step, row, place)
    flex   FlexAttention, told by blocks of 128 x 128 which hold no two tokens of one example: those are never
           computed, and no [B, 1, S, S] bias exists. A GPU with Triton, no dropout of attention probabilities

Guarantee: the same function to rounding, pads included: they attend to pads. Both forwards are tested against float64;
flex has a backward on a GPU only, where the trial and benchmarks/gpu.py hold it against sdpa's.

`auto` takes flex where it can run, after a trial of both directions on this very device; else sdpa. Every corpus has
something to skip, for rows are packed or padded. The choice and its reason are in the first lines of a run's log.

Where it stops: `electric` needs directions, which only the bias has. Not chosen: FlashAttention's varlen kernels,
which know no dropout either and want the lengths on the host.

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
from electra_dist.model.rows import RowLayout, attention_bias

Scope = torch.Tensor | BlockMask  # which keys a query sees: a bias [B, 1, S, S], or blocks


class AttentionChoice(NamedTuple):
    """How attention is computed, and why."""

    backend: str
    reason: str


SDPA = AttentionChoice("sdpa", "default")


def same_example(layout: RowLayout, dtype: torch.dtype, backend: str) -> Scope:
    """The scope of a batch: what `attend` needs, for all layers of all towers.

    Args:
        layout: of the rows.
        dtype: of a bias.
        backend: "sdpa" or "flex".
    """
    if backend == "sdpa":
        return attention_bias(layout, dtype)
    example_BS = layout.example_BS
    rows, tokens = example_BS.shape

    def together(b: torch.Tensor, h: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return example_BS[b, query] == example_BS[b, key]

    return create_block_mask(together, rows, None, tokens, tokens, device=example_BS.device)


def attend(
    query_BNSD: torch.Tensor,
    key_BNSD: torch.Tensor,
    value_BNSD: torch.Tensor,
    scope: Scope,
    dropout: float = 0.0,
    keep_BNSS: torch.Tensor | None = None,
) -> torch.Tensor:
    """[B, N, S, D]: softmax(q k^T / sqrt(D)) v over the keys in scope, with dropout of the probabilities.

    Args:
        dropout: probability, drawn by torch's generator.
        keep_BNSS: or what the probabilities are multiplied with: on a CPU torch has no fused attention with dropout
            and takes 10 ns to draw one of its bits.
    """
    if keep_BNSS is not None:
        assert isinstance(scope, torch.Tensor)
        compute = torch.promote_types(query_BNSD.dtype, torch.float32)
        with torch.autocast(query_BNSD.device.type, enabled=False):
            query_BNSD, key_BNSD = query_BNSD.to(compute) * query_BNSD.shape[-1] ** -0.5, key_BNSD.to(compute)
            weight_BNSS = (query_BNSD @ key_BNSD.transpose(-1, -2)).add_(scope).softmax(-1) * keep_BNSS.to(compute)
            return (weight_BNSS @ value_BNSD.to(compute)).to(value_BNSD.dtype)
    if isinstance(scope, torch.Tensor):
        return F.scaled_dot_product_attention(query_BNSD, key_BNSD, value_BNSD, attn_mask=scope, dropout_p=dropout)
    assert dropout == 0, "FlexAttention drops nothing"
    out_BNSD: torch.Tensor = _flex(query_BNSD.is_cuda)(query_BNSD, key_BNSD, value_BNSD, block_mask=scope)
    return out_BNSD


def choose_attention(config: Config, device: str) -> AttentionChoice:
    """What a run uses on `device` ("cuda" or "cpu").

    Raises:
        UserError: flex is demanded where it cannot run.
    """
    if config.engine.attention == "flex" and device != "cuda":
        raise UserError(
            "engine.attention: flex needs a GPU, FlexAttention has no backward elsewhere: set auto or sdpa"
        )
    if config.engine.attention != "auto":
        return AttentionChoice(config.engine.attention, "engine.attention")
    if config.objective.name == "electric":
        return AttentionChoice("sdpa", "electric reads in two directions")
    if config.model.attention_dropout:
        return AttentionChoice("sdpa", "FlexAttention has no dropout")
    if device != "cuda":
        return AttentionChoice("sdpa", "a CPU")
    if importlib.util.find_spec("triton") is None:
        return AttentionChoice("sdpa", "FlexAttention needs triton")
    if fault := _trial(device, torch.bfloat16 if config.train.precision == "bf16" else torch.float32):
        return AttentionChoice("sdpa", f"FlexAttention failed its trial: {fault}")
    return AttentionChoice("flex", "skips blocks between examples")


def _trial(device: str, dtype: torch.dtype) -> str:
    """Both backends forward and backward on two packed rows; what is wrong with flex, or nothing."""
    generator = torch.Generator(device).manual_seed(0)
    example_BS = torch.arange(256, device=device).div(100, rounding_mode="floor").expand(2, 256)
    layout = RowLayout(example_BS, example_BS, example_BS, example_BS >= 0)
    found: dict[str, list[torch.Tensor]] = {}
    query, key, value, upstream = torch.randn((4, 2, 2, 256, 64), generator=generator, device=device, dtype=dtype)
    try:
        for backend in ("sdpa", "flex"):
            given = [each.clone().requires_grad_() for each in (query, key, value)]
            out = attend(given[0], given[1], given[2], same_example(layout, dtype, backend))
            found[backend] = [out, *torch.autograd.grad(out, given, upstream)]
    except Exception as error:  # noqa: BLE001  whatever a compiler raises: a run must not die of a faster way
        return (str(error).splitlines() or [type(error).__name__])[0][:120]
    worst = max((a - b).abs().max().item() for a, b in zip(found["sdpa"], found["flex"]))
    return f"it differs by {worst:.2g}" if worst > 0.05 else ""


@functools.cache
def _flex(compiled: bool) -> Callable[..., Any]:
    """Uncompiled it holds all scores and has no backward: for tests of the forward on a CPU."""
    if not compiled:
        return flex_attention
    made: Callable[..., Any] = torch.compile(flex_attention, dynamic=False)
    return made
