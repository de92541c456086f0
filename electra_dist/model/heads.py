"""The heads. Their losses are fused operations of `electra_kernels`; the weights live here.

Guarantee: the generator's head is Dense(H -> E) + GELU + LayerNorm, times the tied token table, plus a bias a token;
the discriminator's is Dense(H -> H) + GELU, then Dense(H -> 1). Logits over the vocabulary exist for masked slots
only, and the pad rows of the table are neither predicted nor sampled. Losses are fp32 whatever the parameters' dtype.

The table is an argument of `GeneratorHead.forward`, not a second registration of the parameter: whoever owns the
embeddings reads it, which is also how ZeRO-3 learns in whose forward it must be gathered.

Shapes: M masked slots, H hidden width, E embedding width, V padded vocabulary, B rows, S tokens, T = B * S.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from electra_kernels.discriminator_tail import RtdOutput, rtd_loss
from electra_kernels.mlm_head import MlmHeadOutput, mlm_head_loss_and_sample
from torch import nn

from electra_dist.config import ModelConfig
from electra_dist.model.linear import Linear, linear


class GeneratorHead(nn.Module):
    """Masked-language-model head over the token table of the tower that it is tied to."""

    def __init__(self, model: ModelConfig, hidden_size: int, embedding_size: int) -> None:
        """`hidden_size` of the states that it reads, `embedding_size` of the table."""
        super().__init__()
        self.vocab_size = model.vocab_size
        self.dense = Linear(hidden_size, embedding_size)
        self.layer_norm = nn.LayerNorm(embedding_size, eps=model.layer_norm_eps)
        self.bias = nn.Parameter(torch.zeros(model.vocab_size))

    def transform(self, hidden_MH: torch.Tensor) -> torch.Tensor:
        """[M, E]: what is multiplied with the token table."""
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
        """Loss, sample and statistics of the masked slots; see `mlm_head_loss_and_sample`."""
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
    """Replaced-token-detection head: one logit a token, positive for "replaced"."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        width = model.discriminator.hidden_size
        self.dense = Linear(width, width)
        self.out = nn.Linear(width, 1)

    def logits(self, hidden_BSH: torch.Tensor) -> torch.Tensor:
        """[B, S] in fp32 (fp64 if the states are), for losses that are no plain cross-entropy of them."""
        logits_BS = self.out(F.gelu(self.dense(hidden_BSH))).squeeze(-1)
        return logits_BS.to(torch.promote_types(logits_BS.dtype, torch.float32))

    def forward(
        self, hidden_BSH: torch.Tensor, label_BS: torch.Tensor, mask_BS: torch.Tensor, *, backend: str
    ) -> RtdOutput:
        """Loss, logits and statistics over the tokens where `mask_BS`; see `rtd_loss`."""
        # The kernel adds the bias itself, fused with GELU, dot and loss.
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
