"""The log-probability of one token per row under a token head, differentiable row by row.

Guarantee: `log softmax(x W^T + bias)[target]` of every row without logits of the whole batch ever existing: they live
one chunk of rows at a time, in forward and again in backward. Softmax and sums over chunks are in fp32 at least.
Padded rows of the table have no part in it. Nothing waits for the device.

Why beside `electra_kernels.mlm_head`: that one gives a weighted sum whose weights are known beforehand. A copy gate, a
policy gradient and a cloze model need each row's own number.

Cost: four matrix products instead of three: backward forms the logits again.

Shapes: M rows, D features, V padded vocabulary.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.autograd.function import once_differentiable

CHUNK_ROWS = 2048


def token_log_probs(
    x_MD: torch.Tensor, table_VD: torch.Tensor, bias_V: torch.Tensor, target_M: torch.Tensor, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of `target_M` and the most probable token of every row.

    Args:
        x_MD: features; taken in the table's precision.
        table_VD: token table, padded rows at the end.
        bias_V: bias of `vocab_size` entries.
        target_M: int64 tokens in [0, vocab_size).
        vocab_size: tokens that exist.

    Returns:
        [M] fp32 (fp64 for fp64 input), with gradients to x, table and bias; [M] int64.
    """
    kind = x_MD.device.type
    mixed = kind != "meta" and torch.is_autocast_enabled(kind)
    with torch.autocast(kind, enabled=False) if mixed else contextlib.nullcontext():
        log_prob_M, best_M = _TokenLogProbs.apply(x_MD.to(table_VD.dtype), table_VD, bias_V, target_M, vocab_size)
    return log_prob_M, best_M


def _logits(x_MD: torch.Tensor, table_VD: torch.Tensor, bias_V: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[M, vocab_size] in fp32 at least."""
    logits_MV = (x_MD @ table_VD.t())[:, :vocab_size]
    return logits_MV.to(torch.promote_types(logits_MV.dtype, torch.float32)) + bias_V


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_MD: torch.Tensor,
        table_VD: torch.Tensor,
        bias_V: torch.Tensor,
        target_M: torch.Tensor,
        vocab_size: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        table = _for_products(table_VD)
        columns = []
        for x, target in zip(x_MD.split(CHUNK_ROWS), target_M.split(CHUNK_ROWS)):
            logits = _logits(x.to(table.dtype), table, bias_V, vocab_size)
            columns.append((logits.gather(1, target[:, None])[:, 0], logits.logsumexp(1), logits.argmax(1)))
        at_target_M, norm_M, best_M = (torch.cat(column) for column in zip(*columns))
        ctx.save_for_backward(x_MD, table_VD, bias_V, target_M, norm_M)
        ctx.vocab_size = vocab_size
        ctx.mark_non_differentiable(best_M)
        return at_target_M - norm_M, best_M

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_M: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
        x_MD, table_VD, bias_V, target_M, norm_M = ctx.saved_tensors
        table = _for_products(table_VD)
        grad_x_MD = torch.empty_like(x_MD)
        grad_table_VD = torch.zeros_like(table, dtype=norm_M.dtype)
        grad_bias_V = torch.zeros_like(bias_V, dtype=norm_M.dtype)
        for begin in range(0, len(x_MD), CHUNK_ROWS):
            rows = slice(begin, begin + CHUNK_ROWS)
            x, grad = x_MD[rows].to(table.dtype), grad_M[rows, None].to(norm_M.dtype)
            softmax = (_logits(x, table, bias_V, ctx.vocab_size) - norm_M[rows, None]).exp_()
            grad_logits = softmax.mul_(-grad).scatter_add_(1, target_M[rows, None], grad)
            grad_bias_V += grad_logits.sum(0)
            low = grad_logits.to(table.dtype)
            grad_x_MD[rows] = low @ table[: ctx.vocab_size]
            grad_table_VD[: ctx.vocab_size] += low.t() @ x
        return grad_x_MD, grad_table_VD.to(table_VD.dtype), grad_bias_V.to(bias_V.dtype), None, None


def _for_products(table_VD: torch.Tensor) -> torch.Tensor:
    """The table in the precision of the products: on a CPU low-precision ones are six times slower than fp32."""
    if table_VD.device.type == "cpu":
        return table_VD.to(torch.promote_types(table_VD.dtype, torch.float32))
    return table_VD
