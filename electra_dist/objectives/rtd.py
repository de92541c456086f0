"""Replaced-token detection, the paper's objective: one forward from ids to a loss. What the engine wraps.

    ids -> masked ids -> generator -> masked slots -> head: MLM loss and samples
        -> ids with the samples in place, labels -> discriminator -> head: RTD loss over every real token
    loss = mlm_weight * mlm_loss_sum * mlm_scale + rtd_weight * rtd_loss_sum * rtd_scale

Guarantee: masks and samples are functions of (seed, step, row), never of the batch around the row. Losses are fp32
sums times the scales that the caller gives: 1 / global counts for a mean over the global batch, whatever the number of
ranks and micro-batches, or 1 / local counts for Google's mean per replica. A label is 1 only where the id differs from
the original, so a right guess is "original". Samples carry no gradient. Nothing here waits for the device.

Under ZeRO-3 the tied table is read in this module's forward, where DeepSpeed finds and gathers it.

Where it stops: [CLS], [SEP] and every unmasked token count in the RTD loss, as in the reference; pads do not.

Shapes: B rows, S tokens, N slots a row, M = B * N.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from electra_kernels.masked_gather import gather_masked
from electra_kernels.replace import replace_and_label
from torch import nn

from electra_dist.config import ObjectiveConfig
from electra_dist.keyed_random import Purpose, derive_seed
from electra_dist.model.encoder import Noise
from electra_dist.model.rows import SpecialIds, attention_bias, derive
from electra_dist.model.towers import ElectraTowers
from electra_dist.objectives.masking import mask_rows

_GENERATOR, _DISCRIMINATOR = 2**32 - 1, 2**32 - 2  # steps that no run reaches: apart from the loop's own seeds


class RtdSums(NamedTuple):
    """Sums over a batch: what metrics are made of. Add them over micro-batches and ranks, then divide."""

    mlm_loss_sum: float  # nats, weighted
    mlm_weight: float  # used slots
    mlm_correct: float  # slots whose most probable token is the original
    sampled_correct: float  # slots whose sample is the original
    rtd_loss_sum: float  # nats
    tokens: float  # real tokens
    replaced: float  # tokens with label 1
    replaced_correct: float  # of these, logit > 0
    original: float  # real tokens with label 0
    original_correct: float  # of these, logit <= 0


class RtdStepOutput(NamedTuple):
    """What one forward gives. Only `loss` carries a gradient."""

    loss: torch.Tensor  # fp32 scalar
    sums: torch.Tensor  # float64 [len(RtdSums._fields)], in that order; `RtdSums(*sums.tolist())`
    rtd_logit_BS: torch.Tensor  # fp32
    label_BS: torch.Tensor  # bool, True where replaced
    is_real_BS: torch.Tensor  # bool


class ReplacedTokenDetection(nn.Module):
    """Both towers and the objective between them."""

    def __init__(
        self, towers: ElectraTowers, objective: ObjectiveConfig, special: SpecialIds, backend: str = "auto"
    ) -> None:
        """`backend` is `kernels.backend` of the config."""
        super().__init__()
        self.towers = towers
        self.objective = objective
        self.special = special
        self.backend = backend

    def forward(
        self,
        ids_BS: torch.Tensor,
        row_B: torch.Tensor,
        step: int,
        seed: int,
        mlm_scale: float | torch.Tensor,
        rtd_scale: float | torch.Tensor,
    ) -> RtdStepOutput:
        """One forward of both towers.

        Args:
            ids_BS: int64 rows.
            row_B: int64 row numbers within the global batch of this step.
            step: number of the optimizer step.
            seed: the run's seed.
            mlm_scale: factor of the generator's loss sum, 1 / (masked slots of the mean).
            rtd_scale: factor of the discriminator's loss sum, 1 / (real tokens of the mean).
        """
        towers, objective = self.towers, self.objective
        layout = derive(ids_BS, self.special)
        masking = mask_rows(ids_BS, self.special, objective, seed, step, row_B)
        embedded = towers.embed(masking.input_BS, layout)
        bias = attention_bias(layout, embedded.dtype)

        noise = Noise(derive_seed(seed, Purpose.DROPOUT, _GENERATOR), step, row_B, self.backend)
        hidden = towers.generator(embedded, bias, noise)
        N = masking.position_BN.shape[1]
        slot = torch.arange(N, device=ids_BS.device)
        mlm = towers.generator_head(
            gather_masked(hidden, masking.position_BN, backend=self.backend),
            towers.embeddings.word.weight,
            ids_BS.gather(1, masking.position_BN).flatten(),
            masking.weight_BN.flatten(),
            seed=seed,
            step=step,
            row_M=(row_B[:, None] * N + slot).flatten(),
            temperature=objective.temperature,
            disallow_correct=objective.disallow_correct,
            backend=self.backend,
        )

        corrupted, label = replace_and_label(
            ids_BS, masking.position_BN, masking.weight_BN, mlm.sampled_M, backend=self.backend
        )
        noise = noise._replace(seed=derive_seed(seed, Purpose.DROPOUT, _DISCRIMINATOR))
        hidden = towers.discriminator(towers.embed(corrupted, layout), bias, noise)
        rtd = towers.discriminator_head(hidden, label, layout.is_real_BS, backend=self.backend)

        loss = objective.mlm_weight * mlm_scale * mlm.loss_sum + objective.rtd_weight * rtd_scale * rtd.loss_sum
        sums = {
            "mlm_loss_sum": mlm.loss_sum,
            "mlm_weight": mlm.weight_sum,
            "mlm_correct": mlm.correct_sum,
            "sampled_correct": mlm.sampled_correct_sum,
            "rtd_loss_sum": rtd.loss_sum,
            "tokens": rtd.mask_sum,
            "replaced": rtd.replaced_count,
            "replaced_correct": rtd.replaced_correct,
            "original": rtd.original_count,
            "original_correct": rtd.original_correct,
        }
        return RtdStepOutput(
            loss=loss,
            sums=torch.stack([sums[name].detach().double() for name in RtdSums._fields]),
            rtd_logit_BS=rtd.logits_T.detach().float().view_as(ids_BS),
            label_BS=label,
            is_real_BS=layout.is_real_BS,
        )
