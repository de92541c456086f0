"""Define the heads of the architecture `modern`, which predict tokens or detect replaced tokens.

Guarantee: the same functions as the heads of Hugging Face's ModernBertForMaskedLM and ModernBertForTokenClassification
on the same weights. Losses are at least fp32, whatever the dtype of the parameters.

Shapes: M masked positions, H hidden width, E embedding width, B rows, S tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from electra_kernels.discriminator_tail import RtdOutput, rtd_loss_of_logits
from torch import nn
from typing_extensions import override

from electra_dist.config import ModelConfig
from electra_dist.model.matrix_products import Linear
from electra_dist.model.pretraining_heads import DiscriminatorHead, GeneratorHead


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

    def forward(
        self, hidden_BSH: torch.Tensor, label_BS: torch.Tensor, mask_BS: torch.Tensor, *, backend: str
    ) -> RtdOutput:
        """Return what the base class returns; `backend` has no effect, because no kernel fuses this head."""
        return rtd_loss_of_logits(self.logits(hidden_BSH).flatten(), label_BS.flatten(), mask_BS.flatten())
