"""Define the heads of the towers, which predict tokens or detect replaced ones, and their losses.

Guarantee: the token head is Dense(H -> E) + GELU + LayerNorm, times the token table, plus one bias per token of the
vocabulary. The detection head is Dense(H -> H) + GELU, then Dense(H -> 1). With the architecture `modern` they are the
same functions as the heads of Hugging Face's ModernBertForMaskedLM and ModernBertForTokenClassification on the same
weights. Logits over the vocabulary are computed for the given states only, usually those of the masked positions. The
rows that pad the table are neither predicted nor sampled. Losses are at least fp32, whatever the dtype of the
parameters.

How: the heads hold the weights and call the fused losses of `electra_kernels`. The table is an argument of
`GeneratorHead.forward` and not a parameter of the head. The objective reads it from the embeddings in its own forward
pass, in which ZeRO-3 gathers it.

`token_log_probs` is for the objectives with a copy gate, a policy gradient or a cloze model. They need the
log-probability of one token for each row, `log softmax(x W^T + bias)[target]`, with a gradient for each row, while
`electra_kernels.mlm_head` returns a weighted sum whose weights must be known beforehand. It costs a fourth matrix
product in place of three. Logits exist for one chunk of rows at a time, in forward and again in backward. Softmax and
sums over chunks are in fp32 or wider. Nothing waits for the device.

Shapes: M rows, usually masked positions, C rows of one chunk, H hidden width, E embedding width, D features, V padded
vocabulary, B rows of a batch, S tokens, T = B * S.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from electra_kernels.discriminator_tail import RtdOutput, rtd_loss, rtd_loss_of_logits
from electra_kernels.mlm_head import MlmHeadOutput, mlm_head_loss_and_sample
from torch import nn
from torch.autograd.function import once_differentiable
from typing_extensions import override

from electra_dist.config import ModelConfig
from electra_dist.model.fused_layer import Linear, linear

CHUNK_ROWS = 2048  # rows whose logits exist at the same time in `token_log_probs`


class GeneratorHead(nn.Module):
    """Head that predicts tokens, for the generator, or for a discriminator that learns to predict tokens (`mlm`)."""

    def __init__(self, model: ModelConfig, hidden_size: int, embedding_size: int) -> None:
        super().__init__()
        self.vocab_size = model.vocab_size
        self.dense = Linear(hidden_size, embedding_size)
        self.layer_norm = nn.LayerNorm(embedding_size, eps=model.layer_norm_eps)
        self.bias = nn.Parameter(torch.zeros(model.vocab_size))

    def transform(self, hidden_MH: torch.Tensor) -> torch.Tensor:
        """Return the features that are multiplied with the token table, [M, E]: LayerNorm(GELU(Dense(states)))."""
        return self.layer_norm(F.gelu(self.dense(hidden_MH)))

    def forward(
        self,
        hidden_MH: torch.Tensor,
        table_VE: torch.Tensor,
        target_M: torch.Tensor,
        weight_M: torch.Tensor,
        *,
        seed: int,
        step: int,
        row_M: torch.Tensor,
        temperature: float,
        disallow_correct: bool,
        backend: str,
    ) -> MlmHeadOutput:
        """Return the weighted sum of the losses, one sampled token per masked position, and counts for metrics.

        `mlm_head_loss_and_sample` of `electra_kernels.mlm_head` explains the arguments.
        """
        return mlm_head_loss_and_sample(
            self.transform(hidden_MH),
            table_VE,
            self.bias,
            target_M,
            weight_M,
            seed=seed,
            step=step,
            row_M=row_M,
            vocab_size=self.vocab_size,
            temperature=temperature,
            disallow_correct=disallow_correct,
            backend=backend,
        )


class DiscriminatorHead(nn.Module):
    """Head that detects replaced tokens: one logit per token, positive for "replaced"."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        width = model.discriminator.hidden_size
        self.dense = Linear(width, width)
        self.out = nn.Linear(width, 1)

    def logits(self, hidden_BSH: torch.Tensor) -> torch.Tensor:
        """Return the logit of every token, [B, S] in fp32 or wider, for losses that `forward` does not compute."""
        logits_BS = self.out(F.gelu(self.dense(hidden_BSH))).squeeze(-1)
        return logits_BS.to(torch.promote_types(logits_BS.dtype, torch.float32))

    def forward(
        self, hidden_BSH: torch.Tensor, label_BS: torch.Tensor, mask_BS: torch.Tensor, *, backend: str
    ) -> RtdOutput:
        """Return the sum of the binary cross-entropy over the tokens, the logits, and counts for the metrics.

        `label_BS` is True for replaced tokens; `mask_BS` weights each token's loss, and is 0 on pads.
        """
        # `rtd_loss` adds the bias of the dense layer itself, fused with GELU, output unit and loss.
        dense_TH = linear(hidden_BSH, self.dense.weight).flatten(0, 1)
        return rtd_loss(
            dense_TH,
            self.dense.bias,
            self.out.weight[0],
            self.out.bias,
            label_BS.flatten(),
            mask_BS.flatten(),
            backend=backend,
        )


