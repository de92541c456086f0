"""Define the heads of the towers: they hold the weights and call the fused losses of `electra_kernels`.

Guarantee: the generator's head is Dense(H -> E) + GELU + LayerNorm, times the token table, plus one bias per token of
the vocabulary. The discriminator's is Dense(H -> H) + GELU, then Dense(H -> 1). Logits over the vocabulary are
computed for the given states only, usually those of the masked positions. The rows that pad the table are neither
predicted nor sampled. Losses are fp32 whatever the dtype of the parameters.

How: the table is an argument of `GeneratorHead.forward` and not a parameter of the head. The objective reads it from
the embeddings in its own forward pass, in which ZeRO-3 gathers it.

Shapes: M masked positions, H hidden width, E embedding width, V padded vocabulary, B rows, S tokens, T = B * S.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from electra_kernels.discriminator_tail import RtdOutput, rtd_loss
from electra_kernels.mlm_head import MlmHeadOutput, mlm_head_loss_and_sample
from torch import nn

from electra_dist.config import ModelConfig
from electra_dist.model.matrix_products import Linear, linear


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
        key_2: torch.Tensor | None = None,
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
            key_2=key_2,
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
