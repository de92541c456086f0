"""Implements replaced-token detection (RTD), the objective of the ELECTRA paper.

    ids -> masked ids -> generator -> masked slots -> head: MLM loss and samples
        -> ids with the samples in place, labels -> discriminator -> head: RTD loss over every real token
    loss = mlm_weight * first_scale * mlm_loss_sum + rtd_weight * second_scale * rtd_loss_sum

[CLS], [SEP] and every unmasked token count in the RTD loss, as in the reference. Pads do not.
"""

from __future__ import annotations

import torch
from electra_kernels.discriminator_tail import RtdOutput

from electra_dist.objectives.base import Batch, StepOutput, rtd_sums
from electra_dist.objectives.corruption import CorruptingObjective, Corruption


class ReplacedTokenDetection(CorruptingObjective):
    """Replaced-token detection: the generator replaces tokens, the discriminator detects which ones."""

    def compute_loss(self, batch: Batch) -> StepOutput:
        """Return the sum of the generator's MLM loss and the discriminator's RTD loss, each scaled and weighted.

        `batch.first_scale` must be 1 / (number of masked slots) and `batch.second_scale` 1 / (number of real tokens);
        `loss_counts` returns these numbers.
        """
        corruption = self.corrupt(batch)
        rtd = self.detect(batch, corruption)
        loss = corruption.loss + self.objective.rtd_weight * batch.second_scale * rtd.loss_sum
        return self.output(batch, loss, corruption.sums | rtd_sums(rtd), rtd.logits_T, corruption.label_BS)

    def detect(self, batch: Batch, corruption: Corruption) -> RtdOutput:
        """Run the discriminator on the corrupted rows; return its loss sum, its logits and counts for the metrics.

        Args:
            batch: the original rows.
            corruption: the corrupted rows and their labels, from `corrupt`.
        """
        weight_BS = self.detection_weights(batch, corruption)
        hidden_BSH = self.read(batch, corruption.corrupted_BS)
        return self.towers.discriminator_head(hidden_BSH, corruption.label_BS, weight_BS, backend=self.backend)

    def detection_weights(self, batch: Batch, corruption: Corruption) -> torch.Tensor:
        """Return the weight of each token in the discriminator's loss, [B, S], bool or float.

        In this class all real tokens weigh 1 and pads weigh 0. Subclasses override it.
        """
        return batch.layout.is_real_BS
