"""Attention kernels of torch compared at the model's shape, each against float64. A part of `gpu.py`.

    efficient     scaled_dot_product_attention with a bias: CUTLASS's memory-efficient kernel
    cuDNN         the same call, answered by cuDNN; with dropout where p x 16 is whole, hence p = 0.125
    flash varlen  FlashAttention on the tokens of all examples one after another, which needs no bias
    flash3        the model's own call, answered by the package flash-attn-3 where it is installed, without dropout
    flex          FlexAttention with a block mask, without dropout

Three facts decide: the time of forward and backward, the error without dropout, and the share of the probabilities
that dropout removes (a backend that ignores dropout has share 0, one that rounds p has another share).

Limits: the kernels need CUDA; on a CPU only torch's plain kernel runs, and the others are rows with `skipped`.

Shapes: B rows, N heads, S tokens, D features of a head, T = B * S.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from gpu_parts.recording import Case, Rows, Setup, profile_kernels, relative_error, time_and_peak
from torch.nn.attention import SDPBackend, sdpa_kernel

# (query, key, value), each [B, N, S, D]; example lengths of the whole batch; dropout -> [B, N, S, D]
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, "Examples", float], torch.Tensor]
_PROBE_TOKENS = 64  # width of a head, so that the values can be the identity
_PROBE_ROWS = 16


class Examples(NamedTuple):
    """Where the examples of a batch begin and end. No example crosses the end of a row."""

    example_BS: torch.Tensor  # int64 number of each token's example
    bias_B1SS: torch.Tensor  # 0 within an example, -inf between two
    begin_E: torch.Tensor  # int32 first token of each example in the flat batch, and T at the end
    longest: int  # tokens


def pack(num_rows: int, num_tokens: int, lengths: list[int], device: str, dtype: torch.dtype) -> Examples:
    """Return where the examples of equal rows begin: in each row those of `lengths`, then one that fills the rest."""
    per_row = [*lengths, num_tokens - sum(lengths)] if sum(lengths) < num_tokens else lengths
    example_S = torch.repeat_interleave(torch.arange(len(per_row)), torch.tensor(per_row))
    example_BS = example_S.expand(num_rows, -1).contiguous().to(device)
    is_same = example_BS[:, None, :, None] == example_BS[:, None, None, :]
    bias = torch.zeros(is_same.shape, dtype=dtype, device=device).masked_fill_(~is_same, float("-inf"))
    ends = torch.tensor(per_row * num_rows).cumsum(0)
    begin = torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(device, torch.int32)
    return Examples(example_BS, bias, begin, max(per_row))


def with_bias(backend: SDPBackend) -> Attention:
    """Return scaled_dot_product_attention with a bias, restricted to one backend of torch."""

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, examples: Examples, p: float) -> Any:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query, key, value, attn_mask=examples.bias_B1SS, dropout_p=p)

    return attend


def flash_varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, examples: Examples, p: float
) -> torch.Tensor:
    """Compute attention with FlashAttention's kernel for sequences of different lengths, as torch contains it."""
    B, N, S, D = query.shape
    flat = [tensor.transpose(1, 2).reshape(B * S, N, D) for tensor in (query, key, value)]
    begin, longest = examples.begin_E, examples.longest
    out, *_ = torch.ops.aten._flash_attention_forward(*flat, begin, begin, longest, longest, p, False, False)
    return out.view(B, S, N, D).transpose(1, 2)


def our_flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, examples: Examples, p: float
) -> torch.Tensor:
    """Compute attention with the function that the model calls. Stacking q, k and v here is no part of the model."""
    from electra_dist.model.flash_attention import ExampleBounds, flash_attention

    B, N, S, D = query.shape
    qkv = torch.cat([tensor.transpose(1, 2).reshape(B * S, N * D) for tensor in (query, key, value)], 1)
    out_TH = flash_attention(qkv, N, ExampleBounds(examples.begin_E, examples.longest), p)
    return out_TH.view(B, S, N, D).transpose(1, 2)


def our_flash3(*inputs: Any) -> torch.Tensor:
    """Compute `our_flash`, after a switch to the kernels of flash-attn-3, which the backward pass needs, too."""
    from electra_dist.model.flash_attention import use_kernels

    use_kernels("FA3")
    return our_flash(*inputs)


