"""Implements replaced-token detection (RTD), the objective of the ELECTRA paper.

1. Some tokens of each row are masked, and the generator reads the masked rows.
2. At each masked position, the generator's head computes the MLM loss and samples a token.
3. The samples replace the masked tokens. A token that differs from the original gets label 1, every other label 0.
4. The discriminator reads these corrupted rows, and its head computes the RTD loss of every real token.

    loss = mlm_weight * first_scale * mlm_loss_sum + rtd_weight * second_scale * rtd_loss_sum

With `discriminator_mlm_weight` above 0 ("joint MLM") the discriminator also predicts the original tokens at the masked
positions, from the corrupted rows. Its token head has a dense layer, a LayerNorm and a bias of its own; the output
matrix is the token table that the discriminator reads. The loss gets a third term,

    discriminator_mlm_weight * first_scale * token_loss_sum

[CLS], [SEP] and every unmasked token count in the RTD loss, as in Google's code. Pads do not.
"""

from __future__ import annotations

import torch
from electra_kernels.discriminator_tail import RtdOutput

from electra_dist.objectives.base import Batch, StepOutput, rtd_sums
from electra_dist.objectives.corruption import CorruptingObjective, Corruption
from electra_dist.objectives.mlm import predict_slots, token_sums
from electra_dist.objectives.scheduled_values import weighted


class ReplacedTokenDetection(CorruptingObjective):
    """Replaced-token detection, the objective of the ELECTRA paper.

    A generator replaces masked tokens by its samples, and the discriminator classifies every token as original or
    replaced.
    """

    def compute_loss(self, batch: Batch) -> StepOutput:
        """Return the sum of the generator's MLM loss and the discriminator's detection loss, each scaled and weighted.

        The generator's loss is a sum over the masked positions, which `batch.first_scale` turns into a mean: it must
        be 1 / (number of masked positions). The discriminator's is a sum over the real tokens, and
        `batch.second_scale` must be 1 / (number of real tokens). `loss_counts` returns these two numbers.

        With `discriminator_mlm_weight` above 0 the discriminator's own MLM loss is added. It is a sum over the masked
        positions, too, and has the scale `batch.first_scale`.
        """
        corruption = self.corrupt(batch)
        hidden_BSH = self.read(batch, corruption.corrupted_BS)
        rtd = self.classify(batch, corruption, hidden_BSH)
        loss = corruption.loss + weighted(batch.values.rtd_weight, batch.second_scale, rtd.loss_sum)
        sums = corruption.sums | rtd_sums(rtd)
        if self.objective.discriminator_mlm_weight:
            prediction = predict_slots(self, batch, corruption.masking, hidden_BSH)
            loss = loss + self.objective.discriminator_mlm_weight * batch.first_scale * prediction.loss_sum
            sums |= token_sums(prediction)
        return self.output(batch, loss, sums, rtd.logits_T, corruption.label_BS, corruption.corrupted_BS)

    def detect(self, batch: Batch, corruption: Corruption) -> RtdOutput:
        """Run the discriminator on the corrupted rows; return its loss sum, its logits and counts for the metrics.

        Args:
            batch: the original rows.
            corruption: the corrupted rows and their labels, from `corrupt`.
        """
        return self.classify(batch, corruption, self.read(batch, corruption.corrupted_BS))

    def classify(self, batch: Batch, corruption: Corruption, hidden_BSH: torch.Tensor) -> RtdOutput:
        """Classify every token by the discriminator's states; return the loss sum, the logits and counts.

        Args:
            batch: the original rows.
            corruption: the corrupted rows and their labels, from `corrupt`.
            hidden_BSH: states of the discriminator on the corrupted rows, from `read`.
        """
        weight_BS = self.detection_weights(batch, corruption)
        return self.towers.discriminator_head(hidden_BSH, corruption.label_BS, weight_BS, backend=self.backend)

    def detection_weights(self, batch: Batch, corruption: Corruption) -> torch.Tensor:
        """Return the factor of each token's loss in the sum that is the discriminator's loss, [B, S], bool or float.

        In this class every real token has weight 1 and every pad weight 0. A subclass whose loss covers fewer tokens
        overrides it.
        """
        return batch.layout.is_real_BS
