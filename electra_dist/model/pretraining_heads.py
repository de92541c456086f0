"""Defines the heads of the towers: they hold the weights and call the fused losses of `electra_kernels`.

Guarantee: the generator's head is Dense(H -> E) + GELU + LayerNorm, times the tied token table, plus one bias per
token of the vocabulary. The discriminator's is Dense(H -> H) + GELU, then Dense(H -> 1). Logits over the vocabulary
are computed for the given states only, usually those of the masked positions. The pad rows of the table are neither
predicted nor sampled. Losses are fp32 whatever the dtype of the parameters.

How: the table is an argument of `GeneratorHead.forward` and no parameter of the head. The objective reads it from the
embeddings in its own forward pass, in which ZeRO-3 gathers it.

Shapes: M masked slots, H hidden width, E embedding width, V padded vocabulary, B rows, S tokens, T = B * S.
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
    """Head that predicts tokens, and whose output matrix is the token table of the network that it follows.

    It is used for the generator, and for the large network of objectives that train it to predict tokens.
    """

    def __init__(self, model: ModelConfig, hidden_size: int, embedding_size: int) -> None:
        """Create the dense layer, the LayerNorm and the output bias.

        Args:
            model: vocabulary size and eps.
            hidden_size: width H of the states that the head reads.
            embedding_size: width E of the token table.
        """
        super().__init__()
        self.vocab_size = model.vocab_size
        self.dense = Linear(hidden_size, embedding_size)
        self.layer_norm = nn.LayerNorm(embedding_size, eps=model.layer_norm_eps)
        self.bias = nn.Parameter(torch.zeros(model.vocab_size))

    def transform(self, hidden_MH: torch.Tensor) -> torch.Tensor:
        """Return the features that are multiplied with the token table, [M, E]: LayerNorm(GELU(Dense(states))).

        Args:
            hidden_MH: the tower's states at the M masked positions.
        """
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
        temperature: float | torch.Tensor,
        disallow_correct: bool,
        backend: str,
    ) -> MlmHeadOutput:
        """Return the weighted sum of the losses, one sampled token per slot, and counts for metrics.

        A slot is a place for one masked position. Every row has the same number of slots, so some may be unused; M is
        the number of slots of all rows. Samples are a function of (seed, step, row_M), the logits and the temperature,
        and carry no gradient. `electra_kernels.mlm_head.mlm_head_loss_and_sample` computes everything after
        `transform`.

        Args:
            hidden_MH: the network's states at the slots' positions.
            table_VE: token table; the rows beyond the vocabulary, which only pad it, are neither predicted nor
                sampled.
            target_M: int64 original tokens.
            weight_M: weights in the loss; 0 for unused slots.
            seed: the run's seed.
            step: number of the optimizer step.
            row_M: int64 numbers of the slots within the step's global batch, which key the samples.
            key_2: int64 seed and step on the device, which kernels read instead of the two integers; None: made from
                them.
            temperature: divides the logits before sampling, a number or a float64 scalar tensor on their device; the
                loss does not use it.
            disallow_correct: never sample a slot's original token.
            backend: `kernels.backend` of the config.
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
    """Replaced-token-detection head: one logit per token, positive for "replaced"."""

    def __init__(self, model: ModelConfig) -> None:
        """Create the layers Dense(H -> H) and Dense(H -> 1), where H is the hidden width of the discriminator."""
        super().__init__()
        width = model.discriminator.hidden_size
        self.dense = Linear(width, width)
        self.out = nn.Linear(width, 1)

    def logits(self, hidden_BSH: torch.Tensor) -> torch.Tensor:
        """Return the logit of every token, [B, S] in fp32 (fp64 for fp64 states).

        Use it for losses that `forward`, which computes logits and loss in one fused operation, does not cover: the
        objective `electric` adds an offset to the logits before the loss.

        Args:
            hidden_BSH: states of the discriminator.
        """
        logits_BS = self.out(F.gelu(self.dense(hidden_BSH))).squeeze(-1)
        return logits_BS.to(torch.promote_types(logits_BS.dtype, torch.float32))

    def forward(
        self, hidden_BSH: torch.Tensor, label_BS: torch.Tensor, mask_BS: torch.Tensor, *, backend: str
    ) -> RtdOutput:
        """Return the sum of the binary cross-entropy over the tokens, the logits, and counts for the metrics.

        The caller turns the weighted sum into a mean. `electra_kernels.discriminator_tail.rtd_loss` computes it.

        Args:
            hidden_BSH: states of the discriminator.
            label_BS: bool, True for replaced tokens.
            mask_BS: weight of each token in the loss, bool or float; 0 on pads.
            backend: `kernels.backend` of the config.
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