@functools.cache
def _compiled_flex() -> Callable[..., torch.Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def flex(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, examples: Examples, p: float) -> torch.Tensor:
    """Compute attention with FlexAttention; `p` must be 0, because it has no dropout.

    The block mask is built inside this call, so its time is part of a measurement.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    assert p == 0, "FlexAttention has no dropout"
    example_BS = examples.example_BS
    num_rows, num_tokens = example_BS.shape

    def in_same_example(row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return example_BS[row, query] == example_BS[row, key]

    mask = create_block_mask(in_same_example, num_rows, None, num_tokens, num_tokens, device=example_BS.device)
    return _compiled_flex()(query, key, value, block_mask=mask)


CONTENDERS: list[tuple[str, Attention, float]] = [
    ("efficient, bias", with_bias(SDPBackend.EFFICIENT_ATTENTION), 0.1),
    ("efficient, bias", with_bias(SDPBackend.EFFICIENT_ATTENTION), 0.0),
    ("cuDNN, bias", with_bias(SDPBackend.CUDNN_ATTENTION), 0.125),
    ("cuDNN, bias", with_bias(SDPBackend.CUDNN_ATTENTION), 0.1),
    ("cuDNN, bias", with_bias(SDPBackend.CUDNN_ATTENTION), 0.0),
    ("flash varlen", flash_varlen, 0.1),
    ("flash varlen", flash_varlen, 0.0),
    ("ours, flash, with stacking", our_flash, 0.1),
    ("ours, flash, with stacking", our_flash, 0.0),
    ("ours, flash3, with stacking", our_flash3, 0.0),
    ("flex, with its mask", flex, 0.0),
    ("plain", with_bias(SDPBackend.MATH), 0.1),
]


def attention_cases(setup: Setup) -> Iterator[Case]:
    """Yield every contender with its dropout, on rows of three examples, with heads 64 wide."""
    num_rows, num_heads, num_tokens = (2, 2, 64) if setup.smoke else (64, 16, 512)
    device, dtype = setup.device, setup.dtype
    for name, attend, p in CONTENDERS:

        def run(name: str = name, attend: Attention = attend, p: float = p) -> Rows:
            if device == "cpu" and name != "plain":
                return [{"skipped": "needs a CUDA device"}]
            if attend is our_flash3 and importlib.util.find_spec("flash_attn_interface") is None:
                return [{"skipped": "needs the package flash-attn-3"}]
            from electra_dist.model.flash_attention import use_kernels

            use_kernels(None)
            lengths = [num_tokens // 3, num_tokens // 2]
            shape = (num_rows, num_heads, num_tokens, 64)
            call = _differentiated(attend, shape, pack(num_rows, num_tokens, lengths, device, dtype), p, dtype, dtype)
            row = dropped_share(attend, num_heads, p, device, dtype)
            if p == 0:
                drops_nothing = row["right"]
                row |= errors(attend, num_heads, num_tokens, lengths, device, dtype)
                row["right"] = row["right"] and drops_nothing
            row |= time_and_peak(call)
            spent, _, _ = profile_kernels(call)
            return [row | {"kernels": [kernel[:80] for kernel, _ in spent.most_common(4)]}]

        yield Case(f"attention p={p}", name, "attention", run)


def _differentiated(
    attend: Attention, shape: tuple[int, ...], examples: Examples, p: float, dtype: torch.dtype, kind: torch.dtype
) -> Callable[[], list[torch.Tensor]]:
    """Return a call that computes output and gradients in `kind`, from equal numbers, rounded to `dtype`."""
    device = examples.begin_E.device
    generator = torch.Generator(device).manual_seed(0)
    numbers = torch.randn((4, *shape), generator=generator, device=device).to(dtype).to(kind)
    inputs = [tensor.clone().requires_grad_() for tensor in numbers[:3]]

    def call() -> list[torch.Tensor]:
        out = attend(*inputs, examples, p)
        return [out.detach(), *torch.autograd.grad(out, inputs, numbers[3])]

    return call


def errors(
    attend: Attention, num_heads: int, num_tokens: int, lengths: list[int], device: str, dtype: torch.dtype
) -> dict[str, Any]:
    """Compare output and gradients of two rows, without dropout, with torch's plain attention in float64.

    `error` and, for plain attention in the same type, `reference_error` are the largest root-mean-square error of the
    four, relative to the exact values. An error is right up to twice the reference's, plus one rounding.
    """
    shape = (2, num_heads, num_tokens, 64)

    def results(attend: Attention, kind: torch.dtype) -> list[torch.Tensor]:
        return _differentiated(attend, shape, pack(2, num_tokens, lengths, device, kind), 0.0, dtype, kind)()

    plain = with_bias(SDPBackend.MATH)
    exact = results(plain, torch.float64)
    error, reference_error = (
        max(relative_error(value, truth) for value, truth in zip(values, exact))
        for values in (results(attend, dtype), results(plain, dtype))
    )
    right = error <= 2 * reference_error + torch.finfo(dtype).eps
    return {"error": error, "reference_error": reference_error, "right": right}


def dropped_share(attend: Attention, num_heads: int, p: float, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Measure which share of the attention probabilities dropout removes, and by which factor it scales the others.

    Query and key are 0, so that every probability is 1 / _PROBE_TOKENS; the values are the identity, so that the
    output shows each probability after dropout. A result is right if `dropped`, the share of zeros, is within 0.01 of
    p, and `factor`, by which the others have grown, within 1 % of 1 / (1 - p).
    """
    S = _PROBE_TOKENS
    zeros = torch.zeros(_PROBE_ROWS, num_heads, S, S, device=device, dtype=dtype)
    values = torch.eye(S, device=device, dtype=dtype).expand_as(zeros).contiguous()
    one_example_a_row = pack(_PROBE_ROWS, S, [S], device, dtype)
    # Times S: 1 where the probability is that without dropout.
    out = attend(zeros, zeros, values, one_example_a_row, p).double() * S
    dropped = (out == 0).double().mean().item()
    factor = out[out != 0].mean().item()
    right = abs(dropped - p) < 0.01 and abs(factor * (1 - p) - 1) < 0.01
    return {"dropped": round(dropped, 4), "factor": round(factor, 4), "right": right}
