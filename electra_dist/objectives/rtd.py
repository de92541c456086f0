"""Replaced-token detection, the paper's objective.

    ids -> masked ids -> generator -> masked slots -> head: MLM loss and samples
        -> ids with the samples in place, labels -> discriminator -> head: RTD loss over every real token
    loss = mlm_weight * first_scale * mlm_loss_sum + rtd_weight * second_scale * rtd_loss_sum

Where it stops: [CLS], [SEP] and every unmasked token count in the RTD loss, as in the reference; pads do not.
"""

from __future__ import annotations

import torch
from electra_kernels.discriminator_tail import RtdOutput

from electra_dist.objectives.base import Batch, StepOutput, rtd_sums
from electra_dist.objectives.corruption import CorruptingObjective, Corruption


class ReplacedTokenDetection(CorruptingObjective):
    """Both towers and the objective between them."""

    def compute_loss(self, batch: Batch) -> StepOutput:
        """Return the generator's and the discriminator's loss, added."""
        corruption = self.corrupt(batch)
        rtd = self.detect(batch, corruption)
        loss = corruption.loss + self.objective.rtd_weight * batch.second_scale * rtd.loss_sum
        return self.output(batch, loss, corruption.sums | rtd_sums(rtd), rtd.logits_T, corruption.label_BS)

    def detect(self, batch: Batch, corruption: Corruption) -> RtdOutput:
        """Return the discriminator's loss over the tokens that `detection_weights` weighs."""
        weight_BS = self.detection_weights(batch, corruption)
        hidden = self.read(batch, corruption.corrupted_BS)
        return self.towers.discriminator_head(hidden, corruption.label_BS, weight_BS, backend=self.backend)

    def detection_weights(self, batch: Batch, corruption: Corruption) -> torch.Tensor:
        """Return [B, S]: the weight of each token in the discriminator's loss, 0 or False where it has none."""
        return batch.layout.is_real_BS