class ModernTokenHead(GeneratorHead):
    """Head of the architecture `modern` that predicts tokens; only its output layer has a bias."""

    def __init__(self, model: ModelConfig, hidden_size: int, embedding_size: int) -> None:
        super().__init__(model, hidden_size, embedding_size)
        self.dense = Linear(hidden_size, embedding_size, bias=False)
        self.layer_norm = nn.LayerNorm(embedding_size, eps=model.layer_norm_eps, bias=False)


class ModernDetectionHead(DiscriminatorHead):
    """Head of the architecture `modern` that detects replaced tokens, with a LayerNorm before its output unit."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__(model)
        width = model.discriminator.hidden_size
        self.dense = Linear(width, width, bias=False)
        self.layer_norm = nn.LayerNorm(width, eps=model.layer_norm_eps, bias=False)

    @override
    def logits(self, hidden_BSH: torch.Tensor) -> torch.Tensor:
        logits_BS = self.out(self.layer_norm(F.gelu(self.dense(hidden_BSH)))).squeeze(-1)
        return logits_BS.to(torch.promote_types(logits_BS.dtype, torch.float32))

    @override
    def forward(
        self, hidden_BSH: torch.Tensor, label_BS: torch.Tensor, mask_BS: torch.Tensor, *, backend: str
    ) -> RtdOutput:
        # `backend` has no effect, because no kernel fuses this head.
        return rtd_loss_of_logits(self.logits(hidden_BSH).flatten(), label_BS.flatten(), mask_BS.flatten())


def token_log_probs(
    x_MD: torch.Tensor, table_VD: torch.Tensor, bias_V: torch.Tensor, target_M: torch.Tensor, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log softmax(x W^T + bias) of each row's target token, [M], and each row's most probable token, int64 [M].

    Log-probabilities are in nats, fp32 or wider, and have gradients. The table W may have padding rows after the first
    `vocab_size`; the bias has none.
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
    """Return the entropy of each row's softmax(x W^T + bias), in nats, [M] fp32 or wider, without gradient."""
    products_table_VD = _for_products(table_VD)
    entropies = []
    for x_CD in x_MD.split(CHUNK_ROWS):
        logits_CV = _logits(x_CD.to(products_table_VD.dtype), products_table_VD, bias_V, vocab_size)
        mean_logit_C = (logits_CV.softmax(1) * logits_CV).sum(1)
        entropies.append(logits_CV.logsumexp(1) - mean_logit_C)
    return torch.cat(entropies)


def _logits(x_MD: torch.Tensor, table_VD: torch.Tensor, bias_V: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return x W^T + bias, [M, vocab_size] in fp32 or wider; rows that pad the table W are left out."""
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
