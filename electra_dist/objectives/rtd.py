"""Replaced-token detection, the paper's objective.

    ids -> masked ids -> generator -> masked slots -> head: MLM loss and samples
        -> ids with the samples in place, labels -> discriminator -> head: RTD loss over every real token
    loss = mlm_weight * mlm_loss_sum * mlm_scale + rtd_weight * rtd_loss_sum * rtd_scale

Where it stops: [CLS], [SEP] and every unmasked token count in the RTD loss, as in the reference; pads do not.
"""

from __future__ import annotations

import torch
from electra_kernels.discriminator_tail import RtdOutput

from electra_dist.objectives.base import Batch, StepOutput, rtd_sums
from electra_dist.objectives.corruption import CorruptingObjective, Corruption


class ReplacedTokenDetection(CorruptingObjective):
    """Both towers and the objective between them."""

    def forward(
        self,
        ids_BS: torch.Tensor,
        row_B: torch.Tensor,
        step: int,
        seed: int,
        mlm_scale: float | torch.Tensor,
        rtd_scale: float | torch.Tensor,
    ) -> StepOutput:
        """See `Objective.forward`."""
        batch = self.batch(ids_BS, row_B, step, seed)
        corruption = self.corrupt(batch, mlm_scale)
        rtd = self.detect(batch, corruption, batch.layout.is_real_BS)
        loss = corruption.loss + self.objective.rtd_weight * rtd_scale * rtd.loss_sum
        return self.output(batch, loss, corruption.sums | rtd_sums(rtd), rtd.logits_T, corruption.label_BS)

    def detect(self, batch: Batch, corruption: Corruption, weight_BS: torch.Tensor) -> RtdOutput:
        """The discriminator's loss over the tokens of positive weight."""
        hidden = self.read(batch, corruption.corrupted_BS)
        return self.towers.discriminator_head(hidden, corruption.label_BS, weight_BS, backend=self.backend)
