"""Define the heads of the architecture `modern`, which predict tokens or detect replaced tokens.

Both have a dense layer, GELU and a LayerNorm without biases, and then an output with a bias. To predict tokens, the
output is the tied token table with one bias per token; to detect replaced tokens, it is one unit.

Guarantee: the same functions as the heads of Hugging Face's ModernBertForMaskedLM and ModernBertForTokenClassification
on the same weights. Losses are at least fp32, whatever the dtype of the parameters.

Shapes: M masked slots, H hidden width, E embedding width, B rows, S tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from electra_kernels.discriminator_tail import RtdOutput, rtd_loss_of_logits
from torch import nn

from electra_dist.config import ModelConfig
from electra_dist.model.matrix_products import Linear
from electra_dist.model.pretraining_heads import DiscriminatorHead, GeneratorHead


class ModernFeatures(nn.Module):
    """First layers of every head of Hugging Face's ModernBERT: Dense(H -> H), GELU and LayerNorm, without biases.

    The heads of fine-tuned models consist of this module and an output layer. The pretraining heads contain layers of
    the same kind as attributes of their own.
    """

    def __init__(self, model: ModelConfig, width: int) -> None:
        """Create the layers with torch's initial weights.

        Args:
            model: gives the eps of the LayerNorm.
            width: H, the hidden width of the encoder.
        """
        super().__init__()
        self.dense = Linear(width, width, bias=False)
        self.layer_norm = nn.LayerNorm(width, eps=model.layer_norm_eps, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return LayerNorm(GELU(Dense(hidden))), [..., H], for the encoder's states `hidden`, [..., H]."""
        return self.layer_norm(F.gelu(self.dense(hidden)))


class ModernTokenHead(GeneratorHead):
    """Head that predicts tokens, of the architecture `modern`; only its output layer has a bias."""

    def __init__(self, model: ModelConfig, hidden_size: int, embedding_size: int) -> None:
        """Create the dense layer, the LayerNorm and the output bias; the output matrix is the token table.

        Args:
            model: gives the size of the vocabulary and eps.
            hidden_size: width of the states that the head reads.
            embedding_size: width of the token table.
        """
        super().__init__(model, hidden_size, embedding_size)
        self.dense = Linear(hidden_size, embedding_size, bias=False)
        self.layer_norm = nn.LayerNorm(embedding_size, eps=model.layer_norm_eps, bias=False)


class ModernDetectionHead(DiscriminatorHead):
    """Head that detects replaced tokens, of the architecture `modern`: it has a LayerNorm before its output unit."""

    def __init__(self, model: ModelConfig) -> None:
        """Create the dense layer, the LayerNorm and the output unit; `model` gives eps and the head's width."""
        super().__init__(model)
        width = model.discriminator.hidden_size
        self.dense = Linear(width, width, bias=False)
        self.layer_norm = nn.LayerNorm(width, eps=model.layer_norm_eps, bias=False)

    def logits(self, hidden_BSH: torch.Tensor) -> torch.Tensor:
        """Return for each token the logit of having been replaced, [B, S] in fp32 (fp64 for fp64 states).

        Args:
            hidden_BSH: states of the discriminator's last layer.
        """
        logits_BS = self.out(self.layer_norm(F.gelu(self.dense(hidden_BSH)))).squeeze(-1)
        return logits_BS.to(torch.promote_types(logits_BS.dtype, torch.float32))

    def forward(
        self, hidden_BSH: torch.Tensor, label_BS: torch.Tensor, mask_BS: torch.Tensor, *, backend: str
    ) -> RtdOutput:
        """Return the sum of the binary cross-entropy over the tokens, the logits, and counts for the metrics.

        Args:
            hidden_BSH: states of the discriminator's last layer.
            label_BS: bool, True for replaced tokens.
            mask_BS: weight of each token in the loss, bool or float; 0 on pads.
            backend: not used, because this head has no fused kernel; `DiscriminatorHead` has the same parameter.
        """
        return rtd_loss_of_logits(self.logits(hidden_BSH).flatten(), label_BS.flatten(), mask_BS.flatten())
