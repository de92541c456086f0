"""FlashAttention's operators by their definition: softmax inside each sequence, one sequence at a time, in float64.

They have the signatures of `torch.ops.aten._flash_attention_forward` and `_flash_attention_backward` and run anywhere.
"""

from __future__ import annotations

import itertools

import torch


def _weights(
    q_NLD: torch.Tensor, k_NLD: torch.Tensor, dropout_p: float, generator: torch.Generator, reach: int | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return scores, their softmax, and the factors of dropout, 0 or 1 / (1 - p), of one sequence of L tokens."""
    score_NLL = q_NLD @ k_NLD.transpose(1, 2) * q_NLD.shape[-1] ** -0.5
    if reach is not None:
        at = torch.arange(q_NLD.shape[1])
        score_NLL = score_NLL.masked_fill((at[:, None] - at).abs() > reach, -torch.inf)
    keep_NLL = torch.ones_like(score_NLL)
    if dropout_p:
        kept = torch.rand(score_NLL.shape, generator=generator, dtype=torch.float64) >= dropout_p
        keep_NLL = kept / (1 - dropout_p)
    return score_NLL, score_NLL.softmax(-1), keep_NLL


def _sequences(cu: torch.Tensor, *parts: torch.Tensor) -> list[list[torch.Tensor]]:
    """Return the parts of each sequence, with heads first, in float64."""
    bounds = cu.tolist()
    assert bounds[0] == 0 and bounds[-1] == len(parts[0]) and bounds == sorted(bounds)
    return [[part[first:end].double().transpose(0, 1) for part in parts] for first, end in itertools.pairwise(bounds)]


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[torch.Tensor, ...]:
    """Return output, logsumexp, random state (a seed), an unused number and an empty mask, like torch's operator."""
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert not is_causal and not return_debug_mask and window_size_left == window_size_right
    seed = int(torch.randint(2**31, ()))
    generator = torch.Generator().manual_seed(seed)
    outs, sums = [], []
    for q, k, v in _sequences(cu_q, query, key, value):
        assert q.shape[1] <= max_q == max_k
        score, weight, keep = _weights(q, k, dropout_p, generator, window_size_left)
        outs.append((weight * keep @ v).transpose(0, 1))
        sums.append(score.logsumexp(-1))
    state = torch.tensor([seed, 0]).to(torch.uint64)
    out = torch.cat(outs).to(query.dtype)
    return out, torch.cat(sums, 1).float(), state, torch.zeros((), dtype=torch.uint64), query.new_empty(0)


def backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: torch.Tensor,
    unused: torch.Tensor,
    *,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of query, key and value, written out, with the dropout of the random state."""
    generator = torch.Generator().manual_seed(int(rng_state.to(torch.int64)[0]))
    grads: list[list[torch.Tensor]] = []
    for q, k, v, g, o in _sequences(cu_q, query, key, value, grad, out):
        _score, weight, keep = _weights(q, k, dropout_p, generator, window_size_left)
        torch.testing.assert_close((weight * keep @ v).to(out.dtype).double(), o)  # the same dropout as forward
        grad_weight = (g @ v.transpose(1, 2)) * keep
        grad_score = weight * (grad_weight - (grad_weight * weight).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
        grads.append([grad_score @ k, grad_score.transpose(1, 2) @ q, (weight * keep).transpose(1, 2) @ g])
    return tuple(torch.cat([part.transpose(0, 1) for part in parts]).to(query.dtype) for parts in zip(*grads))
