"""Compute the log-probability of one token per row under a token head, with a gradient for each row.

Guarantee: the result is `log softmax(x W^T + bias)[target]` for every row. Logits exist for one chunk of rows at a
time, in forward and again in backward. Softmax and sums over chunks are in fp32 or wider. Nothing waits for the
device.

Why: `electra_kernels.mlm_head` returns a weighted sum whose weights must be known beforehand. The objectives with a
copy gate, a policy gradient or a cloze model need each row. It costs a fourth matrix product in place of three.

Shapes: M rows, C rows of one chunk, D features, V padded vocabulary.
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
    """Return each row's log-probability of its target, [M] nats, and its most probable token, int64 [M].

    Log-probabilities are fp32 or wider. The table may have padding rows after the first `vocab_size`; the bias has
    none.
    """
    device_type = x_MD.device.type
    under_autocast = device_type != "meta" and torch.is_autocast_enabled(device_type)
    without_autocast: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if under_autocast:
        without_autocast = torch.autocast(device_type, enabled=False)
    with without_autocast:
        log_prob_M, best_M = _TokenLogProbs.apply(x_MD.to(table_VD.dtype), table_VD, bias_V, target_M, vocab_size)
    return log_prob_M, best_M


@torch.no_grad()
def token_entropies(x_MD: torch.Tensor, table_VD: torch.Tensor, bias_V: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return the entropy of each row's distribution over the tokens, in nats, [M] fp32 or wider, without gradient."""
    products_table_VD = _for_products(table_VD)
    entropies = []
    for x_CD in x_MD.split(CHUNK_ROWS):
        logits_CV = _logits(x_CD.to(products_table_VD.dtype), products_table_VD, bias_V, vocab_size)
        mean_logit_C = (logits_CV.softmax(1) * logits_CV).sum(1)
        entropies.append(logits_CV.logsumexp(1) - mean_logit_C)
    return torch.cat(entropies)


def _logits(x_MD: torch.Tensor, table_VD: torch.Tensor, bias_V: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return x W^T + bias, [M, vocab_size] in fp32 or wider."""
    logits_MV = (x_MD @ table_VD.t())[:, :vocab_size]
    wide_dtype = torch.promote_types(logits_MV.dtype, torch.float32)
    return logits_MV.to(wide_dtype) + bias_V


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
        products_table_VD = _for_products(table_VD)
        target_logits = []
        log_sum_exps = []
        most_probable = []
        for x_CD, target_C in zip(x_MD.split(CHUNK_ROWS), target_M.split(CHUNK_ROWS)):
            logits_CV = _logits(x_CD.to(products_table_VD.dtype), products_table_VD, bias_V, vocab_size)
            target_logits.append(logits_CV.gather(1, target_C[:, None])[:, 0])
            log_sum_exps.append(logits_CV.logsumexp(1))
            most_probable.append(logits_CV.argmax(1))
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
        """Return the gradients; that of log softmax(z)[t] by the logits z is onehot(t) - softmax(z)."""
        x_MD, table_VD, bias_V, target_M, log_sum_exp_M = ctx.saved_tensors
        products_table_VD = _for_products(table_VD)
        products_dtype = products_table_VD.dtype
        sum_dtype = log_sum_exp_M.dtype
        grad_x_MD = torch.empty_like(x_MD)
        grad_table_VD = torch.zeros_like(products_table_VD, dtype=sum_dtype)
        grad_bias_V = torch.zeros_like(bias_V, dtype=sum_dtype)
        for begin in range(0, len(x_MD), CHUNK_ROWS):
            chunk = slice(begin, begin + CHUNK_ROWS)
            x_CD = x_MD[chunk].to(products_dtype)
            upstream_C1 = grad_M[chunk, None].to(sum_dtype)

            # softmax(z) = exp(z - log-sum-exp), then upstream * (onehot(target) - softmax) in the same memory.
            logits_CV = _logits(x_CD, products_table_VD, bias_V, ctx.vocab_size)
            softmax_CV = (logits_CV - log_sum_exp_M[chunk, None]).exp_()
            grad_logits_CV = softmax_CV.mul_(-upstream_C1).scatter_add_(1, target_M[chunk, None], upstream_C1)

            # z = x W^T + bias.
            grad_bias_V += grad_logits_CV.sum(0)
            grad_logits_CV = grad_logits_CV.to(products_dtype)
            grad_x_MD[chunk] = grad_logits_CV @ products_table_VD[: ctx.vocab_size]
            grad_table_VD[: ctx.vocab_size] += grad_logits_CV.t() @ x_CD
        return grad_x_MD, grad_table_VD.to(table_VD.dtype), grad_bias_V.to(bias_V.dtype), None, None


def _for_products(table_VD: torch.Tensor) -> torch.Tensor:
    """Return the table for matrix products: on a CPU in fp32 or wider, because bf16 and fp16 are six times slower."""
    if table_VD.device.type == "cpu":
        return table_VD.to(torch.promote_types(table_VD.dtype, torch.float32))
    return table_VD
