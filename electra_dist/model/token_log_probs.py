"""Computes the log-probability of one token per row under a token head, with a gradient for each row.

Guarantee: the result is `log softmax(x W^T + bias)[target]` for every row, and the logits of the whole batch never
exist at once. Logits
exist for one chunk of rows at a time, in forward and again in backward. Softmax and sums over chunks are in fp32 or
wider. The pad rows of the table are left out. Nothing waits for the device.

`electra_kernels.mlm_head` cannot be used for this: it returns a weighted sum whose weights must be known beforehand.
The objectives with a copy gate, a policy gradient or a cloze model need the log-probability of each row.

Cost: four matrix products instead of three, because backward computes the logits again.

Shapes: M rows, D features, V padded vocabulary.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.autograd.function import once_differentiable

CHUNK_ROWS = 2048  # rows whose logits exist at the same time


def token_log_probs(
    x_MD: torch.Tensor, table_VD: torch.Tensor, bias_V: torch.Tensor, target_M: torch.Tensor, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probability of each row's target token, and each row's most probable token.

    Args:
        x_MD: features of the rows; cast to the dtype of the table.
        table_VD: token table, with its pad rows at the end.
        bias_V: output bias, `vocab_size` entries.
        target_M: int64 tokens in [0, vocab_size).
        vocab_size: number of tokens, without the pad rows of the table.

    Returns:
        Log-probabilities in nats, [M] fp32 (fp64 for fp64 input), with gradients to x, table and bias; and the most
        probable tokens, [M] int64.
    """
    device_type = x_MD.device.type
    under_autocast = device_type != "meta" and torch.is_autocast_enabled(device_type)
    with torch.autocast(device_type, enabled=False) if under_autocast else contextlib.nullcontext():
        log_prob_M, best_M = _TokenLogProbs.apply(x_MD.to(table_VD.dtype), table_VD, bias_V, target_M, vocab_size)
    return log_prob_M, best_M


def _logits(x_MD: torch.Tensor, table_VD: torch.Tensor, bias_V: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return the logits over the vocabulary without the pad rows of the table, [M, vocab_size] in fp32 or wider."""
    logits_MV = (x_MD @ table_VD.t())[:, :vocab_size]
    return logits_MV.to(torch.promote_types(logits_MV.dtype, torch.float32)) + bias_V


class _TokenLogProbs(torch.autograd.Function):
    """Autograd function behind `token_log_probs`; its backward pass computes the logits again, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        x_MD: torch.Tensor,
        table_VD: torch.Tensor,
        bias_V: torch.Tensor,
        target_M: torch.Tensor,
        vocab_size: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each row's log-probability of its target and its most probable token, [M] each.

        Each row's log-sum-exp is kept for the backward pass.
        """
        table = _for_products(table_VD)
        target_logits, log_sum_exps, most_probable = [], [], []
        for x, target in zip(x_MD.split(CHUNK_ROWS), target_M.split(CHUNK_ROWS)):
            logits = _logits(x.to(table.dtype), table, bias_V, vocab_size)
            target_logits.append(logits.gather(1, target[:, None])[:, 0])
            log_sum_exps.append(logits.logsumexp(1))
            most_probable.append(logits.argmax(1))
        target_logit_M = torch.cat(target_logits)
        log_sum_exp_M = torch.cat(log_sum_exps)
        best_M = torch.cat(most_probable)
        ctx.save_for_backward(x_MD, table_VD, bias_V, target_M, log_sum_exp_M)
        ctx.vocab_size = vocab_size
        ctx.mark_non_differentiable(best_M)
        return target_logit_M - log_sum_exp_M, best_M

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_M: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of x, table and bias.

        The gradient of log softmax(z)[t] by z is onehot(t) - softmax(z), times the upstream gradient of the row.
        """
        x_MD, table_VD, bias_V, target_M, log_sum_exp_M = ctx.saved_tensors
        table = _for_products(table_VD)
        sum_dtype = log_sum_exp_M.dtype
        grad_x_MD = torch.empty_like(x_MD)
        grad_table_VD = torch.zeros_like(table, dtype=sum_dtype)
        grad_bias_V = torch.zeros_like(bias_V, dtype=sum_dtype)
        for begin in range(0, len(x_MD), CHUNK_ROWS):
            rows = slice(begin, begin + CHUNK_ROWS)
            x = x_MD[rows].to(table.dtype)
            upstream = grad_M[rows, None].to(sum_dtype)
            softmax = (_logits(x, table, bias_V, ctx.vocab_size) - log_sum_exp_M[rows, None]).exp_()
            grad_logits = softmax.mul_(-upstream).scatter_add_(1, target_M[rows, None], upstream)
            grad_bias_V += grad_logits.sum(0)
            grad_logits = grad_logits.to(table.dtype)
            grad_x_MD[rows] = grad_logits @ table[: ctx.vocab_size]
            grad_table_VD[: ctx.vocab_size] += grad_logits.t() @ x
        return grad_x_MD, grad_table_VD.to(table_VD.dtype), grad_bias_V.to(bias_V.dtype), None, None


def _for_products(table_VD: torch.Tensor) -> torch.Tensor:
    """Return the token table in the dtype of the matrix products: fp32 or wider on a CPU, unchanged on other devices.

    On a CPU, products in bf16 or fp16 are six times slower than in fp32.
    """
    if table_VD.device.type == "cpu":
        return table_VD.to(torch.promote_types(table_VD.dtype, torch.float32))
    return table_VD
